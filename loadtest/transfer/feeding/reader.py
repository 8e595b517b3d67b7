"""A host that reads the active version from its holder again and again, as peers do: tickets, chunks, digests.

`python -m loadtest.transfer.feeding.reader MODEL HOLDER` says `there` when it could begin. `go` makes it read; after
`stop` it prints the bytes it has read since.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import sys
from concurrent.futures import ThreadPoolExecutor

from loadtest.transfer.peer import READ_TIMEOUT_S, memory
from weightsync.control.hosts import this_host
from weightsync.control.records import CopyRecord, Keys
from weightsync.peer.chunks import Head, Shape
from weightsync.peer.control import PeerClient
from weightsync.peer.copies import parsed
from weightsync.peer.messages import Opened
from weightsync.running import STORE_ENV
from weightsync.store import open_store
from weightsync.transport import Piece, Region, Transport, open_transport

READS = 2  # chunks at a time, as peers read from one holder


class Reader:
    """Reads all of one copy into the same memory, checks every chunk, and begins anew."""

    def __init__(self, transport: Transport, client: PeerClient, holder: CopyRecord) -> None:
        self._transport, self._client, self._holder = transport, client, holder
        self._target: mmap.mmap = memory(holder.nbytes)
        self._into: Region = transport.register(self._target, writable=True)
        self._pool = ThreadPoolExecutor(READS)
        self.nbytes = 0
        self.stopped = False

    async def run(self) -> None:
        """Until `stopped`. Raises PeerRefused, PeerUnreachable, TransferError, ValueError (wrong bytes)."""
        host, address = self._holder.host, self._holder.address
        while not self.stopped:
            opened = await self._client.open(host, address, self._holder.digest)
            head = None
            if not opened.digests:
                raw = await self._client.manifest(host, address, opened.ticket)
                head = Head.parse(raw, self._holder.digest)
            before = self.nbytes
            await asyncio.to_thread(self._read, opened, head)
            await self._client.close(host, address, opened.ticket, self.nbytes - before)

    def _read(self, opened: Opened, head: Head | None) -> None:
        shape = Shape(opened.nbytes, opened.chunk_nbytes, opened.digests)
        link = self._transport.connect(opened.endpoint)

        def read(chunk: int) -> int:
            start, end = shape.bounds(chunk)
            if self.stopped:
                return 0
            link.read(self._into, opened.region, [Piece(start, start, end - start)], READ_TIMEOUT_S)
            if not shape.is_right(memoryview(self._target), chunk, head):
                raise ValueError(f"chunk {chunk} has wrong bytes")
            return end - start

        try:
            self.nbytes += sum(self._pool.map(read, range(shape.chunks)))
        finally:
            link.close()


async def main(model: str, holder: str) -> None:
    store, keys = open_store(os.environ[STORE_ENV]), Keys(model)
    copies = [copy for copy in parsed(keys, (await store.list(keys.copies))[0]) if copy.host == holder]
    await store.close()
    with open_transport("tcp", listen="127.0.0.1", tls=None) as transport:
        async with PeerClient(model, this_host(), transport.name, None) as client:
            await _obey(Reader(transport, client, copies[0]))


async def _obey(reader: Reader) -> None:
    print("there", flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        before, reader.stopped = reader.nbytes, False
        reading = asyncio.create_task(reader.run())
        stopped = asyncio.ensure_future(asyncio.to_thread(sys.stdin.readline))
        await asyncio.wait({reading, stopped}, return_when=asyncio.FIRST_COMPLETED)
        reader.stopped = True
        await reading
        print(reader.nbytes - before, flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2]))
