"""Editions of adapters behind the gateway: which one a request gets, and what its instance is told."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import pytest_asyncio
from safetensors.numpy import save_file
from typer.testing import CliRunner

from server.cli.app import app
from server.gateway.config import UpstreamSettings
from tests.server.gateway.harness import ADMIN_KEY, KEYS, MODEL, RunningGateway, get, new_key, post, running_gateway
from tests.server.gateway.harness import ask as control
from tests.server.gateway.upstream import Answer, Link, Received
from tests.waiting import eventually
from weightsync.control.editions import EditionRecord, key_of

QUIET = UpstreamSettings(scrape_interval_s=3600.0)  # the instance gets the requests of the tests alone
TOLD = "x-hotswap-edition"


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[RunningGateway]:
    with running_gateway(tmp_path, run_coordinator=False, upstream=QUIET) as running:
        yield running


async def said(link: Link, asked: Received) -> None:
    if asked.target == "/v1/models":
        data = [{"id": each, "object": "model"} for each in (MODEL, "tuned", "math@7")]
        await link.json(orjson.dumps({"object": "list", "data": data}))
        return
    told = {"model": orjson.loads(asked.body).get("model"), "told": asked.headers.get(TOLD)}
    await link.json(orjson.dumps(told))


@pytest_asyncio.fixture
async def served(gateway: RunningGateway) -> AsyncIterator[RunningGateway]:
    async with gateway.instance(said):
        yield gateway


async def known(gateway: RunningGateway, *editions: tuple[str, int, float]) -> None:
    """`editions` are all that there are."""
    for name, number, percent in editions:
        record = EditionRecord(name, number, "/nowhere", "", 1, "trainer", 0.0, percent=percent)
        gateway.store.put(key_of(KEYS, name, number), record.to_json())
    there = gateway.gateway.directory.main.fleet.editions
    await eventually(lambda: len(there.records) == len(editions))


async def ask(gateway: RunningGateway, name: str | None, headers: str = "", **more: Any) -> tuple[Answer, Any]:
    body = {"prompt": "a", **({"model": name} if name is not None else {}), **more}
    answer = await gateway.ask(post("/v1/completions", body, headers))
    return answer, orjson.loads(answer.body)


async def test_a_name_gets_the_newest_and_a_number_pins_one(served: RunningGateway) -> None:
    await known(served, ("math", 7, 100.0), ("math", 9, 100.0), ("org/prose", 8, 100.0))
    for name, full in (("math", "math@9"), ("math@7", "math@7"), ("math@9", "math@9"), ("org/prose", "org/prose@8")):
        _, body = await ask(served, name)
        assert body == {"model": full, "told": full}
    for name in (MODEL, "tuned", "tuned@7"):
        _, body = await ask(served, name)
        assert body == {"model": name, "told": None}
    _, body = await ask(served, None)
    assert body == {"model": None, "told": None}
    answer, _ = await ask(served, "math", f"{TOLD}: math@7\r\n")
    assert answer.status == 400, "a client says by the model which one it wants"


async def test_a_publisher_may_know_a_number_before_the_gateway(served: RunningGateway) -> None:
    """The instance waits for it. A number that no publisher can mean stays with vLLM, or is no model."""
    for before in ((), (("math", 7, 100.0),)):
        await known(served, *before)
        for name in ("math@8", "other@9"):
            assert (await ask(served, name))[1] == {"model": name, "told": name}
    for name in (f"other@{10**30}", "other@7", "other@x", "@9"):
        assert (await ask(served, name))[1] == {"model": name, "told": None}


async def test_one_that_was_withdrawn_is_not_there(served: RunningGateway) -> None:
    await known(served, ("math", 7, 100.0), ("math", 9, 100.0))
    served.store.delete(key_of(KEYS, "math", 9))
    fleet = served.gateway.directory.main.fleet
    await eventually(lambda: len(fleet.editions.records) == 1)
    assert (await ask(served, "math"))[1]["told"] == "math@7"
    answer, body = await ask(served, "math@9")
    assert (answer.status, body["error"]["code"]) == (404, "model_not_found")
    served.store.delete(key_of(KEYS, "math", 7))
    await eventually(lambda: not fleet.editions)
    assert (await ask(served, "math"))[1] == {"model": "math", "told": None}, "the instance says that it has none"


async def test_a_share_of_the_requests_and_whole_sessions_get_the_newest(served: RunningGateway) -> None:
    await known(served, ("math", 7, 100.0), ("math", 9, 30.0))
    told = Counter([(await ask(served, "math"))[1]["told"] for _ in range(200)])
    assert told.keys() == {"math@7", "math@9"}
    assert 30 <= told["math@9"] <= 90  # 60 are expected: five deviations to either side
    for number in range(8):
        session = f"x-session-id: s{number}\r\n"
        assert len({(await ask(served, "math", session))[1]["told"] for _ in range(5)}) == 1
    sessions = {(await ask(served, "math", f"x-session-id: s{number}\r\n"))[1]["told"] for number in range(40)}
    assert sessions == {"math@7", "math@9"}


async def test_the_list_has_the_names_and_no_edition_that_an_instance_happens_to_have(served: RunningGateway) -> None:
    await known(served, ("math", 7, 100.0), ("math", 9, 100.0))
    listed = orjson.loads((await served.ask(get("/v1/models"))).body)["data"]
    assert {entry["id"]: entry.get("hotswap") for entry in listed} == {
        MODEL: None,
        "tuned": None,
        "math": {"editions": [9, 7]},
    }


async def test_a_key_for_a_name_may_pin_its_editions(served: RunningGateway) -> None:
    await known(served, ("math", 7, 100.0), ("prose", 8, 100.0))
    _, header = await new_key(served, models=["math"])
    for name, status in (("math", 200), ("math@7", 200), ("prose", 404), ("prose@8", 404), (MODEL, 404)):
        answer, _ = await ask(served, name, header)
        assert answer.status == status, name


async def test_a_record_that_cannot_be_read_stops_no_request(served: RunningGateway) -> None:
    served.store.put(key_of(KEYS, "math", 6), b"{}")
    await known(served, ("math", 7, 100.0))
    assert (await ask(served, "math"))[1]["told"] == "math@7"


async def test_an_operator_shifts_the_share_and_withdraws(served: RunningGateway) -> None:
    await known(served, ("math", 7, 100.0), ("math", 9, 10.0))
    fleet = served.gateway.directory.main.fleet
    _, listed = await control(served, "GET", "/editions")
    assert [(e["id"], e["percent"]) for e in listed["editions"]] == [("math@7", 100.0), ("math@9", 10.0)]
    status, shifted = await control(served, "PUT", "/editions/9?reason=good", percent=100.0)
    assert (status, shifted["percent"]) == (200, 100.0)
    await eventually(lambda: fleet.editions.find("math") == "math@9")
    assert (await control(served, "PUT", "/editions/9?reason=trial", percent=0))[0] == 200
    await eventually(lambda: fleet.editions.find("math") == "math@7")
    assert fleet.editions.find("math@9") == "math@9", "an edition on trial is for those that pin it"
    for percent in (-1, 101, "9"):
        status, _ = await control(served, "PUT", "/editions/9", percent=percent)
        assert status in (400, 422)
    assert (await control(served, "DELETE", "/editions/9"))[0] == 200
    await eventually(lambda: fleet.editions.find("math") == "math@7")
    status, missing = await control(served, "DELETE", "/editions/9")
    assert (status, missing["code"]) == (404, "unknown_edition")
    _, told = await control(served, "GET", "/ledger")
    assert sorted((e["action"], e["subject"], e["reason"]) for e in told["entries"]) == [
        ("split", "math@9", "good"), ("split", "math@9", "trial"), ("withdraw", "math@9", ""),
    ]  # fmt: skip


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/messages", "/generate"])
async def test_every_route_that_names_a_model_is_for_the_edition(served: RunningGateway, route: str) -> None:
    await known(served, ("math", 7, 100.0))
    answer = await served.ask(post(route, {"model": "math", "messages": [], "prompt": "a", "max_tokens": 1}))
    assert orjson.loads(answer.body)["told"] == "math@7"


@pytest.mark.parametrize(
    ("guarded", "method", "path", "body"),
    [
        ("activate", "POST", "/editions", {"name": "math", "path": "/nowhere"}),
        ("split", "PUT", "/editions/7", {"percent": 10.0}),
        ("rollback", "DELETE", "/editions/7", {}),
    ],
)
async def test_no_edition_goes_round_an_approval(
    served: RunningGateway, guarded: str, method: str, path: str, body: dict[str, Any]
) -> None:
    await known(served, ("math", 7, 100.0))
    assert (await control(served, "PUT", "/policy", approvals=[guarded]))[0] == 200
    status, refused = await control(served, method, path, **body)
    assert (status, refused["code"]) == (409, "approval_required")
    assert (await ask(served, "math"))[1]["told"] == "math@7"
    assert (await control(served, "GET", "/editions"))[1]["editions"][0]["percent"] == 100.0


async def test_editions_from_the_shell(served: RunningGateway, tmp_path: Path) -> None:
    async def run(*words: str) -> str:
        env = {"COLUMNS": "200", "HOTSWAP_ADMIN_KEY": ADMIN_KEY}
        url = ("--url", f"http://127.0.0.1:{served.admin_port}")
        done = await asyncio.to_thread(CliRunner().invoke, app, ["editions", *words, *url], env=env)
        return done.output + str(done.exception or "")

    await known(served, ("math", 7, 100.0), ("math", 9, 10.0))
    listed = await run("list")
    assert "math@7" in listed
    assert "math@9" in listed
    assert await run("share", "9", "50", "--reason", "good") == "math@9 gets 50 %\n"
    assert await run("withdraw", "7") == "math@7 is withdrawn\n"
    assert [each["id"] for each in orjson.loads(await run("list", "--json"))["editions"]] == ["math@9"]
    assert "There is no edition 7" in await run("withdraw", "7")
    assert "has no *.safetensors" in await run("publish", "math", str(tmp_path))
    save_file({"a.lora_A.weight": np.zeros((2, 4), np.float32)}, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2}')
    said = await run("publish", "math", str(tmp_path), "--percent", "0")
    assert re.fullmatch(r"math@\d+ is on trial: requests that name it so get it\n", said)
    said = await run("publish", "math", str(tmp_path), "--percent", "30")
    assert re.fullmatch(r"math@\d+ gets 30 % of the requests for math\n", said)
