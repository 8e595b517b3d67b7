"""What the readers of this host have, or are reading: they tell it, so that others ask for something else."""

from __future__ import annotations

from weightsync.peer.bitmap import Bitmap
from weightsync.peer.messages import Key


class Lent:
    """Bits of the chunks, by slot. Belongs to the event loop."""

    def __init__(self) -> None:
        self._bits: dict[Key, int] = {}

    def add(self, key: Key, taken: str, chunks: int) -> None:
        """A bitmap of `chunks`, as a reader says it. Raises BadBitmap."""
        self._bits[key] = self._bits.get(key, 0) | Bitmap.decoded(taken, chunks).bits

    def told(self, key: Key, chunks: int) -> str:
        """All that was added, for other readers; "" before the first."""
        bits = self._bits.get(key)
        return Bitmap(chunks, bits).encoded() if bits else ""

    def forget(self, key: Key) -> None:
        """Nobody reads it any more."""
        self._bits.pop(key, None)
