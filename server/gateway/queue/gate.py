"""Between the queue and the fleet: who may go on to an instance now, who waits, and who goes when room appears.

A request passes at once if nobody waits and an instance that may take it has room (its in-flight limit, `Window`):
no ticket is made and nothing is stored. Else it gets a ticket and waits in line.py. Room appears when a request leaves
an instance, or the fleet or a limit changes; then those whose turn it is go on, in the same step of the event loop.

A request that has been let through stays so: if its instance turns out to be gone, it is tried elsewhere or held
(fleet/retries.py) without waiting in line a second time, even if that is over a limit for the moment. One whose need
for a version no free instance meets steps aside and goes first when one does; the others pass.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Protocol

from server.errors import HttpError
from server.gateway.config import QueueSettings
from server.gateway.fleet.instance import Instance
from server.gateway.fleet.routing import Need
from server.gateway.fleet.view import Fleet
from server.gateway.observe.stats import Histogram
from server.gateway.queue.line import AdmissionQueue, Ticket


class Waiter(Protocol):
    """A waiting request. `ticket` is set while it does, `queued_s` is how long it has."""

    ticket: Ticket[Waiter] | None
    queued_s: float

    def go_on(self) -> None:
        """Its turn has come."""
        ...

    def turned_away(self, error: HttpError) -> None:
        """It waited in vain."""
        ...


class Gate:
    """One gateway's queue in front of its fleet. Counts are by priority, of which there are few, and by outcome:
    served, refused, displaced, timed_out, left.
    """

    def __init__(self, fleet: Fleet, settings: QueueSettings) -> None:
        self._fleet = fleet
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = 0.0
        self._letting_through = False
        self.queue: AdmissionQueue[Waiter] = AdmissionQueue(settings)
        self.outcomes: Counter[tuple[int, str]] = Counter()
        self.wait_seconds: dict[int, Histogram] = {}

    def open_to(self, need: Need | None) -> bool:
        """Whether a request may go on at once. Also if nobody could ever take it: that is for routing to say."""
        if need is not None:
            able = self._able(need)
            return not able or (not self.queue.waiting and _any_room(able))
        if self.queue.waiting:
            return False
        return _any_room(self._able(None)) or not self._fleet.serving

    def join(self, ticket: Ticket[Waiter]) -> None:
        """Puts it in line. Raises HttpError (429, 503) and puts nobody there, or another is turned away for it."""
        now = ticket.since = time.monotonic()
        try:
            displaced = self.queue.enter(ticket, now)
        except HttpError:
            self.outcomes[ticket.priority, "refused"] += 1
            raise
        ticket.owner.ticket = ticket
        self._watch_deadlines()
        if displaced is not None:
            self._turn_away(displaced, "displaced", self.queue.displaced(displaced, ticket, now))
        self.changed()  # the room may have been there, only for others

    def leave(self, ticket: Ticket[Waiter]) -> None:
        """Its client has gone."""
        self.queue.leave(ticket)
        self._ended(ticket, "left")

    def changed(self) -> None:
        """There may be room: lets through who goes next, as far as it reaches."""
        if self._letting_through or not len(self.queue):
            return
        self._letting_through = True
        try:
            self._let_through()
        finally:
            self._letting_through = False

    def close(self) -> None:
        """The gateway ends."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _let_through(self) -> None:
        now = time.monotonic()
        for need in self.queue.needs():
            while self._has_room(need) and (first := self.queue.first_aside(need)) is not None:
                self.queue.leave(first)
                self._go_on(first)
        while self.queue.waiting and self._has_room(None):
            ticket = self.queue.pop(now)
            if self._has_room(ticket.need):
                self._go_on(ticket)
            else:
                self.queue.put_aside(ticket)

    def _has_room(self, need: Need | None) -> bool:
        """Whether an instance that may take it has room; or, with a need, if there is none to wait for."""
        able = self._able(need)
        return _any_room(able) or (need is not None and not able)

    def _able(self, need: Need | None) -> list[Instance]:
        """The instances that may be asked, by what `Fleet.pick` goes by; those that are unwell only if all are."""
        able = self._fleet.serving
        if need is not None:
            able = [i for i in able if need.met_by(i.record.active_version)]
        if self._fleet.unwell:
            able = [i for i in able if i not in self._fleet.unwell] or able
        return able

    def _go_on(self, ticket: Ticket[Waiter]) -> None:
        self._ended(ticket, "served")
        ticket.owner.go_on()

    def _turn_away(self, ticket: Ticket[Waiter], outcome: str, error: HttpError) -> None:
        self._ended(ticket, outcome)
        ticket.owner.turned_away(error)

    def _ended(self, ticket: Ticket[Waiter], outcome: str) -> None:
        waited_s = time.monotonic() - ticket.since
        ticket.owner.ticket = None
        ticket.owner.queued_s += waited_s
        self.outcomes[ticket.priority, outcome] += 1
        histogram = self.wait_seconds.get(ticket.priority)
        if histogram is None:
            histogram = self.wait_seconds[ticket.priority] = Histogram()
        histogram.observe(waited_s)

    def _watch_deadlines(self) -> None:
        """One timer for all: it goes off when the first one's time is up."""
        due = self.queue.next_deadline()
        if self._timer is not None and self._timer_due <= due:
            return
        self.close()
        if due < float("inf"):
            self._timer_due = due
            self._timer = asyncio.get_running_loop().call_later(max(0.0, due - time.monotonic()), self._time_up)

    def _time_up(self) -> None:
        self._timer = None
        now = time.monotonic()
        for ticket in self.queue.expire(now):
            error = self.queue.timed_out(now - ticket.since, now) if self._fleet.serving else self._fleet.unavailable()
            self._turn_away(ticket, "timed_out", error)
        self._watch_deadlines()


def _any_room(instances: list[Instance]) -> bool:
    for instance in instances:  # noqa: SIM110 - as a rule the first one has, and a generator costs more than that
        if instance.working < instance.window.limit:
            return True
    return False
