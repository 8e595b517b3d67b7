"""A receiver, a read under way, and what comes of all of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from loadtest.scale.network import Station
from weightsync.peer.chunks import Bitmap
from weightsync.peer.holders import Patience
from weightsync.peer.plan import Assignment, Holder, Planner


@dataclass
class Outcome:
    """`done_s`: when each receiver had its bytes, ascending. `crossed_nbytes` went from rack to rack."""

    done_s: list[float] = field(default_factory=list)
    out_nbytes: list[int] = field(default_factory=list)  # the sources first, then the receivers
    in_nbytes: list[int] = field(default_factory=list)  # of the receivers
    source_nbytes: int = 0
    crossed_nbytes: int = 0
    reads: int = 0
    opened: int = 0
    refused: int = 0
    asked: int = 0  # questions to holders what they have by now
    planned: int = 0
    planner_s: float = 0.0


@dataclass(slots=True)
class Host:
    """A receiver of shard `shard`. `links`: the holders it has open."""

    number: int
    shard: int
    planner: Planner
    done: Bitmap
    reading: int = 0  # bits of the chunks in flight
    in_flight: dict[int, Assignment] = field(default_factory=dict)
    links: dict[int, None] = field(default_factory=dict)  # in the order in which they were opened
    refused: dict[int, float] = field(default_factory=dict)  # until when not to ask
    holders: list[Holder] = field(default_factory=list)
    patience: Patience = field(default_factory=Patience)
    turn: int = 0
    done_at: float | None = None

    def begin(self, read: Assignment) -> None:
        self.in_flight[read.chunk] = read
        self.reading |= 1 << read.chunk

    def end(self, chunk: int) -> None:
        del self.in_flight[chunk]
        self.reading &= ~(1 << chunk)
        self.done.add(chunk)


@dataclass(slots=True)
class Read:
    """A chunk under way; `stage` counts the stations it has passed."""

    reader: Host
    chunk: int
    nbytes: int
    path: tuple[Station, ...]
    stage: int = 0
