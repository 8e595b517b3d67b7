"""The least that a proxy on uvloop costs: copies bytes between each client and a connection of its own to the upstream.

It reads no HTTP, so it can neither route nor refuse anything: what a gateway takes beyond this is what it does.

    python -m loadtest.gateway.splice PORT UPSTREAM_PORT
"""

from __future__ import annotations

import asyncio
import sys
from typing import cast

import uvloop


class Side(asyncio.Protocol):
    """One of two connections whose bytes go into each other."""

    def __init__(self, other: Side | None = None) -> None:
        self.other = other
        self.transport: asyncio.Transport | None = None
        self.waiting: list[bytes] = []  # until the other side is connected

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        if self.other is not None:
            self.other.joined(self)

    def joined(self, other: Side) -> None:
        """The other side is there now."""
        self.other = other
        if other.transport is not None:
            other.transport.writelines(self.waiting)
        self.waiting = []

    def data_received(self, data: bytes) -> None:
        if self.other is None or self.other.transport is None:
            self.waiting.append(data)
        else:
            self.other.transport.write(data)

    def connection_lost(self, _: Exception | None) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.close()


async def main(port: int, upstream: int) -> None:
    """Until it is ended."""
    loop = asyncio.get_running_loop()
    opening: set[asyncio.Task[object]] = set()

    class Client(Side):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            task: asyncio.Task[object] = loop.create_task(
                loop.create_connection(lambda: Side(self), "127.0.0.1", upstream)
            )
            opening.add(task)
            task.add_done_callback(opening.discard)

    server = await loop.create_server(Client, "127.0.0.1", port, backlog=1024)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), int(sys.argv[2])))
