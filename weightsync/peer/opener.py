"""Opens holders of one key and takes leave of them, so that no ticket or connection outlives its use."""

from __future__ import annotations

import asyncio

from weightsync.errors import ManifestError
from weightsync.peer.bitmap import Bitmap
from weightsync.peer.chunks import Shape
from weightsync.peer.client import PeerClient
from weightsync.peer.ending import Background
from weightsync.peer.messages import Key, Opened
from weightsync.peer.source import Source, bitmap_of
from weightsync.records import CopyRecord
from weightsync.transport import Link, Transport


class OtherChunks(ManifestError):
    """Every byte of a slot follows from its manifest, so two hosts that say different digests: one is wrong."""

    def __init__(self, host: str, digest: str) -> None:
        super().__init__(
            f"host {host} says other digests for the chunks of {digest} than hosts before it: look at the memory of "
            "both, and start all peers with the same --chunk"
        )


class Opener:
    """`shape` is what the first holder said of the chunks; all others must say the same."""

    def __init__(self, client: PeerClient, transport: Transport, key: Key, background: Background) -> None:
        self._client, self._transport, self._key, self._background = client, transport, key, background
        self.shape: Shape | None = None

    async def open(self, record: CopyRecord) -> Source:
        """Raises PeerRefused, PeerUnreachable, OtherChunks, BadBitmap, ValueError."""
        opened = await self._asked(record)
        try:
            source = await self._connected(record, opened)
        except BaseException:  # or the ticket would keep others out until it ends by itself
            self._background.begin(self._client.close(record.host, record.address, opened.ticket, 0))
            raise
        self.shape = source.shape
        return source

    def leave(self, source: Source, bytes_per_s: float) -> None:
        """In the background: it may not answer."""
        self._background.begin(self._say_goodbye(source, bytes_per_s))

    async def _asked(self, record: CopyRecord) -> Opened:
        """Who is cancelled meanwhile gives back the ticket that may come all the same."""
        asking = asyncio.create_task(self._client.open(record.host, record.address, self._key))
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            self._background.begin(self._give_back(record, asking))
            raise

    async def _give_back(self, record: CopyRecord, asking: asyncio.Task[Opened]) -> None:
        await self._client.close(record.host, record.address, (await asking).ticket, 0)

    async def _connected(self, record: CopyRecord, opened: Opened) -> Source:
        shape = Shape(opened.nbytes, opened.chunk_nbytes, opened.digests)
        have = bitmap_of(opened.have, shape.chunks)
        lent = Bitmap.decoded(opened.lent, shape.chunks) if opened.lent else None
        link = await self._linked(opened.endpoint)
        if self.shape is not None and shape != self.shape:
            link.close()
            raise OtherChunks(record.host, self._key.digest)
        return Source(record, opened, shape, link, have, opened.active, lent)

    async def _linked(self, endpoint: bytes) -> Link:
        connecting = asyncio.get_running_loop().run_in_executor(None, self._transport.connect, endpoint)
        try:
            return await asyncio.shield(connecting)
        except asyncio.CancelledError:
            connecting.add_done_callback(lambda late: None if late.exception() else late.result().close())
            raise

    async def _say_goodbye(self, source: Source, bytes_per_s: float) -> None:
        await asyncio.to_thread(source.link.close)
        address, ticket = source.record.address, source.opened.ticket
        await self._client.close(source.host, address, ticket, source.nbytes, bytes_per_s)
