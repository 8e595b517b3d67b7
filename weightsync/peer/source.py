"""A holder that a fetch has open."""

from __future__ import annotations

from dataclasses import dataclass

from weightsync.peer.bitmap import Bitmap
from weightsync.peer.chunks import Shape
from weightsync.peer.messages import ALL, Opened
from weightsync.peer.plan import Holder
from weightsync.records import CopyRecord
from weightsync.transport import Link

DISTANCES_S = (0.003, 0.015, 0.06)  # round trips: one rack, one site, one region; farther


@dataclass(eq=False)
class Source:
    """With a ticket there. `have` None: everything; `lent`: what its readers have or are reading."""

    record: CopyRecord
    opened: Opened
    shape: Shape
    link: Link
    have: Bitmap | None
    active: int
    lent: Bitmap | None = None
    round_trip_s: float = 0.0
    nbytes: int = 0
    reads: int = 0  # under way

    @property
    def host(self) -> str:
        return self.record.host

    def holder(self, rack: str) -> Holder:
        """As the planner of a reader in `rack` sees it."""
        far = distance(self.record, rack, self.round_trip_s)
        return Holder(self.host, far, self.have, max(0, self.active - 1), self.lent)


def known_holder(record: CopyRecord, rack: str) -> Holder:
    """One that is not open, as far as its record tells: whether it has everything, or nothing for certain."""
    return Holder(record.host, distance(record, rack), None if record.state == "ready" else Bitmap(1))


def distance(record: CopyRecord, rack: str, round_trip_s: float = 0.0) -> int:
    """0 in the same rack; by the round trip where racks are not known, and never 0 where they are known to differ."""
    if rack and record.rack:
        return 0 if rack == record.rack else max(1, _class(round_trip_s))
    return _class(round_trip_s)


def bitmap_of(have: str, chunks: int) -> Bitmap | None:
    """None: everything. Raises BadBitmap."""
    return None if have == ALL else Bitmap.decoded(have, chunks)


def _class(round_trip_s: float) -> int:
    return sum(round_trip_s > limit for limit in DISTANCES_S)
