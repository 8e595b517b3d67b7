"""The limits of keys, on the path of every request: admitted or refused here, settled when the answer has ended.

Nothing is awaited and nothing is read from the store: what a gateway may use of a limit (`Quota.allotted`) is settled
beside the requests (sharing.py), and only where several gateways run.

Tokens are charged when a request is admitted, with the most it may cost (output.py), and settled with the true count at
the end. If that is higher it counts from then on, and that of a stream as it grows; if it is lower, the rest is given
back to the minute it was taken from.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, Protocol

from server.errors import BadRequest, TooManyRequests
from server.gateway.access import output
from server.gateway.access.keys import Principal
from server.gateway.access.quota import SLOTS, Quota, Window
from server.gateway.access.records import KeyLimits
from server.gateway.wire.bodies import Usage

KINDS: Final = ("requests", "tokens", "concurrency")
_DURATIONS: Final = [b"%ds" % s if s < 60 else b"%dm%ds" % divmod(s, 60) for s in range(SLOTS + 1)]
_REQUESTS: Final = (
    b"x-ratelimit-limit-requests: %d\r\nx-ratelimit-remaining-requests: %d\r\nx-ratelimit-reset-requests: %b\r\n"
)
_TOKENS: Final = b"x-ratelimit-limit-tokens: %d\r\nx-ratelimit-remaining-tokens: %d\r\nx-ratelimit-reset-tokens: %b\r\n"
_BOTH: Final = (_REQUESTS + _TOKENS).replace(b"%b", _DURATIONS[SLOTS])
_UNBOUNDED: Final = 1 << 62


class RateLimited(TooManyRequests):
    """A key is at one of its limits; the code says at which, and Retry-After when it is worth another try."""

    type = "rate_limit_exceeded"


class Counts(Protocol):
    """Where refusals are counted."""

    def __setitem__(self, limit: str, count: int) -> None: ...
    def __getitem__(self, limit: str) -> int: ...


class Meter:
    """What one key uses of its limits in this gateway."""

    __slots__ = ("concurrency", "key", "limits", "requests", "tokens")

    def __init__(self, key: str, limits: KeyLimits, now: int) -> None:
        self.key = key
        self.limits = limits
        self.requests = Window(limits.requests_per_min, now) if limits.requests_per_min is not None else None
        self.tokens = Window(limits.tokens_per_min, now) if limits.tokens_per_min is not None else None
        self.concurrency = Quota(_UNBOUNDED if limits.concurrency is None else limits.concurrency)

    @property
    def idle(self) -> bool:
        """Nothing is in use."""
        return not self.concurrency.used and not any(quota.used for quota in self.quotas().values())

    def quotas(self) -> dict[str, Quota]:
        """What is limited, by resource: `KEY/KIND`."""
        found: dict[str, Quota | None] = {kind: getattr(self, kind) for kind in KINDS}
        return {f"{self.key}/{k}": q for k, q in found.items() if q is not None and q.limit != _UNBOUNDED}

    def replace(self, limits: KeyLimits, now: int) -> None:
        """Other limits from now on; what was used stays used."""
        fresh = Meter(self.key, limits, now)
        for kind in KINDS:
            old, new = getattr(self, kind), getattr(fresh, kind)
            if old is None or new is None:
                setattr(self, kind, new)
            else:
                old.limit = old.allotted = new.limit
        self.limits = limits

    def head(self) -> bytes:
        """The x-ratelimit-* lines as things stand."""
        lines = b""
        if (w := self.requests) is not None:
            lines = _REQUESTS % (w.limit, w.remaining(), _DURATIONS[w.seconds_until_unused()])
        if (w := self.tokens) is not None:
            lines += _TOKENS % (w.limit, w.remaining(), _DURATIONS[w.seconds_until_unused()])
        return lines

    def head_after_take(self) -> bytes:
        """The same in half the time, as what was taken now stays for the whole of a window."""
        r, t = self.requests, self.tokens
        if r is not None and t is not None:
            left, tokens_left = r.limit - r.used - r.elsewhere, t.limit - t.used - t.elsewhere
            return _BOTH % (r.limit, max(0, left), t.limit, max(0, tokens_left))
        return self.head()


class Grant:
    """Leave for one request. `head` goes into the head of its answer; `settle` is called when it has ended."""

    __slots__ = ("_cost", "_meter", "_reserved", "_taken_at", "body", "head", "unbounded")

    def __init__(self, meter: Meter, body: bytes, taken_at: int, cost: output.Cost | None) -> None:
        self._meter: Meter | None = meter
        self._taken_at = taken_at
        self._cost = cost  # None: its key's tokens are not limited
        self._reserved = cost.total if cost is not None else 0
        self.unbounded = cost is not None and not cost.bounded  # `grown` is worth its while
        self.body = body
        self.head = meter.head_after_take()

    def grown(self, completion_tokens: int) -> None:
        """Its stream has so many tokens by now: what is over the reservation counts at once."""
        meter, cost = self._meter, self._cost
        if meter is None or cost is None or meter.tokens is None:
            return
        more = cost.prompt + completion_tokens - self._reserved
        if more > 0:
            self._reserved += more
            self._correct(meter.tokens, more)

    def settle(self, usage: Usage | None, status: int) -> None:
        """The answer has ended, with `status`; `usage` is what is known of its tokens. Does nothing the second time."""
        meter, self._meter = self._meter, None
        if meter is None:
            return
        meter.concurrency.used -= 1
        if meter.tokens is not None and self._cost is not None:
            self._correct(meter.tokens, self._cost.used(usage, status) - self._reserved)

    def _correct(self, tokens: Window, more: int) -> None:
        now = int(time.monotonic())
        if now != tokens.now:
            tokens.advance(now)
        tokens.correct(self._taken_at, more)


class Limits:
    """The meters of all limited keys that were used here.

    `allot` is told of each new one, to say what it may use; `short` when one is refused that another gateway has left.
    """

    def __init__(self, hits: Counts) -> None:
        self._hits = hits
        self._meters: dict[str, Meter] = {}
        self.allot: Callable[[Meter], None] = lambda _: None
        self.short: Callable[[], None] = lambda: None

    def meters(self) -> list[Meter]:
        """Those of keys that were used here."""
        return list(self._meters.values())

    def head(self, principal: Principal) -> bytes:
        """The x-ratelimit-* lines for an answer that costs nothing."""
        if principal.limits is None:
            return b""
        meter, now = self._meter(principal, principal.limits), int(time.monotonic())
        for window in (meter.requests, meter.tokens):
            if window is not None and now != window.now:
                window.advance(now)
        return meter.head()

    def admit(self, principal: Principal, asked: output.Asked, route: str, body: bytes) -> Grant | None:
        """Takes what the request needs, or nothing. None: nothing is limited. Raises RateLimited, BadRequest."""
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
            for quota in meter.quotas().values():
                quota.advance(now)
            if meter.idle:
                del self._meters[key]

    def _take(self, meter: Meter, asked: output.Asked, route: str, body: bytes) -> Grant:
        requests, tokens, running = meter.requests, meter.tokens, meter.concurrency
        now = int(time.monotonic())
        cost: output.Cost | None = None
        if requests is not None:
            if now != requests.now:
                requests.advance(now)
            requests.asked += 1
            if requests.used >= requests.allotted:
                raise self._over(requests, 1, code="requests_limit")
        running.asked += 1
        if running.used >= running.allotted:
            raise self._over(running, 1, code="concurrency_limit")
        if tokens is not None:
            if now != tokens.now:
                tokens.advance(now)
            cost = output.reckon(asked, route, len(body), meter.limits.max_output_tokens)
            self._check_tokens(tokens, cost.total)
            tokens.take(cost.total)
        if requests is not None:
            requests.take(1)
        running.used += 1
        return Grant(meter, body, now, cost)

    def _check_tokens(self, tokens: Window, needed: int) -> None:
        if needed > tokens.limit:
            self._hits["tokens"] += 1
            raise BadRequest(
                f"This request may take {needed} tokens, and its key {tokens.limit} a minute: send a shorter prompt, "
                "fewer prompts, or a lower bound on the answers.",
                code="request_over_limit",
            )
        tokens.asked += needed
        if tokens.used + needed > tokens.allotted:
            raise self._over(tokens, needed, code="tokens_limit")

    def _over(self, quota: Quota, needed: int, *, code: str) -> RateLimited:
        kind = code.removesuffix("_limit")
        self._hits[kind] += 1
        elsewhere = quota.used + quota.elsewhere + needed <= quota.limit
        if isinstance(quota, Window) and not elsewhere:
            wait = quota.seconds_until(quota.used + needed - quota.allotted)
        else:
            if elsewhere:
                self.short()
            wait = 1  # a request ends at any moment; or other gateways are about to give what they do not use
        per = "at one time" if kind == "concurrency" else f"{kind} a minute"
        message = f"This key may use {quota.limit} {per}, and does; try again in {wait} s."
        return RateLimited(message, code=code, retry_after_s=wait)

    def _bounded(self, asked: output.Asked, route: str, bound: int, body: bytes) -> bytes:
        try:
            return output.bounded(asked, route, bound, body)
        except BadRequest:
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
        self.allot(meter)
        return meter
