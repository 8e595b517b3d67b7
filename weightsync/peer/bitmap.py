"""Which chunks of a slot a host has."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator

from weightsync.errors import TransferError


class BadBitmap(TransferError):
    """What a peer sent as its list of chunks is none, or is of a slot of another size; do not read from that peer."""

    code = "bad_bitmap"

    def __init__(self, problem: str) -> None:
        super().__init__(f"a peer's list of chunks cannot be used: {problem}. Does it run the same release?")


class Bitmap:
    """A set of chunk numbers below `chunks`, one bit each, in one integer: whole sets are joined in microseconds.

    Change it from one thread; another may read `bits`, which is replaced and never altered.
    """

    __slots__ = ("bits", "chunks")

    def __init__(self, chunks: int, bits: int = 0) -> None:
        assert bits >> chunks == 0, "chunk out of range"
        self.chunks = chunks
        self.bits = bits

    @classmethod
    def full(cls, chunks: int) -> Bitmap:
        return cls(chunks, (1 << chunks) - 1)

    def add(self, chunk: int) -> None:
        assert 0 <= chunk < self.chunks, "chunk out of range"
        self.bits |= 1 << chunk

    def discard(self, chunk: int) -> None:
        self.bits &= ~(1 << chunk)

    @property
    def complete(self) -> bool:
        return self.bits == (1 << self.chunks) - 1

    def missing(self) -> Iterator[int]:
        """What is not in it, in ascending order."""
        return iter(Bitmap(self.chunks, self.bits ^ ((1 << self.chunks) - 1)))

    def encoded(self) -> str:
        """Base64; bit `n % 8` of byte `n // 8` is chunk `n`."""
        return base64.b64encode(self.bits.to_bytes(-(-self.chunks // 8), "little")).decode()

    @classmethod
    def decoded(cls, text: str, chunks: int) -> Bitmap:
        """Raises BadBitmap, unless `text` is just what `encoded` makes of a set below `chunks`."""
        try:
            raw = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError) as error:
            raise BadBitmap(f"not base64 ({error})") from error
        bits = int.from_bytes(raw, "little")
        if len(raw) != -(-chunks // 8) or bits >> chunks:
            raise BadBitmap(f"{len(raw)} bytes do not stand for {chunks} chunks")
        return cls(chunks, bits)

    def __contains__(self, chunk: int) -> bool:
        return self.bits >> chunk & 1 == 1

    def __len__(self) -> int:
        return self.bits.bit_count()

    def __iter__(self) -> Iterator[int]:
        return (chunk for chunk, bit in enumerate(reversed(f"{self.bits:b}")) if bit == "1")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Bitmap) and (self.chunks, self.bits) == (other.chunks, other.bits)

    def __repr__(self) -> str:
        return f"Bitmap({len(self)} of {self.chunks})"

    __hash__ = None  # type: ignore[assignment]  # it changes
