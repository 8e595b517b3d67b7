"""Slices: which bytes of a version the ranks of one host read, so that their peer need not fetch the others.

A `Slices` has a bit for each block of a slot. All versions of one schema lie alike, so it holds for each of them, in
whatever chunks one travels. It is small: a version of two terabytes has 65,536 blocks, which are 8 KiB.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable
from dataclasses import dataclass

import xxhash

from weightsync.errors import ManifestError
from weightsync.format.manifest import PAGE, Layout, Schema

MOST_BLOCKS = 1 << 16


@dataclass(frozen=True)
class Slices:
    """The blocks of `block_nbytes` bytes of a slot that are needed: bit n of `blocks` is block n. `schema` is the
    digest of the schema whose slots these are."""

    schema: str
    block_nbytes: int
    blocks: int

    @classmethod
    def of(cls, schema: Schema, ranges: Iterable[tuple[str, int, int]]) -> Slices:
        """`ranges`: (tensor, first byte of it, byte after the last)."""
        layout = Layout.of(schema)
        size = PAGE
        while size * MOST_BLOCKS < layout.total_nbytes:
            size *= 2
        blocks = 0
        for name, first, end in ranges:
            if first < end:
                start, stop = (layout.offsets[name] + first) // size, -(-(layout.offsets[name] + end) // size)
                blocks |= (1 << stop) - (1 << start)
        return cls(schema.digest, size, blocks)

    def joined(self, other: Slices) -> Slices:
        """The slices that either needs; both are of one schema."""
        assert (self.schema, self.block_nbytes) == (other.schema, other.block_nbytes), "of another schema"
        return Slices(self.schema, self.block_nbytes, self.blocks | other.blocks)

    def chunks(self, nbytes: int, chunk_nbytes: int) -> int:
        """Bits of the chunks, of a slot of `nbytes`, that have something of it."""
        found = 0
        for chunk, start in enumerate(range(0, nbytes, chunk_nbytes)):
            first = start // self.block_nbytes
            end = -(-min(start + chunk_nbytes, nbytes) // self.block_nbytes)
            if self.blocks >> first & ((1 << end - first) - 1):
                found |= 1 << chunk
        return found

    @property
    def digest(self) -> str:
        """Equal for equal slices: xxh3_128 in hex."""
        found: str = xxhash.xxh3_128_hexdigest(self.to_text().encode())
        return found

    def to_text(self) -> str:
        """Schema, block size and, in base64, the blocks, the lowest byte first."""
        raw = self.blocks.to_bytes(-(-self.blocks.bit_length() // 8), "little")
        return f"{self.schema} {self.block_nbytes} {base64.b64encode(raw).decode()}"

    @classmethod
    def from_text(cls, text: str) -> Slices:
        """Raises ManifestError."""
        schema, _, rest = text.partition(" ")
        size, _, encoded = rest.partition(" ")
        try:
            raw, block_nbytes = base64.b64decode(encoded, validate=True), int(size)
        except (binascii.Error, ValueError) as error:
            raise ManifestError(f"no slices of a version ({error}): does the instance run the same release?") from error
        if block_nbytes < PAGE or 8 * len(raw) > MOST_BLOCKS + 7:
            raise ManifestError("no slices of a version: does the instance run the same release?")
        return cls(schema, block_nbytes, int.from_bytes(raw, "little"))
