"""Many clients that take nothing: what the gateway holds for all of them together stays bounded."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtest.gateway.contenders import Place, hotswap, pinned, rss_mb, running
from server.ports import free_port
from tests.server.gateway.harness import post
from tests.server.gateway.upstream import Link, Received, upstream
from tests.waiting import eventually, stands_still

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
