"""Keys: made, changed, rotated and revoked by the admin port and the command, known to all gateways, told to nobody."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import pty
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from server.errors import CliError
from server.gateway import UpstreamSettings
from server.gateway.access.keys import KeyRing, Principal
from server.gateway.access.records import ADMIN, DOOR, INFER, KEYS_PREFIX, DoorRecord, KeyRecord, digest_of
from server.key_limits import KeyLimits
from tests.server.gateway.commands import command
from tests.server.gateway.harness import ADMIN_KEY, RunningGateway, admin, code, get, new_key, post, running_gateway
from tests.server.gateway.upstream import Answer, upstream
from tests.server.refusals import refuses
from tests.waiting import eventually, wait_until
from weightsync.errors import StoreUnavailable

SETTINGS = UpstreamSettings(scrape_interval_s=3600.0, hold_s=0.0)


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[RunningGateway]:
    with running_gateway(tmp_path, upstream=SETTINGS) as g:
        yield g


async def answered(gateway: RunningGateway, headers: str, status: int) -> Answer | None:
    answer = await gateway.ask(post(headers=headers))
    return answer if answer.status == status else None


async def becomes(gateway: RunningGateway, headers: str, status: int, expected: str) -> None:
    """A request with `headers` comes to be answered so: changes of keys are seen a moment later."""
    assert code(await eventually(lambda: answered(gateway, headers, status))) == (status, expected)


# when a key is asked for


async def test_the_first_key_closes_inference_and_revoking_it_does_not_open_it(gateway: RunningGateway) -> None:
    async with gateway.instance():
        assert (await gateway.ask(post())).status == 200
        await new_key(gateway, scopes=["admin"])
        assert (await gateway.ask(post())).status == 200
        key_id, key = await new_key(gateway)
        assert code(await gateway.ask(post())) == (401, "missing_api_key")
        for line in (key, key.replace("Authorization: Bearer ", "authorization: bearer  ")):
            assert (await gateway.ask(post(headers=line))).status == 200
        await admin(gateway, "DELETE", f"/{key_id}")
        await becomes(gateway, key, 401, "revoked_api_key")
        assert code(await gateway.ask(post())) == (401, "missing_api_key")
        await admin(gateway, "DELETE", f"/{key_id}?forget=true")
        assert code(await gateway.ask(post())) == (401, "missing_api_key")
        listed = orjson.loads((await admin(gateway, "GET", "")).body)
        assert (listed["inference"], len(listed["keys"])) == ("keys", 1)


async def test_the_door_stays_closed_over_a_restart_when_the_last_key_is_gone(tmp_path: Path) -> None:
    with running_gateway(tmp_path, upstream=SETTINGS) as gateway:
        key_id, _ = await new_key(gateway)
        await admin(gateway, "DELETE", f"/{key_id}")
        await admin(gateway, "DELETE", f"/{key_id}?forget=true")
    with running_gateway(tmp_path, upstream=SETTINGS) as gateway:
        assert code(await gateway.ask(post())) == (401, "missing_api_key")
        assert orjson.loads((await admin(gateway, "GET", "")).body) == {"inference": "keys", "keys": []}


async def test_an_operator_opens_it_once_no_key_works_and_the_next_key_closes_it(tmp_path: Path) -> None:
    with (
        running_gateway(tmp_path, upstream=SETTINGS) as one,
        running_gateway(tmp_path, upstream=SETTINGS) as other,
    ):
        key_id, _ = await new_key(one)
        await admin(one, "PATCH", f"/{key_id}", disabled=True)
        assert code(await admin(one, "POST", "/inference/open")) == (409, "keys_in_use")
        await admin(one, "DELETE", f"/{key_id}")
        assert code(await one.ask(post())) == (401, "missing_api_key")
        assert orjson.loads((await admin(one, "POST", "/inference/open")).body) == {"inference": "open"}
        assert code(await one.ask(post())) == (503, "no_instance")
        await becomes(other, "", 503, "no_instance")
        key_id, _ = await new_key(other, scopes=["admin"])
        assert code(await other.ask(post())) == (503, "no_instance")
        await admin(other, "PATCH", f"/{key_id}", scopes=["admin", "infer"])
        assert code(await other.ask(post())) == (401, "missing_api_key")
        await becomes(one, "", 401, "missing_api_key")


async def test_a_store_that_has_lost_its_records_opens_nothing(gateway: RunningGateway) -> None:
    key_id, key = await new_key(gateway)
    for record in gateway.store.list(KEYS_PREFIX)[0]:
        gateway.store.delete(record.key)
    await becomes(gateway, key, 401, "invalid_api_key")
    assert key_id not in gateway.gateway.keys.limits
    assert code(await gateway.ask(post())) == (401, "missing_api_key")


@pytest.mark.parametrize("written", [b"{}", b"not json", b'{"open": "yes", "since": 1.0}'])
async def test_a_door_that_cannot_be_read_is_closed(gateway: RunningGateway, written: bytes) -> None:
    gateway.store.put(DOOR, written)
    await becomes(gateway, "", 401, "missing_api_key")


async def test_a_key_can_be_required_from_the_start(tmp_path: Path) -> None:
    with running_gateway(tmp_path, upstream=SETTINGS, require_key=True) as gateway:
        assert code(await gateway.ask(post())) == (401, "missing_api_key")
        assert code(await gateway.ask(get("/v1/models"))) == (401, "missing_api_key")
        listed = orjson.loads((await admin(gateway, "GET", "")).body)
        assert listed == {"inference": "keys", "keys": []}
        assert code(await admin(gateway, "POST", "/inference/open")) == (409, "key_required")
        assert code(await gateway.ask(post())) == (401, "missing_api_key")


# the life of a key


async def test_a_key_is_shown_once(gateway: RunningGateway) -> None:
    answer = await admin(gateway, "POST", "", name="a person", scopes=["infer", "admin"])
    made = orjson.loads(answer.body)
    assert answer.headers["cache-control"] == "no-store"
    assert re.fullmatch(rf"hs-{made['id']}-[A-Za-z0-9_-]{{43}}", made["key"])
    assert (made["name"], made["scopes"], made["state"]) == ("a person", ["admin", "infer"], "active")
    shown = orjson.loads((await admin(gateway, "GET", f"/{made['id']}")).body)
    assert shown == {k: v for k, v in made.items() if k != "key"}
    listed = (await admin(gateway, "GET", "")).body
    assert orjson.loads(listed)["keys"] == [shown]
    assert hashlib.sha256(made["key"].encode()).hexdigest().encode() not in listed


async def test_what_was_answered_is_in_force(gateway: RunningGateway) -> None:
    for _ in range(10):
        made = orjson.loads((await admin(gateway, "POST", "", name="x")).body)
        line = f"X-Api-Key: {made['key']}\r\n"
        assert code(await gateway.ask(post(headers=line))) == (503, "no_instance")
        await admin(gateway, "DELETE", f"/{made['id']}")
        assert code(await gateway.ask(post(headers=line))) == (401, "revoked_api_key")


async def test_a_rotated_key_keeps_its_prefix_cache_and_its_limits(gateway: RunningGateway) -> None:
    async with gateway.instance() as up:
        key_id, old = await new_key(gateway, limits={"requests_per_min": 100})
        await gateway.ask(post(headers=old))
        rotated = orjson.loads((await admin(gateway, "POST", f"/{key_id}/rotate", grace_s=3600)).body)
        new = f"Authorization: Bearer {rotated['key']}\r\n"
        assert rotated["old_key_until"] > time.time() + 3500
        answer = await eventually(lambda: answered(gateway, new, 200))
        assert answer.headers["x-ratelimit-remaining-requests"] == "98"
        assert (await gateway.ask(post(headers=old))).status == 200  # beside the new one
        assert len({r.headers["x-hotswap-cache-scope"] for r in up.requests}) == 1
        await admin(gateway, "POST", f"/{key_id}/rotate")
        await becomes(gateway, old, 401, "invalid_api_key")
        await becomes(gateway, new, 401, "invalid_api_key")


PAST = time.time() - 1


@pytest.mark.parametrize(
    ("change", "back", "state", "refused"),
    [
        ({"disabled": True}, {"disabled": False}, "disabled", "revoked_api_key"),
        ({"expires_at": PAST}, {"expires_at": None}, "expired", "expired_api_key"),
    ],
)
async def test_a_key_that_does_not_work_for_a_while(
    gateway: RunningGateway, change: dict[str, Any], back: dict[str, Any], state: str, refused: str
) -> None:
    key_id, key = await new_key(gateway, expires_in_s=3600)
    assert (await gateway.ask(post(headers=key))).status == 503
    assert orjson.loads((await admin(gateway, "PATCH", f"/{key_id}", **change)).body)["state"] == state
    await becomes(gateway, key, 401, refused)
    await admin(gateway, "PATCH", f"/{key_id}", **back)
    await becomes(gateway, key, 503, "no_instance")


async def test_an_update_changes_what_it_names(gateway: RunningGateway) -> None:
    key_id, _ = await new_key(gateway, limits={"requests_per_min": 5, "tokens_per_min": 100, "priority": 3})
    body: dict[str, Any] = {"name": "other", "limits": {"requests_per_min": None, "weight": 7}}
    record = orjson.loads((await admin(gateway, "PATCH", f"/{key_id}", **body)).body)
    assert (record["name"], record["scopes"], record["expires_at"]) == ("other", ["infer"], None)
    assert record["limits"] == {
        "requests_per_min": None, "tokens_per_min": 100, "tokens_per_month": None, "concurrency": None,
        "max_output_tokens": None, "priority": 3, "weight": 7,
    }  # fmt: skip
    wait_until(lambda: gateway.gateway.keys.limits[key_id].weight == 7)


async def test_a_revoked_key_stays_revoked(gateway: RunningGateway) -> None:
    key_id, _ = await new_key(gateway)
    assert code(await admin(gateway, "DELETE", f"/{key_id}?forget=true")) == (409, "key_not_revoked")
    assert orjson.loads((await admin(gateway, "DELETE", f"/{key_id}")).body)["state"] == "revoked"
    for method, path in (("PATCH", ""), ("POST", "/rotate"), ("DELETE", "")):
        fields: dict[str, Any] = {"disabled": False} if method == "PATCH" else {}
        assert code(await admin(gateway, method, f"/{key_id}{path}", **fields)) == (409, "key_revoked")
    assert (await admin(gateway, "DELETE", f"/{key_id}?forget=true")).status == 200
    assert code(await admin(gateway, "GET", f"/{key_id}")) == (404, "unknown_key")


async def test_changes_at_the_same_time_are_all_kept(gateway: RunningGateway) -> None:
    key_id, _ = await new_key(gateway)
    limits = [{"requests_per_min": 5}, {"tokens_per_min": 6}, {"concurrency": 7}, {"max_output_tokens": 8}]
    answers = await asyncio.gather(*(admin(gateway, "PATCH", f"/{key_id}", limits=limit) for limit in limits))
    assert {a.status for a in answers} == {200}
    shown = orjson.loads((await admin(gateway, "GET", f"/{key_id}")).body)["limits"]
    assert {k: v for limit in limits for k, v in limit.items()}.items() <= shown.items()


@pytest.mark.parametrize(
    "fields",
    [
        {"name": ""},
        {"name": "x" * 201},
        {"name": "two\nlines"},
        {"scopes": []},
        {"scopes": ["root"]},
        {"scopes": ["infer", "infer", "infer"]},
        {"limits": {"requests_per_min": 0}},
        {"limits": {"requests_per_min": "5"}},
        {"limits": {"requests_per_min": 1.5}},
        {"limits": {"requests": 5}},
        {"limits": {"priority": 10}},
        {"limits": {"weight": 0}},
        {"expires_in_s": -1},
        {"expires_at": 1.0},
        {"expires_in_s": 5, "expires_at": 1e12},
        {"digest": "0" * 64},
    ],
)
async def test_what_cannot_be_a_key_is_refused(gateway: RunningGateway, fields: dict[str, Any]) -> None:
    answer = await admin(gateway, "POST", "", **{"name": "x", **fields})
    assert code(answer) == (400, "invalid_parameter")
    assert orjson.loads((await admin(gateway, "GET", "")).body)["keys"] == []


async def test_ids_are_checked(gateway: RunningGateway) -> None:
    for method, path in (("GET", "/nobody"), ("PATCH", "/nobody"), ("DELETE", "/nobody"), ("POST", "/nobody/rotate")):
        fields: dict[str, Any] = {"disabled": True} if method == "PATCH" else {}
        assert code(await admin(gateway, method, path, **fields)) == (404, "unknown_key")
    assert code(await admin(gateway, "GET", "/a.b")) == (400, "invalid_parameter")


# where keys are known, and where they never are


async def test_a_key_is_nowhere_to_be_found(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with upstream() as up:
        with running_gateway(tmp_path, upstream=SETTINGS, log_level="debug") as gateway:
            gateway.register(up)
            key_id, line = await new_key(gateway, limits={"requests_per_min": 2})
            key = line.split()[2]
            for path in ("/v1/completions", "/nowhere", "/v1/completions", "/v1/completions"):
                await gateway.ask(post(path, b'{"model":"x"}', line))
            for header in ("X-Api-Key", "Api-Key"):
                await gateway.ask(post(headers=f"{header}: {key}\r\n", body=b"not json"))
            await admin(gateway, "GET", "", key=key)
            rotated = orjson.loads((await admin(gateway, "POST", f"/{key_id}/rotate")).body)["key"]
            await admin(gateway, "DELETE", f"/{key_id}")
            await becomes(gateway, f"X-Api-Key: {rotated}\r\n", 401, "revoked_api_key")
            pages = [(await gateway.ask(get(path))).body for path in ("/metrics", "/readyz", "/healthz")]
            seen = [b"\n".join(r.raw_head + r.body for r in up.requests), *pages]
    files = _contents(tmp_path)
    assert any(key_id.encode() in data for data in files)  # its record is in the store
    for secret in (key, rotated):
        bare = secret.removeprefix(f"hs-{key_id}-")
        assert bare not in caplog.text
        assert not [data for data in [*seen, *files] if bare.encode() in data]


def _contents(directory: Path) -> list[bytes]:
    return [path.read_bytes() for path in directory.iterdir() if path.is_file()]


async def test_the_keys_last_read_stay_in_use_while_the_store_is_away(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, key = await new_key(gateway)

    async def away(*_: object) -> None:
        raise StoreUnavailable("/x", "gone", "Wait")

    for name in ("list", "get", "txn", "grant_lease", "keep_alive"):
        monkeypatch.setattr(gateway.gateway.store, name, away)
    assert code(await gateway.ask(post(headers=key))) == (503, "no_instance")
    assert code(await gateway.ask(post(headers="X-Api-Key: some-other-key-there\r\n"))) == (401, "invalid_api_key")
    assert code(await admin(gateway, "POST", "", name="x")) == (503, "store_unavailable")


async def test_a_record_that_cannot_be_read_opens_nothing(tmp_path: Path) -> None:
    with running_gateway(tmp_path, upstream=SETTINGS) as gateway:
        key_id, key = await new_key(gateway)
        gateway.store.put(f"{KEYS_PREFIX}{key_id}", b"{}")
        _, other = await new_key(gateway)
        assert code(await gateway.ask(post(headers=key))) == (503, "no_instance")  # as it was last read
        gateway.store.put(f"{KEYS_PREFIX}zz", b'{"id": 5}')
    with running_gateway(tmp_path, upstream=SETTINGS) as gateway:
        assert code(await gateway.ask(post())) == (401, "missing_api_key")
        assert code(await gateway.ask(post(headers=key))) == (401, "invalid_api_key")
        assert code(await gateway.ask(post(headers=other))) == (503, "no_instance")
        listed = orjson.loads((await admin(gateway, "GET", "")).body)
        assert len(listed["keys"]) == 1


# files


async def test_key_files_are_read_again(tmp_path: Path) -> None:
    file = tmp_path / "api.keys"

    def write(text: str, mode: int = 0o600) -> None:
        fresh = tmp_path / "fresh"
        fresh.write_text(text)
        fresh.chmod(mode)
        fresh.rename(file)

    write("the-first-key-of-all\n")
    with running_gateway(tmp_path, upstream=SETTINGS, api_key_file=file) as gateway:
        one, two = (f"X-Api-Key: the-{n}-key-of-all\r\n" for n in ("first", "second"))
        assert (await gateway.ask(post(headers=one))).status == 503
        write("the-first-key-of-all\nthe-second-key-of-all\n")
        await becomes(gateway, two, 503, "no_instance")
        write("the-second-key-of-all\n")
        await becomes(gateway, one, 401, "invalid_api_key")
        for unfit, mode in (("", 0o600), ("short\n", 0o600), ("the-first-key-of-all\n", 0o644)):
            write(unfit, mode)
            gateway.gateway.key_files.reload()
            assert code(await gateway.ask(post(headers=two))) == (503, "no_instance")
        file.unlink()
        gateway.gateway.key_files.reload()
        assert code(await gateway.ask(post(headers=two))) == (503, "no_instance")
        write("the-first-key-of-all\n")
        await becomes(gateway, one, 503, "no_instance")
        assert code(await gateway.ask(post(headers=two))) == (401, "invalid_api_key")


async def test_the_admin_key_file_is_read_again(tmp_path: Path) -> None:
    with running_gateway(tmp_path, upstream=SETTINGS, admin_key=None) as gateway:
        first = (tmp_path / "admin.key").read_text().strip()
        assert (await admin(gateway, "GET", "", key=first)).status == 200
        (tmp_path / "admin.key").write_text("another-key-for-the-admin\n")

        async def is_known() -> bool:
            return (await admin(gateway, "GET", "", key="another-key-for-the-admin")).status == 200

        await eventually(is_known)
        assert (await admin(gateway, "GET", "", key=first)).status == 401


# the ring itself


def record(name: str, key: str, **fields: Any) -> KeyRecord:
    return KeyRecord(name, name, digest_of(key), ("infer",), 1.0, **fields)


def test_nothing_is_open_before_the_store_was_read() -> None:
    file_key = hashlib.sha256(b"a-key-of-the-file").digest()
    ring = KeyRing({file_key: Principal("f", frozenset({INFER, ADMIN}), file_key)}, required=False)
    for key in (None, b"some other"):
        with refuses(503) as caught:
            ring.authorize(key, INFER)
        assert caught.value.code == "keys_unknown"
    assert ring.authorize(b"a-key-of-the-file", ADMIN).name == "f"
    ring.use_records([])
    assert ring.authorize(None, INFER).name == "anonymous"
    with refuses(401):
        ring.authorize(None, ADMIN)


def test_what_the_store_holds_opens_or_closes_inference() -> None:
    ring, opened = KeyRing({}, required=False), DoorRecord(open=True, since=1.0)
    revoked = record("a", "one", revoked_at=5.0)
    for records, unread, door, is_open in (
        ([], True, None, False),
        ([], True, opened, False),
        ([], False, None, True),
        ([revoked], False, None, False),  # a release that knew no door wrote the store
        ([revoked], False, opened, True),
        ([record("a", "one")], False, opened, False),
    ):
        ring.use_records(records, unread=unread, door=door)
        assert ring.open_inference == is_open, (records, unread, door)


def test_a_key_works_until_the_moment_it_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = KeyRing({}, required=True)
    ring.use_records([record("a", "one", expires_at=1000.0)])
    monkeypatch.setattr(time, "time", lambda: 999.9)
    assert ring.authorize(b"one", INFER).name == "a"
    for now in (1000.0, 1000.1):
        monkeypatch.setattr(time, "time", lambda now=now: now)
        with refuses(401) as caught:
            ring.authorize(b"one", INFER)
        assert caught.value.code == "expired_api_key"


def test_the_old_key_ends_with_its_grace_or_with_the_record() -> None:
    before = record("a", "one", expires_at=time.time() + 3600)
    after, key = before.rotated(7200)
    ring = KeyRing({}, required=True)
    ring.use_records([after])
    until = [ring.authorize(k, INFER).until for k in (b"one", key.encode())]
    assert until == [before.expires_at, before.expires_at]
    ring.use_records([replace(after, old_until=1.0)])
    with refuses(401, match="expired"):
        ring.authorize(b"one", INFER)


def test_a_key_has_the_rank_of_its_record() -> None:
    ring = KeyRing({}, required=True)
    ring.use_records([record("b", "two", limits=KeyLimits(priority=2, weight=3))])
    principal = ring.authorize(b"two", INFER)
    assert (principal.priority, principal.weight, principal.limits) == (2, 3, None)


# the command


async def test_the_command(gateway: RunningGateway) -> None:
    assert "asks for no key" in command(gateway, "keys", "list")
    options = ("--requests-per-min", 60, "--tokens-per-min", 5000, "--concurrency", 3, "--max-output-tokens", 100)
    create = ("create", "somebody", *options, "--priority", 1, "--weight", 2, "--expires", "30d", "--json")
    made = json.loads(command(gateway, "keys", *create))
    assert made["limits"] == {
        "requests_per_min": 60, "tokens_per_min": 5000, "tokens_per_month": None, "concurrency": 3,
        "max_output_tokens": 100, "priority": 1, "weight": 2,
    }  # fmt: skip
    assert abs(made["expires_at"] - time.time() - 30 * 86400) < 600
    await eventually(lambda: made["id"] in gateway.gateway.keys.limits)
    assert (await gateway.ask(post(headers=f"X-Api-Key: {made['key']}\r\n"))).status == 503
    update = ("update", made["id"], "--requests-per-min", "none", "--disable", "--expires", "none")
    assert "is disabled" in command(gateway, "keys", *update)
    shown = json.loads(command(gateway, "keys", "show", made["id"]))
    assert (shown["limits"]["requests_per_min"], shown["expires_at"], shown["state"]) == (None, None, "disabled")
    rotated = command(gateway, "keys", "rotate", made["id"], "--grace", "1h").strip()
    assert re.fullmatch(rf"hs-{made['id']}-\S+", rotated)
    listed = command(gateway, "keys", "list")
    assert "somebody" in listed
    assert rotated not in listed
    assert "forgotten" in command(gateway, "keys", "revoke", made["id"], "--forget")
    assert json.loads(command(gateway, "keys", "list", "--json"))["keys"] == []
    assert "none of these works" in command(gateway, "keys", "list")
    assert "asks for no key" in command(gateway, "keys", "open")
    assert gateway.gateway.keys.open_inference


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("show", "../weights"), "not a key's id"),
        (("create", "x", "--expires", "tomorrow"), "--expires tomorrow"),
        (("create", "x", "--requests-per-min", "many"), "--requests-per-min many"),
        (("update", "abc"), "nothing to change"),
        (("rotate", "abc", "--grace", "1"), "--grace 1"),
        (("revoke", "nobody"), "no key 'nobody'"),
    ],
)
def test_the_command_says_what_is_wrong(gateway: RunningGateway, arguments: tuple[str, ...], says: str) -> None:
    with pytest.raises(CliError, match=re.escape(says)):
        command(gateway, "keys", *arguments)


def test_the_command_says_that_the_first_key_closes_inference_and_asks(gateway: RunningGateway) -> None:
    env = os.environ | {"HOTSWAP_ADMIN_URL": gateway.admin_url, "HOTSWAP_ADMIN_KEY": ADMIN_KEY}
    ours, theirs = pty.openpty()
    os.write(ours, b"n\n")
    about: dict[str, Any] = {"stdin": theirs, "stdout": theirs, "stderr": subprocess.PIPE, "text": True, "timeout": 120}
    for options, status, closes in (
        (("--scope", "viewer"), 0, False),
        ((), 1, True),
        (("--yes",), 0, True),
        ((), 0, False),
    ):
        create = [sys.executable, "-m", "server.cli", "keys", "create", "x", *options]
        done = subprocess.run(create, **about, env=env, check=False)
        said = ["those without get 401" in done.stderr, "then `hotswap keys open`" in done.stderr]
        assert (done.returncode, said) == (status, [closes] * 2)
    assert len(json.loads(command(gateway, "keys", "list", "--json"))["keys"]) == 3, "one was made all the same"
    shown = ""
    while len(re.findall(r"hs-\S+\s", shown)) < 3:  # the kernel hands a terminal's output on in pieces
        shown += os.read(ours, 65536).decode()
    assert shown.count("Make it? [y/N]") == 1
    for fd in (ours, theirs):
        os.close(fd)
