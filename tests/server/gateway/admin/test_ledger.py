"""The ledger over the admin port and the command: who did what, and why; and a chain that was tampered with."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from typer.testing import CliRunner

from server import ledger
from server.cli.app import app
from server.errors import CliError
from server.gateway import GatewayConfig
from server.gateway.observe.tracing import _event
from server.ledger import verify
from tests.server.gateway.commands import command
from tests.server.gateway.harness import ADMIN, RunningGateway, admin, get, new_key, post
from tests.waiting import eventually
from weightsync.control import chain
from weightsync.control.chain import LedgerEntry, entry_key
from weightsync.store import SyncStore


async def entries(gateway: RunningGateway, query: str = "") -> list[dict[str, Any]]:
    """Newest first."""
    answer = await gateway.ask(get(f"/admin/ledger{query}", ADMIN), admin=True)
    assert answer.status == 200, answer.body
    found: list[dict[str, Any]] = orjson.loads(answer.body)["entries"]
    return found


async def test_every_change_of_a_key_names_who_changed_it_and_why(gateway: RunningGateway) -> None:
    key_id, operator = await new_key(gateway, name="ops", scopes=["admin"])
    mine = operator.split()[2]
    made = orjson.loads((await admin(gateway, "POST", "?reason=a%20new%20team%20%C3%A9", mine, name="team")).body)
    for method, path, fields in (
        ("PATCH", f"/{made['id']}", {"limits": {"requests_per_min": 5}, "disabled": True}),
        ("POST", f"/{made['id']}/rotate", {"grace_s": 5}),
        ("DELETE", f"/{made['id']}", {}),
        ("DELETE", f"/{made['id']}?forget=true", {}),
    ):
        assert (await admin(gateway, method, path, mine, **fields)).status == 200
    told = (await entries(gateway))[::-1]
    assert [e["action"] for e in told] == [
        "key_create", "key_create", "key_change", "key_rotate", "key_revoke", "key_forget",
    ]  # fmt: skip
    assert told[0]["who"] == "admin key"
    assert {e["who"] for e in told[1:]} == {f"key ops ({key_id})"}
    assert (told[1]["reason"], told[1]["subject"]) == ("a new team é", f"key team ({made['id']})")
    assert "requests_per_min=5" in told[2]["outcome"]
    assert "disabled: True" in told[2]["outcome"]
    everything = json.dumps(told)
    assert made["key"] not in everything
    for record in gateway.store.list("gateway/keys/")[0]:
        assert orjson.loads(record.value).get("digest", "-") not in everything
    found = gateway.store.run(verify(gateway.store.store))
    assert (found.ok, found.entries) == (True, 6)


async def test_opening_inference_and_a_refused_change(gateway: RunningGateway) -> None:
    key_id, _ = await new_key(gateway, scopes=["viewer"])
    assert (await admin(gateway, "POST", "/inference/open?reason=demo")).status == 200
    assert (await admin(gateway, "PATCH", "/no-such-key", name="x")).status == 404
    assert (await admin(gateway, "DELETE", f"/{key_id}?forget=true")).status == 409
    newest, _ = await entries(gateway)
    assert (newest["action"], newest["reason"]) == ("inference_open", "demo")
    assert (await admin(gateway, "POST", f"?reason={'x' * 501}", name="x")).status == 400


async def test_a_request_for_a_version_names_who_asked(gateway: RunningGateway) -> None:
    answer = await gateway.ask(post("/admin/weights/activate?reason=hm", {"version": 1}, ADMIN), admin=True)
    assert answer.status == 200, answer.body
    told = (await entries(gateway))[::-1]
    assert [(e["action"], e["who"]) for e in told] == [
        ("activate", "admin key"),
        ("commit", "coordinator"),  # it is done once an instance has run it
    ]
    assert (told[0]["reason"], told[0]["version"], told[1]["subject"]) == ("hm", 1, "asked for by admin key")
    assert [e["number"] for e in await entries(gateway, "?limit=1&before=2")] == [1]


async def test_older_entries_leave_the_store_by_themselves(
    gateway: RunningGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"FILE": 10, "KEPT": 80}.items():
        monkeypatch.setattr(ledger, name, value)
    seen: list[LedgerEntry] = []
    gateway.gateway.stats.ledger_told = seen.append
    monkeypatch.setattr(gateway.gateway.ledger, "_leads", lambda: True)  # a lease of 3 s may be lost
    for number in range(100):
        gateway.store.run(chain.append(gateway.store.store, {}, {}, LedgerEntry("publish", "t", version=number)))
    files = tmp_path / "ledger"
    await eventually(lambda: files.is_dir() and len(list(files.glob("ledger-*"))) == 2)
    await eventually(lambda: len(gateway.store.list(chain.ENTRIES)[0]) == 80)
    assert [entry.number for entry in seen] == list(range(1, 101))
    assert gateway.store.run(verify(gateway.store.store)).entries == 100
    assert [e["number"] for e in await entries(gateway, "?limit=200")] == list(range(100, 20, -1))


def test_an_event_has_what_the_entry_says() -> None:
    entry = LedgerEntry("abort", "coordinator", version=3, outcome="a byte flipped", number=7)
    (span,) = _event(entry)
    assert (span.name, span.error, span.started) == ("ledger abort", "a byte flipped", span.ended)
    assert span.attributes["event.name"] == "hotswap.ledger.abort"
    assert (span.attributes["hotswap.ledger.who"], span.attributes["hotswap.ledger.number"]) == ("coordinator", 7)
    assert "hotswap.ledger.reason" not in span.attributes


def test_where_older_entries_go() -> None:
    def place(store: str, **given: str) -> str:
        return GatewayConfig(store=store, model="m", **given).ledger_place  # type: ignore[arg-type]

    assert place("sqlite:///var/h/store.db?id=1") == "/var/h/ledger"
    assert place("etcd://h:1/x") == ""
    assert place("etcd://h:1/x", ledger_archive="s3://b/l") == "s3://b/l"
    assert place("etcd://h:1/x", ledger_archive="/a/b") == "/a/b"


# the command


def run(*words: str, url: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["ledger", *words, "--store", url])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.output


def test_export_and_verify(tmp_path: Path) -> None:
    url, file = f"sqlite://{tmp_path}/store.db", tmp_path / "out.jsonl"
    with contextlib.closing(SyncStore(url)) as store:
        for number in (1, 2, 3):
            store.run(chain.append(store.store, {}, {}, LedgerEntry("publish", "t", version=number, reason="r")))
        head = store.run(verify(store.store)).head
        code, told = run("verify", url=url)
        assert (code, head in told) == (0, True)
        assert run("verify", "--anchor", head, "--json", url=url)[0] == 0
        with pytest.raises(CliError, match="NUMBER:DIGEST"):
            run("verify", "--anchor", "3", url=url)
        run("export", str(file), "--since", "2", url=url)
        lines = file.read_bytes().splitlines()
        assert [LedgerEntry.from_json(line).number for line in lines] == [2, 3]
        assert all(LedgerEntry.from_json(line).expected == orjson.loads(line)["digest"] for line in lines)
        assert "0 entries" in run("archive", str(tmp_path / "old"), url=url)[1]
        found = store.get(entry_key(2))
        assert found is not None
        store.put(entry_key(2), replace(LedgerEntry.from_json(found.value), who="x").to_json())
    code, told = run("verify", url=url)
    assert code == 1
    assert "entry 2 does not fit" in told
    code, told = run("verify", "--json", url=url)
    assert (code, json.loads(told)["number"]) == (1, 2)


def test_the_command_lists_what_a_gateway_has(gateway: RunningGateway) -> None:
    command(gateway, "keys", "create", "x", "--scope", "viewer", "--reason", "a & b")
    (entry,) = json.loads(command(gateway, "ledger", "list", "--json"))["entries"]
    assert (entry["action"], entry["reason"]) == ("key_create", "a & b")
    assert "key_create" in command(gateway, "ledger", "list")
