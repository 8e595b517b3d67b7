"""A slot that this host can offer to others, as its peer has it mapped."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from weightsync.arena import SlotLock
from weightsync.peer.bitmap import Bitmap
from weightsync.peer.chunks import Head, Shape
from weightsync.peer.journal import Journal
from weightsync.peer.messages import Key
from weightsync.peer.regions import Mapped


@dataclass
class Published:
    """A slot that a publisher of this host wrote. `shape` is known once its chunks were digested."""

    key: Key
    path: Path
    mapped: Mapped
    shape: Shape | None = None

    @property
    def nbytes(self) -> int:
        return len(self.mapped.view)

    @property
    def have(self) -> Bitmap | None:
        """None: everything."""
        return None


@dataclass
class Copy:
    """A slot or delta that was, or is being, fetched; `whole` once all of it is there and was verified.

    `head` is known of a slot that this process fetched: its manifest is not in the slot before it is whole.
    """

    key: Key
    part: str
    path: Path
    lock: SlotLock
    mapped: Mapped
    shape: Shape
    journal: Journal
    head: Head | None = None
    whole: bool = False

    @property
    def nbytes(self) -> int:
        return self.shape.nbytes

    @property
    def have(self) -> Bitmap | None:
        return None if self.whole else self.journal.done
