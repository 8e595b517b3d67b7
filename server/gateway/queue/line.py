"""The line in front of the instances: bounded, in classes, fair between keys, and aware of deadlines. No sockets, no
clock of its own: every call says what time it is.

Classes go by priority, the lowest number first, as in vLLM. Every `TURN_FOR_ALL`th departure goes to the class that has
waited longest for its turn instead: the least urgent class moves on too, at a bounded cost to the others. Within a
class the keys' lines are served fairly (flows.py), and each line in the order it came.

When it is full (`max_entries`), the key with the longest line for its weight in the least urgent class makes room: its
last request is sent away, or the new one if that is its own. So a key that sends in bursts displaces itself and no
other key (longest queue drop: Suter, Lakshman, Stiliadis and Choudhury, INFOCOM 1998). Requests are refused with:

    429 queue_full       this key holds the longest line: it sends faster than its share is served
    503 overloaded       what waits is more urgent, or the bodies that wait take `max_bytes`, or the wait would be over
                         `max_wait_s`: the fault of no one client
    503 deadline_unmet   at the measured pace its own deadline cannot be met: refused at once rather than in vain
    504 queue_timeout    its deadline or `max_wait_s` has passed in the line

All carry Retry-After, computed from the pace at which the line moves (`DrainRate`).
"""

from __future__ import annotations

import heapq
import math
from bisect import insort
from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic, TypeVar

from server.errors import HttpError
from server.gateway.config import QueueSettings
from server.gateway.fleet.routing import Need
from server.gateway.queue.flows import Class

TURN_FOR_ALL = 16
MEMORY = 64  # departures over which the rate is averaged, exponentially
LONGEST_RETRY_S = 60
W = TypeVar("W")


@dataclass(slots=True, eq=False)
class Ticket(Generic[W]):
    """A request in the line. `cost` in tokens, `size` in bytes, `deadline` in monotonic seconds.

    `need` is what an instance must have to take it (None: nothing in particular), `since` when it came.
    """

    owner: W
    key: bytes
    weight: int = 1
    priority: int = 0
    cost: int = 1
    size: int = 0
    deadline: float = float("inf")
    need: Need | None = None
    since: float = 0.0
    waits: bool = False


class _Lines(Class[Ticket[W]]):
    """A class, and when it last had a turn (by the count of departures)."""

    def __init__(self, turn: int) -> None:
        super().__init__()
        self.served = turn


class AdmissionQueue(Generic[W]):
    """See above. A ticket stands here at most once; `waits` says whether it does."""

    def __init__(self, settings: QueueSettings) -> None:
        self._settings = settings
        self._classes: dict[int, _Lines[W]] = {}
        self._order: list[int] = []  # priorities seen, most urgent first
        self._aside: dict[Need | None, OrderedDict[Ticket[W], None]] = {}
        self._deadlines: list[tuple[float, int, Ticket[W]]] = []
        self._serial = 0
        self._turn = 0
        self._drain = DrainRate()
        self.waiting = 0  # in the classes' lines
        self.set_aside = 0
        self.bytes = 0

    def __len__(self) -> int:
        return self.waiting + self.set_aside

    def enter(self, ticket: Ticket[W], now: float) -> Ticket[W] | None:
        """Puts `ticket` at the end of its key's line; returns who was sent away for it, if anybody was.

        Raises HttpError (429, 503), and changes nothing then.
        """
        lines = self._lines(ticket.priority)
        if not self.waiting:
            self._drain.began(now)
        self._check_wait(ticket, lines, now)
        if self.bytes + ticket.size > self._settings.max_bytes:
            raise self._overloaded(f"Requests of {self.bytes} bytes wait", now)
        evicted = self._make_room(ticket, lines, now) if len(self) >= self._settings.max_entries else None
        if evicted is not None:
            self.leave(evicted)
        lines.push(ticket)
        self.waiting += 1
        self._admit(ticket, now)
        return evicted

    def pop(self, now: float) -> Ticket[W]:
        """Takes the ticket that goes next. At least one must be `waiting`."""
        self._turn += 1
        lines = self._next_class()
        lines.served = self._turn
        ticket = lines.pop()
        self.waiting -= 1
        self._left(ticket)
        self._drain.departed(now)
        return ticket

    def leave(self, ticket: Ticket[W]) -> None:
        """It goes without its turn, from wherever it stands."""
        aside = self._aside.get(ticket.need)
        if aside is not None and ticket in aside:
            del aside[ticket]
            self.set_aside -= 1
            if not aside:
                del self._aside[ticket.need]
        else:
            self._classes[ticket.priority].remove(ticket)
            self.waiting -= 1
        self._left(ticket)

    def put_aside(self, ticket: Ticket[W]) -> None:
        """Its turn came, but what it needs is busy: it must not stop those behind it, and goes first when it is not."""
        self._aside.setdefault(ticket.need, OrderedDict())[ticket] = None
        self.set_aside += 1
        self.bytes += ticket.size
        ticket.waits = True

    def needs(self) -> list[Need | None]:
        """The needs of the tickets put aside."""
        return list(self._aside)

    def first_aside(self, need: Need | None) -> Ticket[W] | None:
        """The request that was put aside first for `need`."""
        return next(iter(self._aside.get(need, ())), None)

    def settle(self, key: bytes, priority: int, more: int) -> None:
        """A request that was let through for `key` cost `more` tokens than its ticket said (fewer, if negative)."""
        lines = self._classes.get(priority)
        if lines is not None:
            lines.settle(key, more)

    def next_deadline(self) -> float:
        """When the first of those that wait must go (monotonic seconds), infinity if nobody waits."""
        while self._deadlines and not self._deadlines[0][2].waits:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else float("inf")

    def expire(self, now: float) -> list[Ticket[W]]:
        """Takes those whose time is up."""
        over = []
        while self.next_deadline() <= now:
            ticket = heapq.heappop(self._deadlines)[2]
            self.leave(ticket)
            over.append(ticket)
        return over

    def depths(self) -> dict[int, int]:
        """How many wait, by priority; classes that have ever been used. Those set aside are not among them."""
        return {priority: len(self._classes[priority]) for priority in self._order}

    def displaced(self, ticket: Ticket[W], by: Ticket[W], now: float) -> HttpError:
        """The answer to a request that was sent away for another."""
        if by.priority < ticket.priority:
            return self._overloaded("More urgent requests wait", now)
        return self._full(now)

    def _full(self, now: float) -> HttpError:
        message = "This key (without keys: all clients together) fills the queue; send fewer concurrent requests."
        return HttpError(429, message, code="queue_full", retry_after_s=self._drained_in(now))

    def timed_out(self, waited_s: float, now: float) -> HttpError:
        """The answer to a request whose time is up."""
        message = f"No instance had room for this request within {waited_s:.3g} s; try again."
        return HttpError(504, message, code="queue_timeout", retry_after_s=self._drained_in(now))

    # within

    def _lines(self, priority: int) -> _Lines[W]:
        lines = self._classes.get(priority)
        if lines is None:
            lines = self._classes[priority] = _Lines(self._turn)
            insort(self._order, priority)
        return lines

    def _next_class(self) -> _Lines[W]:
        waiting = [lines for p in self._order if len(lines := self._classes[p])]
        if self._turn % TURN_FOR_ALL:
            return waiting[0]
        return min(waiting, key=lambda lines: lines.served)

    def _check_wait(self, ticket: Ticket[W], lines: _Lines[W], now: float) -> None:
        ahead = sum(len(self._classes[p]) for p in self._order if p < ticket.priority)
        ahead += lines.ahead(ticket.key, ticket.weight)
        if not ahead:
            return  # who is next may always try: an estimate that nobody may test would stand for ever
        wait_s = self._drain.wait_s(ahead, now)
        if now + wait_s > ticket.deadline:
            over_s = now + wait_s - ticket.deadline
            message = f"At the present pace this request would wait {wait_s:.1f} s, past its deadline; try again later."
            raise HttpError(503, message, code="deadline_unmet", retry_after_s=retry_after(over_s))
        if wait_s > self._settings.max_wait_s:
            raise self._overloaded(f"This request would wait {wait_s:.1f} s", now, wait_s - self._settings.max_wait_s)

    def _make_room(self, ticket: Ticket[W], lines: _Lines[W], now: float) -> Ticket[W]:
        last = next((p for p in reversed(self._order) if len(self._classes[p])), None)
        if last is None or ticket.priority > last:
            raise self._overloaded(f"{len(self)} more urgent requests wait", now)
        if ticket.priority == last and lines.is_longest(ticket.key):
            raise self._full(now)
        return self._classes[last].longest()[1]

    def _overloaded(self, what: str, now: float, retry_s: float | None = None) -> HttpError:
        seconds = self._drained_in(now) if retry_s is None else retry_after(retry_s)
        return HttpError(
            503, f"{what}, as much as this gateway lets wait; try again.", code="overloaded", retry_after_s=seconds
        )

    def _drained_in(self, now: float) -> int:
        return retry_after(self._drain.wait_s(self.waiting, now))

    def _admit(self, ticket: Ticket[W], now: float) -> None:
        ticket.waits = True
        ticket.deadline = min(ticket.deadline, now + self._settings.max_wait_s)
        self.bytes += ticket.size
        self._serial += 1
        heapq.heappush(self._deadlines, (ticket.deadline, self._serial, ticket))
        if len(self._deadlines) > 2 * len(self) + 64:  # most have gone before their time was up
            self._deadlines = [entry for entry in self._deadlines if entry[2].waits]
            heapq.heapify(self._deadlines)

    def _left(self, ticket: Ticket[W]) -> None:
        ticket.waits = False
        self.bytes -= ticket.size


class DrainRate:
    """The measured speed of the line: departures per second of the time in which somebody waits.

    Waiting times and Retry-After are computed from it. Times are monotonic seconds.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._departures = 0.0
        self._since = 0.0

    def began(self, now: float) -> None:
        """The line is no longer empty."""
        self._since = now

    def departed(self, now: float) -> None:
        """One was let through."""
        keep = 1.0 - 1.0 / MEMORY
        self._seconds = self._seconds * keep + (now - self._since)
        self._departures = self._departures * keep + 1.0
        self._since = now

    def wait_s(self, ahead: int, now: float) -> float:
        """Seconds until one with `ahead` before it goes; 0.0 while nothing has been measured.

        A line that has stood still for longer than its usual pace is believed to go on doing so.
        """
        if not self._departures:
            return 0.0
        return (ahead + 1) * max(self._seconds / self._departures, (now - self._since) / MEMORY)


def retry_after(seconds: float) -> int:
    """Whole seconds for a Retry-After header."""
    return min(max(1, math.ceil(seconds)), LONGEST_RETRY_S)
