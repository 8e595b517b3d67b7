"""The limits of keys, on the path of every request: admitted or refused here, settled when the answer has ended.

Nothing is awaited and nothing is read from the store: what a gateway may use of a limit (`Quota.allotted`) is settled
beside the requests (sharing.py), and only where several gateways run.

**Windows.** Per minute means in any 60 seconds, not in the minute of a clock and not as a bucket that fills: a window
that slides by the second. The units of a second leave the window when 60 whole seconds have passed after it, so no 60
seconds, wherever they begin, hold more than the limit; a token bucket of the same size lets twice as much pass in its
first minute. The price is 61 integers a limit.

**Tokens** are charged when a request is admitted, with the most it may cost (costs.py). The true count replaces that at
the end. If it is higher it counts from then on, and that of a stream as it grows; if it is lower, the rest is given
back to the minute it was taken from.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final, Protocol

from server.errors import HttpError
from server.gateway.access.costs import Asked, Cost, bounded, reckon
from server.gateway.access.keys import Principal
from server.gateway.wire.bodies import Usage
from server.key_limits import LIMITS, KeyLimits, rate_headers

SLOTS: Final = 61  # the second that runs, and 60 before it
Units = Callable[[int, int], int]


def _duration(seconds: int) -> bytes:
    """`12s`, `1m1s`, `95h4m6s`: as OpenAI's clients read it."""
    minutes, hours = seconds // 60, seconds // 3600
    before = b"%dh%dm" % (hours, minutes % 60) if hours else b"%dm" % minutes if minutes else b""
    return b"%b%ds" % (before, seconds % 60)


def _lines(name: str) -> bytes:
    """The header lines of a limit, with places for their values."""
    bound, remaining, reset = (header.encode() for header in rate_headers(name))
    return b"%b: %%d\r\n%b: %%d\r\n%b: %%b\r\n" % (bound, remaining, reset)


_DURATIONS: Final = [_duration(s) for s in range(SLOTS + 1)]


class Quota:
    """Units in use now: a request gives them back when it ends. `units`: those of a request, see `Limit`."""

    __slots__ = ("allotted", "asked", "elsewhere", "limit", "name", "units", "used")

    def __init__(self, limit: int, name: str = "", units: Units | None = None) -> None:
        self.name = name
        self.units = units
        self.limit = limit
        self.allotted = limit
        self.elsewhere = 0  # units other gateways reported to be in use
        self.asked = 0  # units asked for, granted or not, since it was last set to 0
        self.used = 0

    @property
    def busy(self) -> bool:
        """Whether something of it is in use that only this gateway knows of."""
        return self.used > 0

    def advance(self, now: int) -> None:
        """Lets time pass, to `now` (monotonic seconds)."""

    def take(self, units: int) -> None:
        """Counts `units`."""
        self.used += units

    def correct(self, taken_at: int, units: int) -> None:
        """A request that runs needs `units` more."""
        self.used += units

    def end(self, taken_at: int, taken: int, spent: int) -> None:
        """A request has ended that took `taken` at `taken_at`, and needed `spent`."""
        self.used -= taken

    def remaining(self) -> int:
        """The units left of the limit, in all gateways together."""
        return max(0, self.limit - self.used - self.elsewhere)

    def head(self) -> bytes:
        """The x-ratelimit-* lines as things stand."""
        return b""


class Window(Quota):
    """Units taken in the last minute."""

    __slots__ = ("_head", "_slots", "now")

    def __init__(self, limit: int, now: int, name: str = "", units: Units | None = None) -> None:
        super().__init__(limit, name, units)
        self._slots = [0] * SLOTS
        self._head = _lines(name)
        self.now = now

    def advance(self, now: int) -> None:
        if now == self.now:
            return
        slots = self._slots
        if now - self.now >= SLOTS:
            slots[:] = [0] * SLOTS
            self.used = 0
        else:
            for second in range(self.now + 1, now + 1):
                self.used -= slots[second % SLOTS]
                slots[second % SLOTS] = 0
        self.now = now

    def take(self, units: int) -> None:
        """Counts `units` in the second of the last `advance`."""
        self._slots[self.now % SLOTS] += units
        self.used += units

    def correct(self, taken_at: int, units: int) -> None:
        """`units` more than was taken in the second `taken_at` were used, which counts now; or, below 0, fewer."""
        if units >= 0:
            self.take(units)
        elif self.now - taken_at < SLOTS:
            self._slots[taken_at % SLOTS] += units
            self.used += units

    def end(self, taken_at: int, taken: int, spent: int) -> None:
        self.correct(taken_at, spent - taken)

    def head(self) -> bytes:
        return self._head % (self.limit, self.remaining(), _DURATIONS[self.seconds_until_unused()])

    def seconds_until(self, units: int) -> int:
        """Until `units` of those in use have left the window; the full length of it if there are not so many."""
        for second in range(self.now - SLOTS + 1, self.now + 1):
            units -= self._slots[second % SLOTS]
            if units <= 0:
                return second + SLOTS - self.now
        return SLOTS

    def seconds_until_unused(self) -> int:
        """Until all have left it; 0 if nothing is in use."""
        if not self.used:
            return 0
        for second in range(self.now, self.now - SLOTS, -1):
            if self._slots[second % SLOTS]:
                return second + SLOTS - self.now
        return 0


class Month(Quota):
    """Units of this calendar month (UTC): those in the store, of all gateways, and those that are not there yet.

    `saved` and `unsaved` are kept by budgets.py; what runs is `reserved` with the most it may cost.
    """

    __slots__ = ("_head", "month", "reserved", "saved", "unsaved", "until")

    def __init__(self, limit: int, name: str = "", units: Units | None = None) -> None:
        super().__init__(limit, name, units)
        self._head = _lines(name)
        self.month, self.until = this_month(time.time())
        self.saved = self.reserved = 0
        self.unsaved: dict[str, int] = {}  # by month: one may end before it is written

    @property
    def busy(self) -> bool:
        return self.reserved > 0 or bool(self.unsaved)

    def advance(self, now: int) -> None:
        wall = time.time()
        if wall >= self.until:
            self.month, self.until = this_month(wall)
            self.saved = 0
            self.total()

    def total(self) -> None:
        """Works out what is used."""
        self.used = self.saved + self.unsaved.get(self.month, 0) + self.reserved

    def take(self, units: int) -> None:
        self.reserved += units
        self.used += units

    def correct(self, taken_at: int, units: int) -> None:
        self.take(units)

    def end(self, taken_at: int, taken: int, spent: int) -> None:
        self.reserved -= taken
        if spent:
            self.unsaved[self.month] = self.unsaved.get(self.month, 0) + spent
        self.total()

    def head(self) -> bytes:
        if self.limit == _UNBOUNDED:
            return b""
        return self._head % (self.limit, self.remaining(), _duration(self.seconds_left()))

    def seconds_left(self) -> int:
        """Until the next month."""
        return max(1, int(self.until - time.time()) + 1)


def this_month(wall: float) -> tuple[str, float]:
    """The month of a moment (unix seconds), as YYYY-MM, and when it ends."""
    now = datetime.fromtimestamp(wall, UTC)
    following = datetime(now.year + now.month // 12, now.month % 12 + 1, 1, tzinfo=UTC)
    return f"{now.year:04d}-{now.month:02d}", following.timestamp()


_UNBOUNDED: Final = 1 << 62
# The limits that count; first those that need no look at the body.
_COUNTED: Final = sorted((one for one in LIMITS.items() if one[1].counts), key=lambda one: one[1].units is not None)


class Counts(Protocol):
    """The counters of refusals."""

    def __setitem__(self, limit: str, count: int) -> None: ...
    def __getitem__(self, limit: str) -> int: ...


class Meter:
    """The use of one key's limits in this gateway."""

    __slots__ = ("counted", "key", "limits")

    def __init__(self, key: str, limits: KeyLimits, now: int) -> None:
        self.key = key
        self.limits = limits
        self.counted: list[Quota] = []  # never changed in place: grants keep it
        for field, limit in _COUNTED:
            bound: int | None = getattr(limits, field)
            if limit.counts == "now":  # counted without a bound too: one may come while requests run
                self.counted.append(Quota(_UNBOUNDED if bound is None else bound, limit.name, limit.units))
            elif bound is not None and limit.counts == "month":
                self.counted.append(Month(bound, limit.name, limit.units))
            elif bound is not None:
                self.counted.append(Window(bound, now, limit.name, limit.units))

    @property
    def idle(self) -> bool:
        """Nothing is in use."""
        return not any(quota.busy for quota in self.counted)

    def quotas(self) -> dict[str, Quota]:
        """The quotas that are divided among gateways, by resource: `KEY/NAME`."""
        divided = [q for q in self.counted if q.limit != _UNBOUNDED and not isinstance(q, Month)]
        return {f"{self.key}/{quota.name}": quota for quota in divided}

    def months(self) -> list[Month]:
        """Those that a month is counted by."""
        return [quota for quota in self.counted if isinstance(quota, Month)]

    def replace(self, limits: KeyLimits, now: int) -> None:
        """Other limits from now on; what was used stays used."""
        before = {quota.name: quota for quota in self.counted}
        counted: list[Quota] = []
        for quota in Meter(self.key, limits, now).counted:
            kept = before.get(quota.name, quota)
            kept.limit = kept.allotted = quota.limit
            counted.append(kept)
        # A budget that was taken away stays until what runs and what was used of it is written (budgets.py).
        for quota in before.values():
            if isinstance(quota, Month) and quota.busy and quota not in counted:
                quota.limit = quota.allotted = _UNBOUNDED
                counted.append(quota)
        self.counted = counted
        self.limits = limits

    def head(self) -> bytes:
        """The x-ratelimit-* lines as things stand."""
        lines = b""
        for quota in self.counted:
            lines += quota.head()
        return lines


class Grant:
    """Leave for one request. `head` goes into the head of its answer; `settle` is called when it has ended."""

    __slots__ = ("_quotas", "_taken", "_taken_at", "body", "cost", "head", "unbounded")

    def __init__(self, meter: Meter, body: bytes, taken_at: int, cost: Cost | None, taken: list[int]) -> None:
        self._quotas = meter.counted
        self._taken_at = taken_at
        self.cost = cost  # None: its key's tokens are not limited
        self._taken = taken  # of each quota
        self.unbounded = cost is not None and not cost.bounded  # `grown` is worth its while
        self.body = body
        self.head = meter.head()

    def grown(self, completion_tokens: int) -> None:
        """Its stream has so many tokens by now: what is over the reservation counts at once."""
        cost = self.cost
        if cost is None:
            return
        for at, quota in enumerate(self._quotas):
            if quota.units is not None:
                more = quota.units(cost.prompt, completion_tokens) - self._taken[at]
                if more > 0:
                    self._taken[at] += more
                    quota.advance(int(time.monotonic()))
                    quota.correct(self._taken_at, more)

    def settle(self, usage: Usage | None, status: int) -> None:
        """The answer has ended, with `status`; `usage` is what is known of its tokens. Does nothing the second time."""
        quotas, self._quotas = self._quotas, []
        if not quotas:
            return
        prompt, answers = (0, 0) if self.cost is None else self.cost.spent(usage, status)
        now = int(time.monotonic())
        for at, quota in enumerate(quotas):
            taken = self._taken[at]
            quota.advance(now)
            quota.end(self._taken_at, taken, taken if quota.units is None else quota.units(prompt, answers))


def _period(quota: Quota) -> str:
    return "month" if isinstance(quota, Month) else "minute"


def _spent(quota: Month) -> HttpError:
    """OpenAI's answer, and when it is worth another try."""
    resets_at = datetime.fromtimestamp(quota.until, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    message = (
        f"This key may use {quota.limit} tokens a month; what is left does not cover this request. "
        f"The budget resets at {resets_at}."
    )
    details = {"resets_at": resets_at, "remaining": quota.remaining()}
    kind, wait = "insufficient_quota", quota.seconds_left()
    return HttpError(429, message, code="insufficient_quota", kind=kind, retry_after_s=wait, details=details)


class Limits:
    """The meters of all limited keys that were used here.

    `allot` is told of each new one, to say what it may use; `short` when one is refused that another gateway has left.
    """

    def __init__(self, hits: Counts) -> None:
        self._hits = hits
        self._meters: dict[str, Meter] = {}
        self.allot: Callable[[Meter], None] = lambda _: None
        self.short: Callable[[], None] = lambda: None
        self.saved: Callable[[str, Month], None] = lambda _, __: None  # tells a new one what the store has of it

    def meters(self) -> list[Meter]:
        """Those of keys that were used here."""
        return list(self._meters.values())

    def head(self, principal: Principal) -> bytes:
        """The x-ratelimit-* lines for an answer that costs nothing."""
        if principal.limits is None:
            return b""
        meter, now = self._meter(principal, principal.limits), int(time.monotonic())
        for quota in meter.counted:
            quota.advance(now)
        return meter.head()

    def admit(self, principal: Principal, asked: Asked, route: str, body: bytes) -> Grant | None:
        """Takes what the request needs, or nothing. None: nothing is limited. Raises HttpError (400, 429)."""
        limits = principal.limits
        if limits is None:
            return None
        meter = self._meters.get(principal.id)
        if meter is None or meter.limits is not limits:
            meter = self._meter(principal, limits)
        if limits.max_output_tokens is not None:
            body = self._bounded(asked, route, limits.max_output_tokens, body)
        return self._take(meter, asked, route, body)

    def forget_idle(self) -> None:
        """Drops meters of which nothing is in use: keys come and go for as long as a gateway runs."""
        now = int(time.monotonic())
        for key, meter in list(self._meters.items()):
            for quota in meter.counted:
                quota.advance(now)
            if meter.idle:
                del self._meters[key]

    def _take(self, meter: Meter, asked: Asked, route: str, body: bytes) -> Grant:
        now = int(time.monotonic())
        cost: Cost | None = None
        taken: list[int] = []
        for quota in meter.counted:
            quota.advance(now)
            needed = 1
            if quota.units is not None:
                if cost is None:
                    cost = reckon(asked, route, len(body), meter.limits.max_output_tokens)
                needed = quota.units(cost.prompt, cost.output)
                self._check_possible(quota, needed)
            quota.asked += needed
            if quota.used + needed > quota.allotted:
                raise self._over(quota, needed)
            taken.append(needed)
        for at, quota in enumerate(meter.counted):
            quota.take(taken[at])
        return Grant(meter, body, now, cost, taken)

    def _check_possible(self, quota: Quota, needed: int) -> None:
        if needed > quota.limit:
            self._hits[quota.name] += 1
            raise HttpError(
                400,
                f"This request may take {needed} {quota.name}, and its key {quota.limit} a {_period(quota)}: send "
                "a shorter prompt, fewer prompts, or a lower bound on the answers.",
                code="request_over_limit",
            )

    def _over(self, quota: Quota, needed: int) -> HttpError:
        self._hits[quota.name] += 1
        if isinstance(quota, Month):
            return _spent(quota)
        elsewhere = quota.used + quota.elsewhere + needed <= quota.limit
        if isinstance(quota, Window) and not elsewhere:
            wait = quota.seconds_until(quota.used + needed - quota.allotted)
        else:
            if elsewhere:
                self.short()
            wait = 1  # a request ends at any moment; or other gateways are about to give what they do not use
        per = f"{quota.name} a minute" if isinstance(quota, Window) else "at one time"
        message = f"This key may use {quota.limit} {per}, and does; try again in {wait} s."
        return HttpError(429, message, code=f"{quota.name}_limit", kind="rate_limit_exceeded", retry_after_s=wait)

    def _bounded(self, asked: Asked, route: str, bound: int, body: bytes) -> bytes:
        try:
            return bounded(asked, route, bound, body)
        except HttpError:
            self._hits["max_output"] += 1
            raise

    def _meter(self, principal: Principal, limits: KeyLimits) -> Meter:
        meter, now = self._meters.get(principal.id), int(time.monotonic())
        if meter is None:
            meter = self._meters[principal.id] = Meter(principal.id, limits, now)
        elif meter.limits is not limits:
            meter.replace(limits, now)
        else:
            return meter
        for month in meter.months():
            self.saved(meter.key, month)
        self.allot(meter)
        return meter
