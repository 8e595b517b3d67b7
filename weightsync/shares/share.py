"""The share of a rank on another host than the slot's: it waits in this rank's memory for ranks beside the slot."""

from __future__ import annotations

from typing import Any

from weightsync.manifest import Schema, TensorSpec
from weightsync.shares.memory import Block
from weightsync.shares.offer import WHOLE, Held, Offer, OfferedBlock
from weightsync.sources import copy_sums
from weightsync.transport import Transport
from weightsync.writer import check_slice, check_whole

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
