"""Requests that may generate on an instance that drains or tries a version, and those that a flip waits for."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from server.gateway.terms import MAX_FINISH_S
from server.instance.inflight import FINISH_S, Inflight, Problem, Wish
from server.instance.middleware import REFUSAL, Admission
from tests.server.instance.asgi import head, part, sent_by
from tests.waiting import eventually
from weightsync.control.state import CONFIRM_S


class App:
    """Answers when it is let."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.served: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.served.append(scope["path"])
        if scope["path"] == "/generate":
            await self.gate.wait()
        await send(head(b"application/json"))
        await send(part(b"{}", more=False))


def client(admission: Admission) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=admission), base_url="http://instance")


async def test_only_probes_generate_while_it_admits_nobody() -> None:
    app = App()
    app.gate.set()
    admission = Admission(app)
    admission.admits = lambda: False
    async with client(admission) as ask:
        for path in ("/generate", "/v1/chat/completions", "/v1/responses"):
            refused = await ask.post(path, json={})
            assert (refused.status_code, refused.headers["x-hotswap-refused"]) == (409, "version")
            assert refused.json()["error"]["code"] == "version_mismatch"
        assert app.served == []
        assert (await ask.post("/generate", json={}, headers={"x-hotswap-probe": "1"})).status_code == 200
        assert (await ask.get("/health")).status_code == 200
        assert (await ask.post("/tokenize", json={})).status_code == 200


async def test_only_members_ask_an_instance_for_anything_but_its_health() -> None:
    app = App()
    app.gate.set()
    async with client(Admission(app, key="of-this-one")) as ask:
        for headers in ({}, {"authorization": "Bearer of-another"}, {"x-hotswap-probe": "1"}):
            for path in ("/generate", "/tokenize", "/v1/completions", "/openapi.json", "//health", "/health/"):
                refused = await ask.post(path, json={}, headers=headers)
                assert (refused.status_code, refused.json()["error"]["code"]) == (401, "instance_key_required")
                assert refused.headers["x-hotswap-refused"] == "key"
        assert app.served == []
        for path in ("/health", "/metrics"):
            assert (await ask.get(path)).status_code == 200
        member = {"authorization": "Bearer of-this-one"}
        assert (await ask.post("/generate", json={}, headers=member)).status_code == 200


async def test_a_web_socket_of_a_stranger_is_closed() -> None:
    app = App()
    (closing,) = await sent_by(Admission(app, key="k"), "/v1/realtime", kind="websocket")
    assert (app.served, closing["type"]) == ([], "websocket.close")


@pytest.mark.parametrize(
    ("before", "after", "status", "why"),
    [(False, False, 500, None), (True, True, 503, "engine"), (False, True, 503, "lost")],
)
async def test_what_fails_with_the_engine_is_refused_for_another_instance_to_answer(
    before: bool, after: bool, status: int, why: str | None
) -> None:
    """The engine was dead before the request came, or has died of it for all that is known."""
    dead = before

    async def failing(scope: Any, receive: Any, send: Any) -> None:
        nonlocal dead
        dead = after
        await send(head(b"text/plain", 500))
        await send(part(b"whatever vLLM makes of it", more=False))

    async with client(Admission(failing, dead=lambda: dead)) as ask:
        answer = await ask.post("/v1/completions", json={})
    assert (answer.status_code, answer.headers.get("x-hotswap-refused")) == (status, why)
    assert (b"engine_died" in answer.content) == after


async def test_it_is_idle_when_the_last_stream_has_ended() -> None:
    app = App()
    admission = Admission(app)
    await admission.idle(0)
    async with client(admission) as ask:
        streams = [asyncio.create_task(ask.post("/generate", json={})) for _ in range(2)]
        await eventually(lambda: len(app.served) == 2)
        probe = asyncio.create_task(ask.post("/generate", json={}, headers={"x-hotswap-probe": "1"}))
        waiting = asyncio.create_task(admission.idle(60))
        await admission.idle(0)  # its time is up at once; the other goes on waiting
        assert not waiting.done()
        app.gate.set()
        await asyncio.gather(*streams, probe)
        await waiting


async def test_a_request_that_breaks_is_not_counted_for_ever() -> None:
    async def broken(scope: Any, receive: Any, send: Any) -> None:
        raise ValueError

    admission = Admission(broken)
    async with client(admission) as ask:
        with pytest.raises(ValueError):  # noqa: PT011 - the app's own
            await ask.post("/generate", json={})
    await asyncio.wait_for(admission.idle(60), 30)


async def test_what_is_handed_on_is_refused_before_its_first_byte_and_breaks_off_after_it() -> None:
    sent: dict[str, list[dict[str, Any]]] = {"begun": [], "waiting": []}
    told = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        try:
            if scope["name"] == "begun":
                await send(head())
                await send(part(b"data: 1"))
            told.set()
            await asyncio.Event().wait()
        finally:
            await send(part(b"data: aborted", more=False))

    admission = Admission(app)

    async def ask(name: str) -> None:
        async def send(message: dict[str, Any]) -> None:
            sent[name].append(message)

        await admission({"type": "http", "path": "/generate", "headers": [], "name": name}, None, send)

    tasks = [asyncio.create_task(ask(name)) for name in sent]
    await told.wait()
    await eventually(lambda: len(sent["begun"]) == 2)
    assert await admission.hand_on() == 2
    await asyncio.gather(*tasks)
    assert [message.get("body") for message in sent["begun"]] == [None, b"data: 1"], "it has no end"
    start, body = sent["waiting"]
    assert (start["status"], dict(start["headers"])[b"x-hotswap-refused"]) == (409, b"version")
    assert body["body"] == REFUSAL
    assert await admission.hand_on() == 0


async def test_a_request_that_its_client_gives_up_is_not_handed_on() -> None:
    app = App()
    admission = Admission(app)
    async with client(admission) as ask:
        asking = asyncio.create_task(ask.post("/generate", json={}))
        await eventually(lambda: app.served)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
    assert await admission.hand_on() == 0


# flips


def test_headers() -> None:
    given = [(b"x-hotswap-policy", b"finish"), (b"x-hotswap-finish-s", b"2.5"), (b"x-hotswap-version", b"7")]
    assert Wish.of(given) == Wish(policy="finish", finish_s=2.5, version=7)
    assert Wish.of([(b"host", b"x")]) == Wish()


async def test_a_flip_waits_for_those_that_finish_and_holds_new_ones_only() -> None:
    inflight, finish = Inflight(), Wish(policy="finish")
    inflight.active = 1
    order: list[str] = []

    async def flip() -> None:
        async with inflight.closing(2):
            order.append("flipped")
            inflight.active = 2

    async def late() -> None:
        await inflight.admit(Wish(version=2))
        order.append("admitted")

    with inflight.running(finish), inflight.running(Wish()):
        flipping = asyncio.create_task(flip())
        await asyncio.sleep(0)
        held = asyncio.create_task(late())
        await inflight.admit(Wish())
        await asyncio.sleep(0)
        assert order == []
        order.append("finished")
    await asyncio.gather(flipping, held)
    assert order == ["finished", "flipped", "admitted"]


async def test_no_request_makes_a_flip_wait_longer_than_its_swap_does() -> None:
    """Else the swap is done without this instance, which then gets no requests until it has flipped."""
    wish = Wish.of([(b"x-hotswap-policy", b"finish"), (b"x-hotswap-finish-s", b"3600")])
    assert FINISH_S < wish.finish_s == MAX_FINISH_S < CONFIRM_S


async def test_patience_ends() -> None:
    inflight = Inflight()
    inflight.active = 1
    with inflight.running(Wish(version=1, finish_s=0.01)):
        async with asyncio.timeout(30), inflight.closing(2):
            pass


async def test_a_version_that_is_not_here_is_refused() -> None:
    inflight = Inflight()
    inflight.active = 4
    await inflight.admit(Wish(min_version=4))
    with pytest.raises(Problem, match="this instance runs version"):
        await inflight.admit(Wish(version=3))


def test_a_client_orders_its_requests_within_its_class_and_leaves_it_neither_way() -> None:
    urgent, plain, patient = (Wish.of([(b"x-hotswap-priority", b"%d" % p)]) for p in (-9, 0, 1))
    assert Wish.of([]).in_engine(0) == plain.in_engine(0) == 0
    asked = [-(10**12), -1, 0, 1, 999, 1000, 10**12]
    for higher, lower in ((urgent, plain), (plain, patient)):
        assert max(higher.in_engine(a) for a in asked) < min(lower.in_engine(a) for a in asked)
    assert plain.in_engine(-5) == plain.in_engine(0) < plain.in_engine(7) < plain.in_engine(8)
