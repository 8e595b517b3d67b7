"""Versions that a request asks for: read and refused, spoofed, routed, sent on when refused, and waited for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from server.gateway import UpstreamSettings, terms
from server.gateway.access.keys import Principal
from server.gateway.config import Failover, KvSettings
from server.gateway.fleet.routing import Need
from server.gateway.wire.bodies import check_object
from tests.server.gateway.harness import KEYS, Client, RunningGateway, get, new_key, post, running_gateway
from tests.server.gateway.upstream import Handler, Link, Received, Upstream, answer_json, answering
from tests.server.refusals import refuses
from tests.waiting import eventually
from weightsync.control.records import ActiveRecord, SwapRecord

UPSTREAM = UpstreamSettings(scrape_interval_s=3600.0, max_idle_s=3600.0, hold_s=0.0)


def commit(gateway: RunningGateway, version: int, epoch: int) -> None:
    """Writes the commit record; the gateway sees it before what is registered next."""
    active = ActiveRecord(version, epoch, previous=None, swap_id="s", committed_at=0.0)
    gateway.store.put(KEYS.active, active.to_json())


@asynccontextmanager
async def serving(gateway: RunningGateway, version: int, handler: Handler = answer_json) -> AsyncIterator[Upstream]:
    """One instance that runs `version`, which is committed."""
    commit(gateway, version, version)
    async with gateway.instance(handler, active_version=version, active_epoch=version) as up:
        yield up


@asynccontextmanager
async def beside_another(gateway: RunningGateway, handler: Handler) -> AsyncIterator[tuple[Upstream, Upstream]]:
    """Two instances that run version 4, which is committed: by `handler`, and one that answers."""
    asked = gateway.instance(handler, "a", active_version=4, active_epoch=4)
    async with serving(gateway, 4) as well, asked as other:
        yield other, well


def sent(up: Upstream) -> dict[str, str]:
    """The internal headers of the last request an instance got."""
    return {k: v for k, v in up.requests[-1].headers.items() if k.startswith("x-hotswap-")}


@asynccontextmanager
async def waiting(gateway: RunningGateway, headers: str) -> AsyncIterator[Client]:
    """A client whose request is held."""
    room = gateway.gateway.default.fleet.room
    before = len(room)
    async with gateway.client(post(headers=headers)) as client:
        await eventually(lambda: len(room) == before + 1)
        yield client


# reading


@pytest.mark.parametrize(
    ("headers", "field", "lines"),
    [
        ({}, None, {}),
        ({b"x-hotswap-policy": b"abort"}, None, {"policy": "abort"}),
        (
            {b"x-hotswap-policy": b"finish", b"x-hotswap-finish-s": b"2.50"},
            None,
            {"policy": "finish", "finish-s": "2.5"},
        ),
        ({b"x-hotswap-version": b"7", b"x-hotswap-wait-s": b"1"}, None, {"version": "7"}),
        ({}, {"min_version": 3, "policy": "keep"}, {"min-version": "3", "policy": "keep"}),
        ({}, {"version": 4, "min_version": 3, "finish_s": 9}, {"version": "4", "min-version": "3", "finish-s": "9.0"}),
        ({b"x-hotswap-version": b"4"}, {"version": 4, "wait_s": 0}, {"version": "4"}),
        ({b"x-hotswap-kv": b"session"}, {"kv": "session"}, {}),
        ({}, {"policy": None}, {}),
        ({}, {}, {}),
    ],
)
def test_what_goes_upstream(headers: dict[bytes, bytes], field: Any, lines: dict[str, str]) -> None:
    body = b'{"prompt":"x"}' if field is None else orjson.dumps({"prompt": "x", "hotswap": field})
    asked, rest = terms.read(headers, body, in_body=check_object(body).has_wish)
    assert rest == b'{"prompt":"x"}'
    assert dict(line.split(": ") for line in asked.lines.decode().splitlines()) == {
        f"x-hotswap-{name}": value for name, value in lines.items()
    }
    assert (asked.need is not None) == bool(lines.keys() & {"version", "min-version"})


def test_the_rest_of_the_body_keeps_its_bytes() -> None:
    body = (
        b'{"a": 1.0e5, "hotswap": {"version": 2}, "b":[ 12345678901234567890123 , "\\u00e9"], "hotswap":{"version":3}}'
    )
    assert check_object(body).has_wish
    asked, rest = terms.read({}, body, in_body=True)
    assert rest == b'{"a":1.0e5,"b":[ 12345678901234567890123 , "\\u00e9"]}'
    assert asked.need is not None
    assert asked.need.version == 3  # the last one counts, as everywhere in JSON
    for other in (b'{"model":"hotswap"}', b'{"a":{"hotswap":{"version":1}}}', rb'{"prompt":"say \"hotswap\""}'):
        assert not check_object(other).has_wish


def test_a_request_may_ask_for_its_keys_priority_or_a_higher_number() -> None:
    key = Principal("p", frozenset(), priority=2)
    for wish, found in ((b"", 2), (b'"priority":2', 2), (b'"priority":3', 3)):
        asked, _ = terms.read({}, b'{"hotswap":{%b}}' % wish, in_body=True)
        assert terms.priority_within(asked, key) == found
    asked, _ = terms.read({}, b'{"hotswap":{"priority":1}}', in_body=True)
    with refuses(403):
        terms.priority_within(asked, key)


@pytest.mark.parametrize(
    ("wish", "mode", "found"),
    [
        (b"", "any", "any"),
        (b'"policy":"finish"', "any", "same"),
        (b'"policy":"abort"', "any", "same"),
        (b'"version":3', "any", "same"),
        (b'"policy":"finish"', "off", "off"),
        (b'"policy":"keep","failover":"any"', "same", "any"),
        (b'"failover":"off"', "any", "off"),
    ],
)
def test_an_answer_that_one_version_must_give_is_gone_on_with_by_no_other(
    wish: bytes, mode: Failover, found: str
) -> None:
    asked, _ = terms.read({}, b'{"hotswap":{%b}}' % wish, in_body=True)
    assert asked.failover_or(mode) == found


@pytest.mark.parametrize(
    ("version", "need", "met"),
    [
        (4, Need(4, None, 0.0), True),
        (5, Need(4, None, 0.0), False),
        (5, Need(None, 4, 0.0), True),
        (4, Need(None, 4, 0.0), True),
        (3, Need(None, 4, 0.0), False),
        (4, Need(4, 3, 0.0), True),
        (None, Need(None, 1, 0.0), False),
    ],
)
def test_what_meets_a_need(version: int | None, need: Need, met: bool) -> None:
    assert need.met_by(version) is met


@pytest.mark.parametrize(
    ("headers", "field", "param"),
    [
        ("X-Hotswap-Policy: restart\r\n", {}, "x-hotswap-policy"),
        ("X-Hotswap-Version: 0\r\n", {}, "x-hotswap-version"),
        ("X-Hotswap-Version: -1\r\n", {}, "x-hotswap-version"),
        ("X-Hotswap-Version: 9999999999999999999\r\n", {}, "x-hotswap-version"),
        ("X-Hotswap-Version: \r\n", {}, "x-hotswap-version"),
        ("X-Hotswap-Min-Version: 1.5\r\n", {}, "x-hotswap-min-version"),
        ("X-Hotswap-Version: 1\r\nX-Hotswap-Wait-S: inf\r\n", {}, "x-hotswap-wait-s"),
        ("X-Hotswap-Version: 1\r\nX-Hotswap-Wait-S: 601\r\n", {}, "x-hotswap-wait-s"),
        ("X-Hotswap-Policy: finish\r\nX-Hotswap-Finish-S: 0\r\n", {}, "x-hotswap-finish-s"),
        ("X-Hotswap-Version: 1\r\nX-HOTSWAP-VERSION: 1\r\n", {}, "x-hotswap-version"),
        ("X-Hotswap-Cache-Scope: public\r\n", {}, "x-hotswap-cache-scope"),
        ("X-Hotswap-Refused: version\r\n", {}, "x-hotswap-refused"),
        ("X-Hotswap-Verison: 1\r\n", {}, "x-hotswap-verison"),
        ("X-HOTSWAP-PROBE: 1\r\n", {}, "x-hotswap-probe"),
        ("x-hotswap-resume: 1\r\n", {}, "x-hotswap-resume"),
        ("x-hotswap-resumable: 1\r\n", {}, "x-hotswap-resumable"),
        ("x-hotswap-resumed: 1\r\n", {}, "x-hotswap-resumed"),
        ("x-hotswap-weight-version: 1\r\n", {}, "x-hotswap-weight-version"),
        ("x-hotswap-: 1\r\n", {}, "x-hotswap-"),
        ("", None, "hotswap"),
        ("", [], "hotswap"),
        ("", "version", "hotswap"),
        ("", 7, "hotswap"),
        ("", {"version": "1"}, "hotswap.version"),
        ("", {"version": True}, "hotswap.version"),
        ("", {"version": 0}, "hotswap.version"),
        ("", {"version": 2**63}, "hotswap.version"),
        ("", {"min_version": -1}, "hotswap.min_version"),
        ("", {"version": 1, "wait_s": -1}, "hotswap.wait_s"),
        ("", {"policy": "KEEP"}, "hotswap.policy"),
        ("", {"cache_scope": "public"}, "hotswap"),
    ],
)
async def test_what_cannot_be_asked_for_is_400(gateway: RunningGateway, headers: str, field: Any, param: str) -> None:
    async with serving(gateway, 1) as up:
        answer = await gateway.ask(post("/generate", {"prompt": "x", "hotswap": field}, headers))
        assert (answer.refusal, answer.error["param"]) == ((400, "invalid_parameter"), param)
        assert up.requests == []


async def test_a_deep_or_huge_field_does_not_hurt(gateway: RunningGateway) -> None:
    async with serving(gateway, 1) as up:
        deep = b'{"hotswap":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
        assert (await gateway.ask(post("/generate", deep))).status == 400
        many = b'{"hotswap":{"version":1},"prompt":[' + b"[]," * 1_000_000 + b"1]}"
        assert (await gateway.ask(post("/generate", many))).status == 200
        assert up.requests[-1].body == many.replace(b'"hotswap":{"version":1},', b"")


@pytest.mark.parametrize(
    ("headers", "field"),
    [
        ("X-Hotswap-Version: 3\r\nX-Hotswap-Min-Version: 4\r\n", {}),
        ("X-Hotswap-Version: 3\r\nX-Hotswap-Policy: keep\r\n", {}),
        ("X-Hotswap-Finish-S: 3\r\n", {}),
        ("X-Hotswap-Policy: abort\r\nX-Hotswap-Finish-S: 3\r\n", {}),
        ("X-Hotswap-Wait-S: 3\r\n", {}),
        ("X-Hotswap-Version: 3\r\n", {"version": 4}),
        ("X-Hotswap-Policy: abort\r\n", {"policy": "finish"}),
        ("X-Hotswap-Version: 3\r\n", {"policy": "recompute"}),
    ],
)
async def test_contradictions_are_400(gateway: RunningGateway, headers: str, field: Any) -> None:
    async with serving(gateway, 3) as up:
        answer = await gateway.ask(post(body={"prompt": "x", "hotswap": field}, headers=headers))
        assert answer.refusal == (400, "contradictory_parameters")
        assert up.requests == []


# whose KV cache a prompt may reuse


async def kv_of(up: Upstream, gateway: RunningGateway, body: dict[str, Any], headers: str = "") -> list[str]:
    answer = await gateway.ask(post(body=body, headers=headers))
    assert answer.status == 200, answer.body
    return sent(up).get("x-hotswap-kv", "").split()


async def test_a_session_is_named_by_a_header_or_by_openais_field(gateway: RunningGateway) -> None:
    async with serving(gateway, 3) as up:
        wish = {"hotswap": {"kv": "session"}}
        name, versions, age_s = await kv_of(up, gateway, wish, "X-Session-Id: one\r\n")
        assert (len(name), versions, age_s) == (32, "8", "900.000")
        assert "one" not in name
        assert (await kv_of(up, gateway, {}, "X-Session-Id: one\r\nX-Hotswap-Kv: session\r\n"))[0] == name
        by_field = (await kv_of(up, gateway, wish | {"prompt_cache_key": "one"}))[0]
        assert by_field not in (name, (await kv_of(up, gateway, wish | {"prompt_cache_key": "two"}))[0])
        assert (await kv_of(up, gateway, wish | {"prompt_cache_key": "one"}, "X-Session-Id: one\r\n"))[0] == name
        assert (await kv_of(up, gateway, {"hotswap": {"kv": "any"}}))[0] == "-"
        assert await kv_of(up, gateway, {"hotswap": {"kv": "version"}}) == []
        for nameless in ({}, {"prompt_cache_key": None}, {"prompt_cache_key": ""}, {"prompt_cache_key": "x" * 600}):
            answer = await gateway.ask(post(body=wish | nameless))
            assert answer.refusal == (400, "session_needed"), nameless


async def test_the_gateways_setting_holds_for_requests_that_do_not_say(tmp_path: Path) -> None:
    settings = KvSettings("session", versions=3, age_s=60)
    with running_gateway(tmp_path, upstream=UPSTREAM, run_coordinator=False, kv=settings) as gateway:
        async with serving(gateway, 3) as up:
            assert (await kv_of(up, gateway, {"prompt_cache_key": "one"}))[1:] == ["3", "60.000"]
            assert await kv_of(up, gateway, {"prompt_cache_key": "one", "hotswap": {"kv": "version"}}) == []
            assert await kv_of(up, gateway, {}) == [], "without a session it is a request like others"


async def test_two_keys_have_no_session_in_common(tmp_path: Path) -> None:
    """Also where all keys share the blocks of a version."""
    with running_gateway(tmp_path, upstream=UPSTREAM, run_coordinator=False, cache_scope="shared") as gateway:
        keys = [(await new_key(gateway))[1] for _ in range(2)]
        async with serving(gateway, 3) as up:
            body = {"hotswap": {"kv": "session"}, "prompt_cache_key": "one"}
            names = [(await kv_of(up, gateway, body, key))[0] for key in keys]
            assert names[0] != names[1]


# what cannot be spoofed

OWN = {"x-hotswap-cache-scope": "public", "x-hotswap-resumable": "1"}


async def test_only_the_gateways_own_headers_arrive(gateway: RunningGateway) -> None:
    async with serving(gateway, 1) as up:
        await gateway.ask(post())
        assert sent(up) == OWN
        await gateway.ask(post(body=rb'{"\u0068otswap": {"policy": "abort"}, "a": 1}'))  # the same name, escaped
        assert sent(up) == {**OWN, "x-hotswap-policy": "abort"}
        assert up.requests[-1].body == b'{"a":1}'
        await gateway.ask(post(headers="X_Hotswap_Version: 9\r\nX-Hotswap: 9\r\n"))
        assert sent(up) == OWN
        await gateway.ask(post(headers="X-Hotswap-Policy: abort\r\n", body={"hotswap": {"min_version": 1}}))
        assert up.requests[-1].raw_head.lower().count(b"x-hotswap-") == 4
        assert sent(up) == {**OWN, "x-hotswap-policy": "abort", "x-hotswap-min-version": "1"}
        assert up.requests[-1].body == b"{}"


async def test_a_trailer_asks_for_nothing(gateway: RunningGateway) -> None:
    async with serving(gateway, 1) as up:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n"
        answer = await gateway.ask(head + b"2\r\n{}\r\n0\r\nX-Hotswap-Version: 9\r\n\r\n")
        assert answer.status == 200
        assert sent(up) == OWN


# routing and refusals


async def test_the_instance_with_the_version_is_asked(gateway: RunningGateway) -> None:
    commit(gateway, 4, 6)
    swap = SwapRecord("s", 4, "commit", ("a", "b"), 0.0, 0.0)
    gateway.store.put(KEYS.swap, swap.to_json())
    async with (
        gateway.instance(instance_id="a", active_version=3, active_epoch=5) as old,
        gateway.instance(instance_id="b", active_version=4, active_epoch=6) as new,
    ):
        for _ in range(4):
            assert (await gateway.ask(post(headers="X-Hotswap-Version: 3\r\n"))).status == 200
            assert (await gateway.ask(post(headers="X-Hotswap-Min-Version: 4\r\n"))).status == 200
            assert (await gateway.ask(get("/v1/models", "X-Hotswap-Version: 4\r\n"))).status == 200
        assert (len(old.requests), len(new.requests)) == (4, 8)
        assert {r.headers["x-hotswap-version"] for r in old.requests} == {"3"}


async def test_a_version_nobody_runs_is_409(gateway: RunningGateway) -> None:
    async with serving(gateway, 4) as up:
        for headers in ("X-Hotswap-Version: 3\r\n", "X-Hotswap-Min-Version: 5\r\n"):
            answer = await gateway.ask(post(headers=headers))
            assert (answer.refusal, answer.error["active_version"]) == ((409, "version_unavailable"), 4)
            assert "version 4 is active" in answer.error["message"]
            assert headers.split(": ")[1].strip() in answer.error["message"]
        assert up.requests == []


def refusing(times: int, **fields: bytes) -> Any:
    """A handler that refuses for its version the first `times`, then answers."""

    async def handler(link: Link, _: Received) -> None:
        nonlocal times
        times -= 1
        if times < 0:
            await link.json(**fields)
        else:
            await link.json(b'{"error":{}}', b"409 Conflict", b"x-hotswap-refused: version\r\n")

    return handler


async def test_a_refused_request_goes_to_another_instance_whole(gateway: RunningGateway) -> None:
    async with beside_another(gateway, refusing(99)) as (stale, well):
        bodies = [orjson.dumps({"prompt": f"{n}" + "x" * 70_000}) for n in range(8)]  # not all of one instance's
        for body in bodies:
            answer = await gateway.ask(post(body=body, headers="X-Hotswap-Version: 4\r\n"))
            assert (answer.status, answer.body) == (200, b'{"ok":true}')
        assert [r.body for r in well.requests] == bodies
        assert {r.body for r in stale.requests} <= set(bodies)
        assert stale.requests
        assert gateway.gateway.default.stats.refusal_retries == len(stale.requests)
        assert gateway.gateway.default.fleet.instances["a"].refusals == len(stale.requests)
        assert stale.connections == 1  # a refusal ends in order, so its connection is used again


async def test_a_canary_turns_everybody_away(gateway: RunningGateway) -> None:
    """Also who asked for no version, in the moment before the gateway hears that it is out of routing."""
    async with beside_another(gateway, refusing(99)) as (canary, well):
        for _ in range(3):
            assert (await gateway.ask(post(body={"prompt": "x"}))).status == 200
        assert canary.requests
        assert {r.body for r in well.requests} == {b'{"prompt":"x"}'}


async def test_refused_by_all_is_409(gateway: RunningGateway) -> None:
    async with serving(gateway, 4, refusing(99)) as up:
        answer = await gateway.ask(post(headers="X-Hotswap-Version: 4\r\n"))
        assert answer.refusal == (409, "version_unavailable")
        assert "x-hotswap-refused" not in answer.headers
        assert len(up.requests) == 1


async def test_a_refusal_in_pieces(gateway: RunningGateway) -> None:
    async def in_pieces(link: Link, _: Received) -> None:
        head = b"HTTP/1.1 409 Conflict\r\nX-Hotswap-Refused: version\r\ncontent-length: 4000\r\n\r\n"
        for byte in head:
            await link.send(bytes([byte]))
            await asyncio.sleep(0)
        await link.send(b" " * 100)
        await link.gone()

    async with beside_another(gateway, in_pieces) as (stale, _):
        for _ in range(3):
            assert (await gateway.ask(post(headers="X-Hotswap-Version: 4\r\n"))).status == 200
        assert stale.requests


async def test_another_409_is_the_clients(gateway: RunningGateway) -> None:
    said = b'{"error":{"code":"weights_changed"}}'
    async with serving(gateway, 4, answering(said, b"409 Conflict")):
        answer = await gateway.ask(post(headers="X-Hotswap-Version: 4\r\n"))
        assert (answer.status, answer.body) == (409, said)


async def test_an_instance_that_refuses_and_then_has_it(gateway: RunningGateway) -> None:
    """It refused while it was elsewhere, and the view did not change after: another try comes by itself."""
    async with serving(gateway, 4, refusing(1)) as up:
        answer = await gateway.ask(post(headers="X-Hotswap-Version: 4\r\nX-Hotswap-Wait-S: 30\r\n"))
        assert answer.status == 200
        assert len(up.requests) == 2


# waiting for a version


async def test_the_version_comes_while_it_is_waited_for(gateway: RunningGateway) -> None:
    async with serving(gateway, 4) as up:
        async with waiting(gateway, "X-Hotswap-Min-Version: 5\r\nX-Hotswap-Wait-S: 60\r\n") as client:
            gateway.register(up, state="STAGED", active_version=4, active_epoch=4, staged_version=5)
            assert (await gateway.ask(post())).status == 200  # others are served meanwhile
            commit(gateway, 5, 5)
            gateway.register(up, active_version=5, active_epoch=5)
            assert (await client.answer()).status == 200
        assert up.requests[-1].headers["x-hotswap-min-version"] == "5"
        assert gateway.gateway.default.stats.holds["version", "served"] == 1


async def test_the_version_never_comes(gateway: RunningGateway) -> None:
    async with serving(gateway, 4) as up:
        answer = await gateway.ask(post(headers="X-Hotswap-Version: 5\r\nX-Hotswap-Wait-S: 0.2\r\n"))
        assert (answer.refusal, answer.error["active_version"]) == ((504, "version_wait_timeout"), 4)
        assert gateway.gateway.default.stats.holds["version", "refused"] == 1
        assert up.requests == []


async def test_a_client_leaves_while_it_waits(gateway: RunningGateway) -> None:
    async with serving(gateway, 4) as up:
        async with waiting(gateway, "X-Hotswap-Version: 5\r\nX-Hotswap-Wait-S: 60\r\n") as client:
            client.writer.transport.abort()
        await eventually(lambda: gateway.gateway.default.stats.holds["version", "left"] == 1)
        assert len(gateway.gateway.default.fleet.room) == 0
        assert gateway.gateway.default.stats.disconnects["held"] == 1
        commit(gateway, 5, 5)
        gateway.register(up, active_version=5, active_epoch=5)
        assert (await gateway.ask(post())).status == 200
        assert len(up.requests) == 1
        assert gateway.gateway.buffered == 0


async def test_a_slow_refusal_uses_up_the_wait(gateway: RunningGateway) -> None:
    async with serving(gateway, 4, refusing(10**6)) as up:
        answer = await gateway.ask(post(headers="X-Hotswap-Version: 4\r\nX-Hotswap-Wait-S: 2\r\n"))
        assert answer.refusal == (504, "version_wait_timeout")
        assert len(up.requests) >= 2
