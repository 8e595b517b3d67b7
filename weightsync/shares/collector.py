"""Brings what ranks on other hosts hold into the slot: a block is read while the one before is put in its place."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import xxhash

from weightsync.errors import DigestMismatch
from weightsync.shares.memory import Block
from weightsync.shares.offer import WHOLE, Held, Offer, OfferedBlock
from weightsync.sources import RawTensor
from weightsync.transport import Link, Piece, Transport

TIMEOUT_S = 120.0


class Writer(Protocol):
    """A Draft, or a SlotWriter."""

    def write(self, name: str, tensor: Any) -> str: ...

    def write_slice(self, name: str, tensor: Any, start: int, dim: int = 0) -> None: ...


class Collector:
    """One for a rank beside the slot, for all versions: its two blocks of memory are registered once.

    `timeout_s` is for the read of one block. Not thread-safe.
    """

    def __init__(self, transport: Transport, *, timeout_s: float = TIMEOUT_S) -> None:
        self._transport, self._timeout_s = transport, timeout_s
        self._blocks: list[Block | None] = [None, None]

    def collect(self, offer: Mapping[str, Any], writer: Writer) -> int:
        """Write all that `offer` holds; returns its bytes. The holder must keep it as it is meanwhile.

        Raises TransferError, DigestMismatch (what arrived is not what was offered), PublishError, and as `writer`.
        """
        parsed = Offer.from_json(offer)
        if not parsed.blocks:
            return 0
        link = self._transport.connect(parsed.endpoint)
        with contextlib.closing(self._read_all(link, parsed)) as read:  # waits for the last read, which the link ends
            try:
                for block, data in zip(parsed.blocks, read, strict=True):
                    for held in block.held:
                        _put(writer, held, data[held.offset : held.offset + held.spec.nbytes])
            finally:
                link.close()
        return sum(block.nbytes for block in parsed.blocks)

    def close(self) -> None:
        for block in self._blocks:
            if block is not None:
                block.close()
        self._blocks = [None, None]

    def _read_all(self, link: Link, offer: Offer) -> Generator[memoryview]:
        """The bytes of each block, in turn, while the one after it is read."""
        with ThreadPoolExecutor(1, "hotswap-collect") as reader:
            following = reader.submit(self._read, link, offer.blocks[0], 0)
            for turn in range(len(offer.blocks)):
                data = following.result()
                if turn + 1 < len(offer.blocks):
                    following = reader.submit(self._read, link, offer.blocks[turn + 1], (turn + 1) % 2)
                yield data

    def _read(self, link: Link, offered: OfferedBlock, turn: int) -> memoryview:
        into = self._blocks[turn]
        if into is None or into.nbytes < offered.nbytes:
            if into is not None:
                into.close()
                self._blocks[turn] = None  # there may be no memory for another
            into = self._blocks[turn] = Block(self._transport, max(offered.nbytes, 1), writable=True)
        link.read(into.region, offered.region, [Piece(0, 0, offered.nbytes)], self._timeout_s)
        return into.view[: offered.nbytes]


def _put(writer: Writer, held: Held, data: memoryview) -> None:
    tensor = RawTensor(held.spec, data)
    if held.dim == WHOLE:
        digest = writer.write(held.name, tensor)
    else:
        digest = xxhash.xxh3_128_hexdigest(data)
        writer.write_slice(held.name, tensor, held.start, held.dim)
    if digest != held.digest:
        raise DigestMismatch(held.name, held.digest, digest)
