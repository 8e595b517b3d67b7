"""Shares: what ranks on other hosts than the slot's have of a version, held in their memory and read into the slot.

A `Share` waits in its rank's memory, in blocks that a transport registers once, and makes an offer: JSON that says
where its blocks can be read and what lies in them. A `Collector` beside the slot reads the offers of all ranks, one
block while it puts the one before in its place.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import msgspec
import psutil
import xxhash

from weightsync.errors import DigestMismatch, PublishError
from weightsync.format.manifest import Schema, TensorSpec
from weightsync.publish.writer import RawTensor, check_slice, check_whole, copy_sums
from weightsync.transport import Link, Piece, Transport


class Block:
    """`view` is its bytes. `writable`: it is read into. Raises PublishError when there is not so much memory."""

    def __init__(self, transport: Transport, nbytes: int, *, writable: bool) -> None:
        self._mapping = _memory(nbytes)
        self.view = memoryview(self._mapping)
        self.region = transport.register(self._mapping, writable=writable)

    @property
    def nbytes(self) -> int:
        return len(self.view)

    def close(self) -> None:
        """Nobody reads it any more; the memory goes with its last user."""
        self.region.close()
        self.view.release()


def _memory(nbytes: int) -> mmap.mmap:
    """Asked for beforehand: the kernel gives out more than it has, and ends processes when that comes to light."""
    if nbytes > (free := psutil.virtual_memory().available):
        raise PublishError(
            f"a share of the version needs {nbytes:,} bytes of memory, {free:,} are free: put fewer ranks on a host"
        )
    fd = os.memfd_create("hotswap-share")
    try:
        os.ftruncate(fd, nbytes)
        return mmap.mmap(fd, nbytes)
    finally:
        os.close(fd)


WHOLE = -1  # the `dim` of a tensor that is not cut


class Held(msgspec.Struct, frozen=True):
    """A tensor, or `shape[dim]` rows of one from `start` on along `dim`, from byte `offset` of its block on."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    dim: int
    start: int
    offset: int
    digest: str

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec(self.dtype, self.shape)


class OfferedBlock(msgspec.Struct, frozen=True):
    """`region` is the descriptor of its memory, of which `nbytes` are used."""

    region: bytes
    nbytes: int
    held: tuple[Held, ...]


class Offer(msgspec.Struct, frozen=True):
    """`endpoint` is the holder's transport's. Both may hold a token: whoever has the offer may read the share."""

    endpoint: bytes
    blocks: tuple[OfferedBlock, ...]

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Offer:
        """Raises PublishError for what is no offer, or names bytes beyond a block."""
        try:
            offer = msgspec.convert(fields, cls)
        except msgspec.ValidationError as error:
            raise PublishError(f"a rank's offer cannot be read: {error}") from error
        for block in offer.blocks:
            for held in block.held:
                if held.offset < 0 or held.offset + held.spec.nbytes > block.nbytes:
                    raise PublishError(f"a rank's offer of tensor {held.name!r} reaches beyond its block")
        return offer


BLOCK_NBYTES = 64 << 20


class Share:
    """Takes tensors as `SlotWriter` does, one version after the other; what `seal` returns goes to a `Collector`.

    Blocks are kept and registered once: the same tensors find the same places in every version. Until the next `write`
    after a `seal` the memory stays as it is, so a new version may begin when all collectors of the last one are done.
    """

    def __init__(self, transport: Transport, schema: Schema, *, block_nbytes: int = BLOCK_NBYTES) -> None:
        self._transport, self._schema, self._block_nbytes = transport, schema, block_nbytes
        self._blocks: list[Block] = []
        self._held: list[list[Held]] = []
        self._used = 0

    def write(self, name: str, tensor: Any) -> str:
        """Keep a whole tensor; returns its digest. Raises as `SlotWriter.write`, and PublishError without memory."""
        return self._hold(name, check_whole(self._schema, name, tensor), tensor, WHOLE, 0)

    def write_slice(self, name: str, tensor: Any, start: int, dim: int = 0) -> None:
        """Keep this rank's part of a tensor. Raises as `write`."""
        self._hold(name, check_slice(self._schema, name, tensor, start, dim), tensor, dim, start)

    def seal(self) -> dict[str, Any]:
        """The offer of all that was written since the last one: a JSON-able dict.

        Raises TransportUnavailable when nobody could read it any more; then it is discarded.
        """
        written = zip(self._blocks, self._held, strict=False)
        self.discard()
        blocks = [
            OfferedBlock(block.region.descriptor, held[-1].offset + held[-1].spec.nbytes, tuple(held))
            for block, held in written
            if held
        ]
        return Offer(self._transport.endpoint, tuple(blocks)).to_json()

    def discard(self) -> None:
        """Begin anew; what was written since the last `seal` is offered to nobody."""
        self._held, self._used = [], 0

    def close(self) -> None:
        for block in self._blocks:
            block.close()
        self._blocks = []
        self.discard()

    def _hold(self, name: str, spec: TensorSpec, tensor: Any, dim: int, start: int) -> str:
        block, offset = self._place(spec.nbytes)
        sums = copy_sums(block.view[offset : offset + spec.nbytes], tensor, spec)
        self._held[-1].append(Held(name, spec.dtype, spec.shape, dim, start, offset, sums.digest))
        return sums.digest

    def _place(self, nbytes: int) -> tuple[Block, int]:
        """Room behind what was written last, or at the beginning of the next block that has as much."""
        while not self._held or self._used + nbytes > self._blocks[len(self._held) - 1].nbytes:
            if len(self._held) == len(self._blocks):
                size = max(self._block_nbytes, nbytes)
                self._blocks.append(Block(self._transport, size, writable=False))
            self._held.append([])
            self._used = 0
        self._used += nbytes
        return self._blocks[len(self._held) - 1], self._used - nbytes


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
