"""Forwarding: what goes up, what comes back, in which order it is written, and what a bad instance leads to."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import cast

import pytest

from server.gateway import Limits, UpstreamSettings
from server.gateway.connection import GatewayProtocol
from server.gateway.wire.pool import Outbox
from tests.server.gateway.harness import ADMIN_KEY, RunningGateway, get, post, running_gateway
from tests.server.gateway.upstream import Link, Received, answering, sending, streaming, upstream

PATIENT = UpstreamSettings(
    connect_timeout_s=60.0, read_idle_timeout_s=60.0, max_idle_s=3600.0, scrape_interval_s=3600.0, hold_s=0.0
)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGateway]:
    with running_gateway(tmp_path_factory.mktemp("gateway"), upstream=PATIENT, limits=Limits(max_body=100_000)) as g:
        yield g


@pytest.fixture(autouse=True)
def no_leftovers(gateway: RunningGateway) -> Iterator[None]:
    """Every test ends without an instance, and with no request left in the counts."""
    yield
    for instance_id in list(gateway.gateway.default.fleet.instances):
        gateway.unregister(instance_id)
    assert gateway.gateway.default.stats.inflight == 0


async def test_post_reaches_the_instance_as_bytes(gateway: RunningGateway) -> None:
    body = b'{ "prompt" : "h\xc3\xa9", "n": 1e0 }'
    async with gateway.instance() as up:
        extra = "X-Request-Id: abc-1\r\nAuthorization: Bearer secret\r\nCookie: a=b\r\n"
        extra += "Keep-Alive: 5\r\nTraceparent: 00-1\r\n"
        answer = await gateway.ask(post("/v1/chat/completions", body, extra))
    assert (answer.status, answer.body) == (200, b'{"ok":true}')
    assert answer.headers["x-request-id"] == "abc-1"
    (seen,) = up.requests
    assert (seen.method, seen.target, seen.body) == ("POST", "/v1/chat/completions", body)
    assert seen.headers["x-request-id"] == "abc-1"
    assert seen.headers["traceparent"] == "00-1"
    assert seen.headers["host"] == f"127.0.0.1:{up.port}"
    assert not {"authorization", "cookie", "keep-alive", "connection"} & seen.headers.keys()


@pytest.mark.parametrize("fault", [b"\x00", b"\\q", b"\xff"])
async def test_what_is_wrong_inside_of_a_long_text_is_for_the_instance_to_say(
    gateway: RunningGateway, fault: bytes
) -> None:
    text = b'"prompt":"%b%b"' % (b"x" * 10_000, fault)
    async with gateway.instance() as up:
        assert (await gateway.ask(post("/v1/completions", b"{%b}" % text))).status == 200
        assert len(up.requests) == 1
        for body in (b"{%b" % text, b"{%b,}" % text, b'{%b,"hotswap":{"priority":1}}' % text):
            assert (await gateway.ask(post("/v1/completions", body))).refusal == (400, "invalid_json")
        assert len(up.requests) == 1


async def test_an_instance_gets_the_key_of_its_record(gateway: RunningGateway) -> None:
    async with upstream() as up:
        for key in ("first", "of its next life"):
            gateway.register(up, key=key)
            assert (await gateway.ask(post(headers="Authorization: Bearer theirs\r\n"))).status == 200
            shown = await gateway.ask(get("/admin/instances", f"Authorization: Bearer {ADMIN_KEY}\r\n"), admin=True)
            assert shown.status == 200
            assert key.encode() not in shown.body
    assert [seen.headers["authorization"] for seen in up.requests] == ["Bearer first", "Bearer of its next life"]


async def test_an_instance_that_does_not_take_the_key_any_more_is_left_for_another(gateway: RunningGateway) -> None:
    error = b'{"error":{"code":"instance_key_required"}}'
    stranger = answering(error, b"401 Unauthorized", b"x-hotswap-refused: key\r\n")
    async with gateway.instance(stranger), gateway.instance(instance_id="i1") as other:
        assert [(await gateway.ask(post())).status for _ in range(4)] == [200] * 4
    assert len(other.requests) == 4


@pytest.mark.parametrize("bad", ["", "a b", "x" * 129, 'a"b'])
async def test_an_unfit_request_id_is_replaced(gateway: RunningGateway, bad: str) -> None:
    async with gateway.instance() as up:
        answer = await gateway.ask(post(headers=f"X-Request-Id: {bad}\r\n"))
    assert answer.headers["x-request-id"] not in ("", bad)
    assert answer.headers["x-request-id"] == up.requests[0].headers["x-request-id"]


async def test_chunked_request_body_arrives_with_a_length(gateway: RunningGateway) -> None:
    raw = b"POST /generate HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n"
    raw += b'6;x=1\r\n{"a":1\r\n1\r\n}\r\n0\r\nTrailer: x\r\n\r\n'
    async with gateway.instance() as up:
        assert (await gateway.ask(raw)).status == 200
    assert up.requests[0].body == b'{"a":1}'
    assert "trailer" not in up.requests[0].headers


async def test_a_stream_arrives_piece_by_piece(gateway: RunningGateway) -> None:
    go = asyncio.Event()
    stream = streaming(b"data: 1\n\n", go, b"data: 2\n\n")
    async with gateway.instance(stream), gateway.client(post(body={"stream": True})) as client:
        await client.reader.readuntil(b"data: 1\n\n")  # the second is not written yet
        go.set()
        await client.reader.readuntil(b"data: 2\n\n\r\n0\r\n\r\n")


async def test_connections_are_reused_on_both_sides(gateway: RunningGateway) -> None:
    async with gateway.instance() as up, gateway.client() as client:
        for _ in range(3):
            client.writer.write(post())
            assert (await client.answer()).status == 200
    assert (len(up.requests), up.connections) == (3, 1)


async def test_hop_by_hop_response_headers_stay_behind(gateway: RunningGateway) -> None:
    extra = b"connection: x-private\r\nx-private: 1\r\nkeep-alive: timeout=5\r\nx-hotswap-weight-version: 3\r\n"
    async with gateway.instance(answering(extra=extra)):
        answer = await gateway.ask(post())
    assert answer.headers["x-hotswap-weight-version"] == "3"
    assert not {"x-private", "keep-alive", "connection"} & answer.headers.keys()


async def test_http10_client_gets_a_body_it_can_read(gateway: RunningGateway) -> None:
    async with gateway.instance(streaming(b"data: 1\n\n")):
        answer = await gateway.ask(b"POST /v1/completions HTTP/1.0\r\nContent-Length: 2\r\n\r\n{}")
    assert answer.body == b"data: 1\n\n"
    assert answer.headers["connection"] == "close"
    assert "transfer-encoding" not in answer.headers


async def test_expect_continue_is_answered_before_the_body(gateway: RunningGateway) -> None:
    async with gateway.instance() as up, gateway.client(post(headers="Expect: 100-continue\r\n")[:-2]) as client:
        assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.writer.write(b"{}")
        assert (await client.answer()).status == 200
    assert "expect" not in up.requests[0].headers


async def test_a_body_without_a_length_ends_with_the_connection(gateway: RunningGateway) -> None:
    async with gateway.instance(sending(b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n\r\nhello")):
        answer = await gateway.ask(post())
    assert (answer.body, answer.complete) == (b"hello", True)


async def test_informational_answers_are_swallowed(gateway: RunningGateway) -> None:
    async def handler(link: Link, _: Received) -> None:
        await link.send(b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n")
        await link.json()

    async with gateway.instance(handler):
        answer = await gateway.ask(post())
    assert answer.status == 200
    assert "link" not in answer.headers


# failures


async def test_an_instance_that_accepts_nobody_is_503_in_time(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, contextlib.ExitStack() as stack:
        for _ in range(8):  # fills the queue of a listener that never accepts
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(full.getsockname())
        hasty = UpstreamSettings(connect_timeout_s=0.2, scrape_interval_s=3600.0, hold_s=0.0)
        gateway = stack.enter_context(running_gateway(tmp_path, upstream=hasty))
        gateway.register(f"http://127.0.0.1:{full.getsockname()[1]}")
        answer = await gateway.ask(post())
    assert answer.refusal == (503, "instance_unreachable")


async def test_stale_pooled_connection_is_retried_once(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The instance closes an idle connection just as the next request is on its way."""
    monkeypatch.setattr("server.gateway.exchange.STALE_S", 60.0)

    async def handler(link: Link, received: Received) -> None:
        if len(up.requests) == 2:
            link.cut()
        else:
            await link.json()

    before = gateway.gateway.default.stats.stale_retries
    async with gateway.instance(handler) as up:
        assert (await gateway.ask(post())).status == 200
        assert (await gateway.ask(post())).status == 200
    assert [r.connection for r in up.requests] == [1, 1, 2]
    assert gateway.gateway.default.stats.stale_retries == before + 1


@pytest.mark.parametrize(
    ("early", "said"),
    [
        (post(body=b"{"), b"HTTP/1.1 400"),
        (b"nonsense\r\n\r\n", b"HTTP/1.1 400"),
        (post(headers="Expect: 100-continue\r\n")[:-2], b"HTTP/1.1 100"),
    ],
    ids=["refused", "malformed", "continue"],
)
async def test_what_comes_in_the_turn_of_an_answer_s_end_is_answered_behind_it(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch, early: bytes, said: bytes
) -> None:
    """A client that does not wait for its answer: the loop reads both in one turn, the instance's end first."""
    answered = GatewayProtocol.answered

    def with_more(self: GatewayProtocol, *, keep_alive: bool) -> None:
        monkeypatch.setattr(GatewayProtocol, "answered", answered)
        answered(self, keep_alive=keep_alive)
        self.data_received(early)

    async with gateway.instance():
        monkeypatch.setattr(GatewayProtocol, "answered", with_more)
        async with gateway.client(post()) as client:
            first = await client.answer()
            assert (first.status, first.body) == (200, b'{"ok":true}')
            assert (await asyncio.wait_for(client.reader.readline(), 60)).startswith(said)


@pytest.mark.parametrize(
    "raw",
    [
        b"garbage\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nbad header\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
        b"HTTP/1.1 200 OK\r\na: " + b"b" * 70_000,
        b"HTTP/1.1 999 Odd\r\ncontent-length: 0\r\n\r\n",
    ],
)
async def test_malformed_heads_are_502(gateway: RunningGateway, raw: bytes) -> None:
    async with gateway.instance(sending(raw)):
        assert (await gateway.ask(post())).refusal == (502, "bad_upstream")


async def test_bytes_after_a_complete_answer_cost_the_connection_only(gateway: RunningGateway) -> None:
    async def handler(link: Link, _: Received) -> None:
        await link.send(
            b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nokHTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil"
        )

    async with gateway.instance(handler) as up:
        for _ in range(2):
            answer = await gateway.ask(post())
            assert answer.body == b"ok"
    assert up.connections == 2


async def test_no_event_is_added_inside_an_unfinished_one(gateway: RunningGateway) -> None:
    async with gateway.instance(streaming(b'data: {"half":', cut=True)):
        answer = await gateway.ask(post())
    assert answer.body == b'data: {"half":'
    assert not answer.complete


@pytest.mark.parametrize(
    "begin",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\nnonsense",
    ],
)
async def test_a_cut_body_is_recognisable(gateway: RunningGateway, begin: bytes) -> None:
    async with gateway.instance(sending(begin)):
        answer = await gateway.ask(post())
    assert answer.status == 502 or not answer.complete


async def test_get_routes_and_response_ids(gateway: RunningGateway) -> None:
    async with gateway.instance() as up:
        assert (await gateway.ask(get("/v1/models?ignored=1"))).status == 200
        assert (await gateway.ask(get("/v1/responses/resp_1-a?stream=true"))).status == 200
        assert (await gateway.ask(post("/v1/responses/resp_1-a/cancel", b""))).status == 200
    response = "/v1/responses/resp_1-a"
    assert [r.target for r in up.requests] == ["/v1/models", f"{response}?stream=true", f"{response}/cancel"]


# the writes of one turn of the loop: in order, then the work behind them, all before the loop waits again


class Wire(asyncio.Transport):
    def __init__(self, done: list[str], *, closing: bool = False) -> None:
        super().__init__()
        self._done, self._closing = done, closing

    def is_closing(self) -> bool:
        return self._closing

    def writelines(self, list_of_data: Iterable[bytes]) -> None:  # type: ignore[override]
        self._done.append(b"".join(list_of_data).decode())


async def test_work_is_done_behind_all_writes_of_the_turn() -> None:
    outbox, done = Outbox(), cast(list[str], [])
    outbox.put(Wire(done), (b"first ", b"answer"))
    outbox.afterwards(lambda: done.append("counted"))
    outbox.put(Wire(done, closing=True), (b"nobody reads this",))
    outbox.put(Wire(done), (b"second answer",))
    assert done == []
    await asyncio.sleep(0)
    assert done == ["first answer", "second answer", "counted"]


async def test_work_that_fails_keeps_no_other_from_being_done(caplog: pytest.LogCaptureFixture) -> None:
    outbox, done = Outbox(), cast(list[str], [])

    def fails() -> None:
        raise ZeroDivisionError

    def makes_more() -> None:
        outbox.put(Wire(done), (b"more",))
        outbox.afterwards(lambda: done.append("more counted"))

    for work in (fails, makes_more, lambda: done.append("counted")):
        outbox.afterwards(work)
    with caplog.at_level(logging.ERROR, "hotswap.gateway"):
        await asyncio.sleep(0)
    assert done == ["counted"]
    assert "behind an answer" in caplog.text
    await asyncio.sleep(0)
    assert done == ["counted", "more", "more counted"]
