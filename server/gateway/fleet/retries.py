"""A request that no instance answers is sent to another one, held for a while, or continued elsewhere.

**Retries**, while nothing of an answer has come: a client must never get the beginning of one answer and the end of
another.

* not sent (the connection was refused, or not accepted in time): always, each instance once. It has cost nobody work.
* refused (`x-hotswap-refused`: another version runs there now, or its engine had died before): always; nothing was
  begun.
* lost (sent, then the connection broke without a byte, or the engine died): once, and within the budget. No work is
  done twice: an instance that dies takes it along, one that only lost the connection aborts it, as vLLM does when a
  client leaves. Once, because a request may be what killed the instance. Not on NEVER_AGAIN, where work outlives its
  connection.
* anything else (silence until the timeout, an answer that is no HTTP, a 5xx of the instance): never. It may have taken
  long already, and the next instance would be asked for the same.

The budget (as Finagle has it): a share of the requests, and MIN_PER_S more; savings last for WINDOW_S.

**Holding**: a request that no instance can take for the moment waits in the `WaitingRoom` until the fleet changes, its
time is up, or its client leaves. A change wakes all of them, in the order they came; who is still not served goes on
waiting for what is left.

**Failover** of a stream whose instance dies in the middle of its answer:

    the last event has gone out              -> the answer ends in order; nothing of it was missing
    an instance of the same version serves   -> it is sent the request and what the client has (server/resume.py), and
                                                its answer, which is only what comes next, goes into the same body
    none does                                -> one is waited for as for any request (--hold); a client that allows it
                                                (`any`) is gone on with by another version
    nobody in time, or the request has lost  -> an error event, and the connection is cut
    an instance before (LOSSES), or the
    stream cannot be continued

Continuations are not paid for out of the retry budget: there are no more of them than streams that were being served,
and each is work that was admitted. LOSSES bounds what a request can do that is itself what kills instances.
"""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass
from typing import Final, Literal, Protocol

import msgspec

from server import api
from server.errors import HttpError
from server.gateway.config import Failover
from server.gateway.fleet.instance import Instance
from server.gateway.fleet.routing import Need
from server.gateway.wire.journal import Journal
from server.resume import RESUMABLE, RESUME

Failure = Literal["not_sent", "refused", "lost", "broken"]

WINDOW_S: Final = 10.0
MIN_PER_S: Final = 3.0
LOSSES: Final = (
    1  # instances that one request may lose and still be sent to another, the middle of an answer counted too
)
LOST: Final = b"lost"  # of x-hotswap-refused: its engine died (server/instance/middleware.py)
NEVER_AGAIN: Final = frozenset(route.path for route in api.ROUTES if not route.again)
RETRY_S: Final = 0.5  # for who was turned away by an instance that looked well: the view may not change again
# Silence of an instance since it left the store, after which it counts as dead. After an outage of the store all have
# left, until they try to register again: at most 2 s (weightsync/control/agent.py, LAST_RETRY_S).
GONE_S: Final = 3.0
WANTED: Final = b"%b: 1\r\n" % RESUMABLE


class RetryBudget:
    """A bucket of retries for one gateway process. `requests` is counted up by who begins one.

    Each request puts `share` of a retry in, each second MIN_PER_S; what the last WINDOW_S would have put in is the most
    it holds. It is looked at only when something fails, so that a request costs one addition.
    """

    __slots__ = ("_at", "_rate", "_seen", "_tokens", "exhausted", "requests", "share")

    def __init__(self, share: float) -> None:
        self.share = share
        self.requests = 0
        self.exhausted = 0  # retries that were not made
        self._tokens = MIN_PER_S * WINDOW_S
        self._rate = 0.0  # requests per second, averaged over about WINDOW_S
        self._seen = 0
        self._at = 0.0

    def left(self, now: float) -> float:
        """Retries that may be made now. Monotonic seconds."""
        passed, new = now - self._at, self.requests - self._seen
        fade = math.exp(-passed / WINDOW_S)
        self._rate = self._rate * fade + new * ((1.0 - fade) / passed if passed > 0.0 else 1.0 / WINDOW_S)
        most = (self.share * self._rate + MIN_PER_S) * WINDOW_S
        self._tokens = min(most, self._tokens + self.share * new + MIN_PER_S * passed)
        self._at, self._seen = now, self.requests
        return self._tokens

    def take(self, now: float) -> bool:
        """Pays for one retry, if there is enough."""
        if self.left(now) < 1.0:
            self.exhausted += 1
            return False
        self._tokens -= 1.0
        return True


def again(failure: Failure, route: str, lost_before: int, budget: RetryBudget, now: float) -> bool:
    """Whether another instance is asked. `lost_before`: how often this request was lost already."""
    if failure in ("not_sent", "refused"):
        return True
    if failure != "lost" or route in NEVER_AGAIN or lost_before >= LOSSES:
        return False
    return budget.take(now)


# holding


class Waiter(Protocol):
    """A request that waits."""

    started: float

    def wake(self) -> None:
        """Tries again; whether it has to wait on is its own affair."""
        ...


@dataclass(frozen=True)
class Patience:
    """The time for which a request is held, counted from its beginning, and the answer after that.

    `kind`: "fleet" if there is nobody to ask, "version" if nobody runs the version asked for.
    """

    kind: Literal["fleet", "version"]
    seconds: float
    error: HttpError


class WaitingRoom:
    """At most `limit` requests of one gateway."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._timers: dict[Waiter, asyncio.TimerHandle] = {}

    def __len__(self) -> int:
        return len(self._timers)

    def enter(self, waiter: Waiter, patience: Patience, *, soon: bool) -> None:
        """Holds `waiter` for what is left of its patience, or raises the error that goes with it.

        `soon`: it is worth another try before anything changes. Raises HttpError (503) when too many wait already.
        """
        left = waiter.started + patience.seconds - time.monotonic()
        if left <= 0:
            raise patience.error
        if len(self._timers) >= self._limit:
            raise HttpError(503, f"{self._limit} requests wait for an instance already; try again.", code="overloaded")
        delay = min(left, RETRY_S) if soon else left
        self._timers[waiter] = asyncio.get_running_loop().call_later(delay, waiter.wake)

    def leave(self, waiter: Waiter) -> None:
        """It waits no longer, or is about to try again."""
        timer = self._timers.pop(waiter, None)
        if timer is not None:
            timer.cancel()

    def wake(self) -> None:
        """The fleet has changed."""
        for waiter in list(self._timers):
            if waiter in self._timers:
                waiter.wake()


# failover


@dataclass
class Continuation:
    """The rest of a broken stream. `since` in monotonic seconds; `prefix` goes before the request's body."""

    error: HttpError
    since: float
    need: Need | None  # which versions may go on
    own_need: Need | None  # which the client asked for
    prefix: bytes

    @property
    def lines(self) -> bytes:
        """Header lines that go with the prefix."""
        return b"%b%b: %d\r\n" % (WANTED, RESUME, len(self.prefix))

    def patience(self, started: float, hold_s: float) -> Patience:
        """How long somebody is waited for who can go on; counted, as for all who wait, from the request's start."""
        return Patience("fleet", self.since - started + hold_s, self.error)


def go_on(
    journal: Journal, last: Continuation | None, error: HttpError, now: float, need: Need | None, version: int | None
) -> Continuation:
    """The continuation of what `journal` holds. `need` is the request's own, or the last one's; `version` the one that
    must go on, None if it need not be the same."""
    own = need if last is None else last.own_need
    same = own if version is None else Need(version, None, 0.0)
    return Continuation(error, now, same, own, msgspec.json.encode(journal.resume(version)))


def version_for(journal: Journal, told: bytes, mode: Failover, others: list[Instance]) -> int | None:
    """The version that must go on with a stream. `told` is what its head says, for one that has no token yet."""
    version = journal.version or (int(told) if told.isdigit() else None)
    served = any(i.record.active_version == version for i in others)
    return version if served or mode != "any" else None


def silent(instance: Instance, since: float, now: float, limit_s: float) -> bool:
    """Whether a stream from `instance` has stood still for too long since `since`: over `limit_s` (0: any time), or
    over GONE_S while it is not in the store. Monotonic seconds."""
    if limit_s and now - since > limit_s:
        return True
    return instance.left_at > 0.0 and now - max(since, instance.left_at) > GONE_S
