"""From a request to an instance that is asked: the line, the choice, the hold, the connection.

What comes back is exchange.py's affair, and so is what happens when nobody can be asked.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Final

from server.errors import BadUpstream, HttpError, Unavailable
from server.gateway.access.limits import Cost, reckon
from server.gateway.fleet import retries
from server.gateway.fleet.instance import Instance
from server.gateway.fleet.view import Fleet
from server.gateway.observe.stats import Stats
from server.gateway.proxy import failover
from server.gateway.proxy.failover import Continuation
from server.gateway.proxy.request import Request
from server.gateway.queue.gate import Gate, Waiter
from server.gateway.queue.line import Ticket
from server.gateway.wire.head import upstream_head
from server.gateway.wire.pool import UpstreamConnection

log: Final = logging.getLogger("hotswap.gateway")


class Placing(ABC):
    """The half of an exchange that finds an instance. It has at most one instance and one connection at a time."""

    __slots__ = (
        "_charged",
        "_connecting",
        "_continuation",
        "_cost",
        "_fleet",
        "_gate",
        "_held_at",
        "_held_for",
        "_link",
        "_passed",
        "_paused",
        "_pooled",
        "_stats",
        "_tried",
        "instance",
        "last_instance",
        "last_progress",
        "queued_s",
        "request",
        "started",
        "ticket",
    )

    def __init__(self, request: Request, fleet: Fleet, gate: Gate, stats: Stats) -> None:
        self._gate = gate
        self._fleet = fleet
        self._stats = stats
        self._passed = not request.target.route.works  # it has been let through, and stays so
        self._cost: Cost | None = None  # as the queue reckons with it
        self._charged: Cost | None = None  # the same, once its turn in the queue has come
        self._link: UpstreamConnection | None = None
        self._continuation: Continuation | None = None  # of a stream whose instance has died, the last time
        self._connecting: asyncio.Task[None] | None = None
        self._tried: list[Instance] = []
        self._pooled = False
        self._paused = False
        self._held_at = 0.0  # 0.0: it is not held
        self._held_for = ""
        self.request = request
        self.ticket: Ticket[Waiter] | None = None  # while it is queued
        self.instance: Instance | None = None
        self.last_instance = ""  # the id of the last one that was asked
        self.started = self.last_progress = time.monotonic()
        self.queued_s = 0.0  # in the line, before an instance was chosen

    # for the other half

    @abstractmethod
    def turned_away(self, error: HttpError) -> None:
        """It was queued in vain, or could not be (gate.Waiter)."""

    @abstractmethod
    def upstream_data(self, data: bytes) -> None:
        """Bytes of the instance (upstream.Owner)."""

    @abstractmethod
    def upstream_lost(self, exc: Exception | None) -> None:
        """The connection has ended (upstream.Owner)."""

    @abstractmethod
    def _lost(self, instance: Instance, failure: HttpError) -> None:
        """It was sent to `instance`, which has died without a byte."""

    @abstractmethod
    def _break_off(self, error: HttpError) -> None:
        """Nobody can be asked, now or soon."""

    # who waits for it

    def wake(self) -> None:
        """It was held, and something has changed or its time is up (waiting.Waiter)."""
        self._fleet.room.leave(self)
        self._tried.clear()
        self._try_next(None)

    def go_on(self) -> None:
        """It was queued, and its turn has come (gate.Waiter)."""
        self._passed = True
        self._charged = self._cost
        self._try_next(None)

    # choosing and connecting

    def _try_next(self, failure: HttpError | None) -> None:
        self._drop_instance()
        if not (self._passed or self._gate.open_to(self.request.need)):
            self._stand_in_line()
            return
        instance = self._fleet.pick(self._tried, self.request.need, self.request.hint)
        if instance is None:
            self._hold(failure)
            return
        self._hold_ended("served")
        self._tried.append(instance)
        self._use(instance)

    def _stand_in_line(self) -> None:
        self._hold_ended("queued")
        request = self.request
        ticket: Ticket[Waiter] = Ticket(self, request.principal.digest, request.principal.weight, request.priority)
        ticket.need, ticket.size = request.need, len(request.body)
        ticket.deadline = self.started + request.deadline_s
        self._cost = reckon(request.fields, request.target.route.name, len(request.body))
        ticket.cost = self._cost.total
        try:
            self._gate.join(ticket)
        except HttpError as error:
            self.turned_away(error)

    def _hold(self, failure: HttpError | None) -> None:
        if self._continuation is not None:
            patience = self._continuation.patience(self.started, self._fleet.settings.hold_s)
        else:
            patience = self._fleet.patience(self.request.need, failure)
            if self.request.deadline_s < patience.seconds:
                patience = replace(patience, seconds=self.request.deadline_s)
        try:
            self._fleet.room.enter(self, patience, soon=bool(self._tried))
        except HttpError as error:
            if self._continuation is not None:
                self._stats.failovers["nobody"] += 1
            self._break_off(error)
            return
        if not self._held_at:
            self._held_at, self._held_for = time.monotonic(), patience.kind

    def _hold_ended(self, outcome: str) -> None:
        if self._held_at:
            self._fleet.room.leave(self)
            self._stats.held(self._held_for, outcome, time.monotonic() - self._held_at)
            self._held_at = 0.0

    def _use(self, instance: Instance) -> None:
        self.instance = instance
        self.last_instance = instance.id
        instance.inflight += 1
        if self.request.target.route.works:
            self._passed = True
            instance.working += 1
        link = instance.pool.take()
        self._pooled = link is not None
        if link is not None:
            self._send(link)
        else:
            self._connecting = asyncio.get_running_loop().create_task(self._connect(instance))

    async def _connect(self, instance: Instance, *, resent: bool = False) -> None:
        try:
            await self._connect_to(instance, resent=resent)
        except Exception:  # nobody awaits this task: its client would wait for ever
            log.exception("%s: a fault of the gateway", self.request.head.request_id.decode())
            self._connecting = None
            self._break_off(HttpError("The gateway failed to send this request on; the fault is in its log."))

    async def _connect_to(self, instance: Instance, *, resent: bool) -> None:
        try:
            link = await instance.pool.connect()
        except Unavailable as exc:
            self._fleet.connect_failed(instance)
            self._connecting = None
            if resent:  # what was sent to it first may be what killed it
                self._lost(instance, BadUpstream("The instance died before its first byte.", code="upstream_died"))
                return
            self._try_next(exc)
            self._count_retry("not_sent")
            return
        self._connecting = None
        self._send(link)

    def _send(self, link: UpstreamConnection) -> None:
        assert self.instance is not None
        request = self.request
        body, lines = request.body, b"" if request.failover == "off" else failover.WANTED
        if self._continuation is not None:
            body, lines = self._continuation.prefix + body, self._continuation.lines
        head = upstream_head(
            request.target.route.method,
            request.target.upstream,
            self.instance.pool.opening,
            request.head,
            len(body),
            lines,
        )
        self._link = link
        self.last_progress = time.monotonic()
        link.send(self, head, body)
        if self._paused:
            link.pause()

    def _count_retry(self, why: retries.Failure) -> None:
        if self.instance is not None:
            self._fleet.retries[why] += 1

    def _drop_instance(self) -> None:
        if self.instance is not None:
            self.instance.inflight -= 1
            if self.request.target.route.works:
                self.instance.working -= 1
                self._gate.changed()
            self.instance = None
