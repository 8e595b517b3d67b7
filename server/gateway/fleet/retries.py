"""Is a failed request sent on to another instance? The rules, and the budget that keeps retries from piling up.

Only while nothing of an answer has come: a client must never get the beginning of one answer and the end of another.

* not sent (the connection was refused, or not accepted in time): always, each instance once. It has cost nobody work.
* refused (`x-hotswap-refused`: another version runs there now, or its engine had died before): always; nothing was
  begun.
* lost (sent, then the connection broke without a byte, or the engine died): once, and within the budget. No work is
  done twice: an
  instance that dies takes it along, one that only lost the connection aborts it, as vLLM does when a client leaves.
  Once, because a request may be what killed the instance. Not on NEVER_AGAIN, where work outlives its connection.
* anything else (silence until the timeout, an answer that is no HTTP, a 5xx of the instance): never. It may have taken
  long already, and the next instance would be asked for the same.

The budget (as Finagle has it): a share of the requests, and MIN_PER_S more; savings last for WINDOW_S.
"""

from __future__ import annotations

import math
from typing import Final, Literal

Failure = Literal["not_sent", "refused", "lost", "broken"]

WINDOW_S: Final = 10.0
MIN_PER_S: Final = 3.0
LOSSES: Final = (
    1  # instances that one request may lose and still be sent to another, the middle of an answer counted too
)
NEVER_AGAIN: Final = frozenset({"/v1/responses"})  # a background response goes on after its connection has ended


class RetryBudget:
    """Of one gateway process: a bucket of retries. `requests` is counted up by who begins one.

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
