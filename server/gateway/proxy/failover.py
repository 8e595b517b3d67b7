"""Streams whose instance dies in the middle of an answer: another one goes on with them.

    the last event has gone out              -> the answer ends in order; nothing of it was missing
    an instance of the same version serves   -> it is sent the request and what the client has (server/resume.py), and
                                                its answer, which is only what comes next, goes into the same body
    none does                                -> one is waited for as for any request (--hold); a client that allows it
                                                (`any`) is gone on with by another version
    nobody in time, or the request has lost  -> an error event, and the connection is cut
    an instance before (retries.LOSSES), or
    the stream cannot be continued

Continuations are not paid for out of the retry budget: there are no more of them than streams that were being served,
and each is work that was admitted. LOSSES bounds what a request can do that is itself what kills instances.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import msgspec

from server.errors import HttpError
from server.gateway.config import Failover
from server.gateway.fleet.instance import Instance
from server.gateway.proxy.terms import Need
from server.gateway.proxy.waiting import Patience
from server.gateway.wire.journal import Journal
from server.resume import RESUMABLE, RESUME

# Silence of an instance since it left the store, after which it counts as dead. After an outage of the store all have
# left, until they try to register again: at most 2 s (weightsync/swap/agent.py, LAST_RETRY_S).
GONE_S: Final = 3.0
WANTED: Final = b"%b: 1\r\n" % RESUMABLE


@dataclass
class Continuation:
    """What is left to do of a broken stream. `since` in monotonic seconds; `prefix` goes before the request's body."""

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
