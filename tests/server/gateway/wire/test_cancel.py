"""Clients that leave, and clients that do not read: one, and many."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from unittest.mock import Mock

import pytest

from loadtest.gateway.contenders import Place, hotswap, pinned, rss_mb, running
from server.gateway import Limits, UpstreamSettings
from server.gateway.admission import Request
from server.gateway.config import QueueSettings
from server.gateway.connection import GatewayProtocol
from server.gateway.exchange import STALE_S, Exchange, State
from server.gateway.fleet.view import Fleet
from server.gateway.models.served import Served
from server.gateway.observe.stats import Stats
from server.gateway.queue.gate import Gate
from server.gateway.routes import find
from server.gateway.wire.head import RequestHead
from server.ports import free_port
from tests.server.gateway.harness import RunningGateway, get, post, running_gateway
from tests.server.gateway.upstream import Link, Received, Upstream, upstream
from tests.waiting import eventually, stands_still
from weightsync.control.records import InstanceRecord, Keys
from weightsync.store import open_store

# Far above what a test may take: nothing here is ended by a time-out of the gateway unless it says so.
PATIENT = UpstreamSettings(connect_timeout_s=60.0, read_idle_timeout_s=600.0, scrape_interval_s=3600.0, hold_s=0.0)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGateway]:
    with running_gateway(tmp_path_factory.mktemp("gateway"), upstream=PATIENT) as g:
        yield g


@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("state", ["before_first_byte", "non_streaming", "head_sent", "streaming"])
async def test_leaving_closes_the_upstream_connection(gateway: RunningGateway, state: str, how: str) -> None:
    gone: asyncio.Future[float] = asyncio.get_running_loop().create_future()
    waiting = asyncio.Event()

    async def handler(link: Link, _: Received) -> None:
        if state in ("head_sent", "streaming"):
            await link.sse_head()
        if state == "streaming":
            await link.chunk(b"data: 1\n\n")
        waiting.set()
        gone.set_result(await link.gone())

    raw = post(body={"stream": state != "non_streaming"})
    async with gateway.instance(handler), gateway.client(raw) as client:
        await waiting.wait()
        if state in ("head_sent", "streaming"):
            await client.reader.readuntil(b"data: 1\n\n" if state == "streaming" else b"\r\n\r\n")
        if how == "reset":
            client.writer.transport.abort()
        else:
            client.writer.close()
        await asyncio.wait_for(gone, 60)
    await eventually(lambda: gateway.gateway.default.stats.inflight == 0)


async def test_leaving_while_connecting_ends_the_attempt(gateway: RunningGateway) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, contextlib.ExitStack() as stack:
        for _ in range(8):  # fills the queue of a listener that never accepts
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(full.getsockname())
        gateway.register(f"http://127.0.0.1:{full.getsockname()[1]}")
        stats = gateway.gateway.default.stats
        before = stats.disconnects["connecting"]
        async with gateway.client(post()):
            await eventually(lambda: stats.inflight == 1)
        await eventually(lambda: stats.inflight == 0)
        assert stats.disconnects["connecting"] == before + 1
        gateway.unregister()


async def test_leaving_with_half_a_request_reaches_nobody(gateway: RunningGateway) -> None:
    async with gateway.instance() as up:
        async with gateway.client(post(body=b"{}" * 100)[:-50]) as client:
            await client.writer.drain()
        await client.writer.wait_closed()
        assert (await gateway.ask(get("/healthz"))).status == 200
        assert up.requests == []


async def test_a_kept_alive_connection_is_not_a_disconnect(gateway: RunningGateway) -> None:
    before = sum(gateway.gateway.default.stats.disconnects.values())
    async with gateway.instance():
        await gateway.ask(post())
    assert sum(gateway.gateway.default.stats.disconnects.values()) == before


def waiting(client: GatewayProtocol) -> int:
    """Bytes of an answer that the gateway has for a client, and the client does not take."""
    return client.transport.get_write_buffer_size()


async def test_a_slow_reader_holds_the_instance_back(gateway: RunningGateway) -> None:
    """Bytes that a client does not take stay with the instance: the gateway and the kernel hold a bounded part."""
    total, chunk = 256 * 2**20, b"x" * 65536
    sent = 0

    async def handler(link: Link, _: Received) -> None:
        nonlocal sent
        await link.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % total)
        while sent < total:
            await link.send(chunk)
            sent += len(chunk)

    async with gateway.instance(handler), gateway.client(post()) as slow:
        await slow.reader.readuntil(b"\r\n\r\n")
        await stands_still(lambda: sent, 0.2)
        (client,) = [c for c in gateway.gateway.clients if c.exchange is not None]
        assert waiting(client) < 2 * 2**20
        assert sent < 64 * 2**20
        received = 0
        while received < 128 * 2**20:  # reading again sets it in motion again
            received += len(await slow.reader.read(2**20))
        slow.writer.transport.abort()
        await eventually(lambda: gateway.gateway.default.stats.inflight == 0)


async def test_a_client_that_never_reads_is_dropped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def handler(link: Link, _: Received) -> None:
        await link.send(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000000\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            while True:
                await link.send(b"x" * 65536)
        gone.set()

    gone = asyncio.Event()
    with running_gateway(tmp_path, upstream=PATIENT, limits=Limits(stalled_client_s=0.5)) as hasty:
        async with hasty.instance(handler), hasty.client(post()):
            await asyncio.wait_for(gone.wait(), 60)
            assert hasty.gateway.default.stats.disconnects["stalled"] == 1
            await eventually(lambda: not [c for c in hasty.gateway.clients if waiting(c)], 60)
            await eventually(lambda: hasty.gateway.default.stats.inflight == 0)
    assert "Exception" not in caplog.text


def refusals(client: Mock) -> list[tuple[int, str]]:
    """Status and code of each error with which an exchange refused its client."""
    return [(call.args[0].status, call.args[0].code) for call in client.refuse.call_args_list]


@asynccontextmanager
async def before_silence(
    tmp_path: Path,
) -> AsyncIterator[tuple[Upstream, Stats, Callable[[], tuple[Exchange, Mock]]]]:
    """The only instance takes requests and says nothing; what begins one."""
    stats = Stats()
    store = open_store(f"sqlite://{tmp_path / 'store.db'}")
    fleet = Fleet(store, "toy", PATIENT, stats)
    served = Served("toy", fleet, Gate(fleet, QueueSettings()), stats)

    def begun() -> tuple[Exchange, Mock]:
        (target,) = find(b"/v1/completions")
        # In machine code a call that promises None must return it.
        client = Mock(cut=Mock(return_value=None), refuse=Mock(return_value=None))
        request = Request(target, RequestHead(b"r", b""), b"{}", None, (served,), http10=False, keep_alive=True)
        exchange = Exchange(client, request)
        exchange.start()
        return exchange, client

    try:
        async with upstream(lambda link, _: asyncio.sleep(3600)) as up:
            await store.put(Keys("toy").instance("i"), InstanceRecord("i", up.address, "SERVING").to_json())
            await fleet.refresh()
            yield up, stats, begun
    finally:
        fleet.close()
        await store.close()


async def test_how_long_each_side_may_stand_still(tmp_path: Path) -> None:
    """To the second: of a paused exchange only the client is to blame, of any other only the instance it waits for."""
    async with before_silence(tmp_path) as (up, stats, begun):
        stalled, client = begun()
        await eventually(lambda: len(up.requests) == 1)
        stalled.pause()
        at = stalled.last_progress
        stalled.sweep(at + 19.5, stalled_client_s=20.0)
        assert stalled.state is not State.ENDED
        stalled.sweep(at + 20.5, stalled_client_s=20.0)
        assert (stalled.state, stalled.status, stats.disconnects["stalled"]) == (State.ENDED, 499, 1)
        client.cut.assert_called_once()

        silent, client = begun()
        await eventually(lambda: len(up.requests) == 2)
        at = silent.last_progress
        silent.sweep(at + 599.5, stalled_client_s=1.0)
        assert silent.state is not State.ENDED
        silent.sweep(at + 600.5, stalled_client_s=1000.0)
        assert (silent.state, silent.status, stats.disconnects["stalled"]) == (State.ENDED, 504, 1)
        client.cut.assert_not_called()
        assert refusals(client) == [(504, "upstream_timeout")]


@pytest.mark.parametrize(("after_s", "again"), [(0.0, True), (STALE_S, False)])
async def test_a_kept_connection_that_ends_late_was_not_closed_already(
    tmp_path: Path, after_s: float, again: bool
) -> None:
    """The instance has had the request for so long: it may have died of it, and is not sent it a second time."""
    async with before_silence(tmp_path) as (up, stats, begun):
        exchange, client = begun()
        await eventually(lambda: len(up.requests) == 1)
        exchange._pooled = True
        exchange.last_progress = time.monotonic() - after_s
        exchange.upstream_lost(None)
        if again:
            await eventually(lambda: len(up.requests) == 2)
            exchange.cancel()
        assert stats.stale_retries == again
        assert refusals(client) == ([] if again else [(502, "upstream_died")])


async def test_pipelined_requests_get_one_answer_and_a_close(gateway: RunningGateway) -> None:
    go = asyncio.Event()

    async def handler(link: Link, _: Received) -> None:
        await go.wait()
        await link.json()

    raw = post() + post() + get("/healthz")
    async with gateway.instance(handler) as up, gateway.client(raw) as client:
        await eventually(lambda: len(up.requests) == 1)
        client.writer.write(post())
        go.set()
        assert (await client.answer()).status == 200
        assert await client.rest() == b""
    assert len(up.requests) == 1


async def test_a_forwarded_request_behind_one_for_the_app_is_not_acted_on(gateway: RunningGateway) -> None:
    async with gateway.instance() as up, gateway.client(get("/healthz") + post()) as client:
        assert (await client.answer()).status == 200
        assert await client.rest() == b""
    assert up.requests == []


async def test_line_feeds_after_a_body_are_harmless(gateway: RunningGateway) -> None:
    async def handler(link: Link, _: Received) -> None:
        await go.wait()
        await link.json()

    go = asyncio.Event()
    async with gateway.instance(handler) as up, gateway.client(post() + b"\r\n") as client:
        await eventually(lambda: len(up.requests) == 1)
        client.writer.write(b"\r\n")
        go.set()
        assert (await client.answer()).status == 200
        client.writer.write(post())
        assert (await client.answer()).status == 200


# many clients that take nothing: what the gateway holds for all of them together stays bounded


CLIENTS = 200
PIECE = b"data: " + b"x" * 16_000 + b"\n\n"
HELD_MB = 0.5  # for one of them: what asyncio buffers before it says stop (64 KiB), one read (256 KiB), and some room


@pytest.fixture(autouse=True)
def _descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4 * CLIENTS)), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def stall(stack: contextlib.ExitStack, port: int) -> None:
    """A client that asks, sees that an answer begins, and then reads no more."""
    loop = asyncio.get_running_loop()
    client = stack.enter_context(socket.socket())
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    await loop.sock_connect(client, ("127.0.0.1", port))
    await loop.sock_sendall(client, post(body=b'{"stream":true}'))
    assert (await loop.sock_recv(client, 64)).startswith(b"HTTP/1.1 200")


@pytest.mark.broad
async def test_stalled_clients_cost_a_bounded_amount(tmp_path: Path) -> None:
    sent, writing = 0, 0

    async def handler(link: Link, received: Received) -> None:
        nonlocal sent, writing
        if received.target != "/v1/completions":
            await link.json()
            return
        await link.sse_head()
        while True:
            writing += 1
            await link.chunk(PIECE)
            writing -= 1
            sent += len(PIECE)

    async with upstream(handler) as up:
        place = Place(free_port(), up.port, tmp_path)
        with running(pinned(0, hotswap(place)), tmp_path / "log") as gateway, contextlib.ExitStack() as stack:
            await eventually(lambda: _listens(place.port), timeout_s=60)
            await stall(stack, place.port)
            before = rss_mb(gateway.pid)
            for _ in range(CLIENTS - 1):
                await stall(stack, place.port)
            await eventually(lambda: writing == CLIENTS, 120)
            await stands_still(lambda: (sent, writing), 0.5)
            assert writing == CLIENTS
            assert rss_mb(gateway.pid) - before < CLIENTS * HELD_MB
            assert sent > CLIENTS * len(PIECE)  # there was more to be had: all were stopped, in the end by TCP


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
        return True
    return False
