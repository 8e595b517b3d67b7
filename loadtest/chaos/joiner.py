"""An instance that joins a host where its model was not, serves, and leaves by SIGTERM; and what is held against it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import orjson

from loadtest.chaos.fleet import DRAIN_S, Layout, Snapshot
from loadtest.chaos.verdict import JOINER, Fault, process_name
from weightsync.control.records import PastSwapRecord

READY_S = 300.0  # vLLM starts, beside whatever else is broken
END_S = 15.0  # over its drain: what is left goes to other instances, and vLLM ends
BEHIND_S = 2.0  # the time in which all gateways have heard of a commit
LOST = frozenset({"bad_upstream", "instance_unreachable", "upstream_died", "upstream_timeout"})


@dataclass
class Stay:
    """Times are unix seconds; None: it did not come to that. `leaves_at` is what its record has announced."""

    model: str
    host: int
    instance: str
    began: float
    ready: float | None = None
    told: float | None = None
    leaves_at: float | None = None
    gone: float | None = None
    problem: str = ""


class Joiner:
    """Starts at once; `tend` is to be called again and again, until `stay.gone`."""

    def __init__(self, layout: Layout, fault: Fault) -> None:
        name = process_name(JOINER, fault.host, fault.model)
        self.stay = Stay(fault.model, fault.host, name, time.time())
        self._serves_s = fault.seconds
        self._process = layout.join(fault.model, fault.host, name)

    def tend(self, now: Snapshot) -> None:
        """`now`: what the store says of its model."""
        stay, at, status = self.stay, time.time(), self._process.returncode
        record = now.instances.get(stay.instance)
        if record is not None and stay.told is not None:
            stay.leaves_at = record.leaves_at or stay.leaves_at
        if status is not None:
            self._ended(status)
        elif stay.ready is None:
            if now.follows(stay.instance):
                stay.ready = at
            elif at - stay.began > READY_S:
                self._end(f"not ready after {READY_S:g} s")
        elif stay.told is None:
            if at - stay.ready >= self._serves_s:
                stay.told = at
                self._process.terminate()
        elif at - stay.told > DRAIN_S + END_S:
            self._end(f"still there {DRAIN_S + END_S:g} s after SIGTERM")

    def _ended(self, status: int) -> None:
        stay = self.stay
        stay.gone = time.time()
        if stay.told is None:
            stay.problem = stay.problem or f"ended by itself with status {status}"
        elif status:
            stay.problem = f"ended with status {status} after SIGTERM"
        elif stay.leaves_at is not None and stay.leaves_at > stay.told + DRAIN_S + 1.0:
            stay.problem = f"announced that it leaves {stay.leaves_at - stay.told:.1f} s after SIGTERM"
        self._process.stop()

    def _end(self, problem: str) -> None:
        self.stay.problem, self.stay.gone = problem, time.time()
        self._process.stop()


@dataclass(frozen=True)
class Served:
    """A request that an instance had, by a gateway's log; unix seconds. `first`: the version its answer began with."""

    instance: str
    began: float
    ended: float
    first: int | None
    status: int
    code: str


def served(logs: Iterable[Path], instances: Iterable[str]) -> list[Served]:
    """Requests to these instances, from the gateways' logs."""
    names = set(instances)
    lines = (line for log in logs for line in log.read_bytes().splitlines() if b'"instance"' in line)
    found = []
    for line in lines:
        try:
            said = orjson.loads(line)
        except orjson.JSONDecodeError:  # its gateway was killed as it wrote it
            continue
        if said.get("instance") in names:
            found.append(_served(said))
    return found


def _served(said: Mapping[str, Any]) -> Served:
    ended = datetime.fromisoformat(said["time"]).timestamp()
    first = said.get("weight_version_first")
    return Served(said["instance"], ended - said["duration_s"], ended, first, said["status"], said.get("code") or "")


@dataclass(frozen=True)
class Tenure:
    """A version was the committed one from `since`; some instance may have answered with it until `until`."""

    version: int
    since: float
    until: float


def tenures(past: Iterable[PastSwapRecord]) -> list[Tenure]:
    """Of all commits in the history, unix seconds. A version that is superseded is answered until all have flipped."""
    done = sorted((p for p in past if p.outcome == "done" and p.committed_at), key=lambda p: p.epoch or 0)
    ends = [p.ended_at for p in done[1:]] + [float("inf")]
    return [Tenure(p.version, p.committed_at or 0.0, end) for p, end in zip(done, ends, strict=True)]


Excuse = tuple[float, float]


def complaints(
    stays: Sequence[Stay], requests: Iterable[Served], past: Mapping[str, Sequence[Tenure]], excuses: Sequence[Excuse]
) -> list[str]:
    """Complaints about joiners, in words. `past`: by model; `excuses`: when something beside them was broken, and
    gateways may not have heard of commits, or requests got lost with something else (unix seconds)."""
    said = [f"{stay.instance}: {stay.problem}" for stay in stays if stay.problem]
    of = {stay.instance: [s for s in stays if s.instance == stay.instance] for stay in stays}
    for request in requests:
        if any(start <= request.ended and request.began <= end for start, end in excuses):
            continue
        stay = next(
            (s for s in of[request.instance] if s.began <= request.ended <= (s.gone or request.ended) + END_S), None
        )
        if stay is None:
            said.append(f"an answer of {request.instance}, which was not there: {request}")
        elif request.first is not None and not _current(request, past.get(stay.model, ())):
            said.append(f"an older version than the committed one: {request}")
        elif stay.told is not None and request.code in LOST and request.ended >= stay.told:
            said.append(f"lost as its instance left: {request}")
    return said


def _current(request: Served, past: Sequence[Tenure]) -> bool:
    """Whether its version was the committed one at some moment while it was asked for."""
    mine = [t for t in past if t.version == request.first and t.since <= request.ended]
    unknown = request.first is None or request.first > max(
        (t.version for t in past), default=0
    )  # its swap had not ended
    return unknown or any(request.began <= t.until + BEHIND_S for t in mine)
