"""Errors of the store and its records."""

from __future__ import annotations

from weightsync.errors.base import WeightSyncError

RELEASES = "Was it written by another release? Run the same one everywhere"


class StoreError(WeightSyncError):
    """The store refused or could not answer."""


class StoreUnavailable(StoreError):
    """The store cannot be used now; reading or writing again later may work.

    Not so with the code `store_lost`: there is another store than the one this process was using, or an older copy of
    it. It is never taken for that one: its version numbers would begin again under engines that run some, and its keys
    would be none.
    """

    def __init__(self, path: str, reason: str, advice: str, *, code: str | None = None) -> None:
        self.path, self.reason, self.advice = path, reason, advice
        super().__init__(f"store {path}: {reason}. {advice}", code=code)


class StoreRefused(StoreUnavailable):
    """The store answers and refuses this client or what it asks; trying again helps after somebody has changed it."""


def store_closed(owner: str) -> StoreError:
    """This program has closed its connection to the store, or the publisher that had it."""
    return StoreError(f"this {owner} was closed: make another", code="store_closed")


class Conflict(StoreError):
    """A key was not at the revision the caller expected; nothing was written."""

    def __init__(self, key: str, expected: int, found: int) -> None:
        self.key, self.expected, self.found = key, expected, found
        super().__init__(f"{key} is at revision {found}, not {expected}: read it again and retry")


class LeaseLost(StoreError):
    """The lease expired or was revoked; grant a new one and write the leased keys again."""

    def __init__(self, lease: int) -> None:
        self.lease = lease
        super().__init__(f"lease {lease} has ended; grant a new one and write its keys again")


class WatchCompacted(StoreError):
    """Events before `oldest` are no longer kept; list the prefix and watch from the revision that list returned."""

    def __init__(self, start_revision: int, oldest: int) -> None:
        self.start_revision, self.oldest = start_revision, oldest
        super().__init__(
            f"events from revision {start_revision} are gone (oldest kept: {oldest}); list the prefix again"
        )


class RecordError(StoreError):
    """A record is not what its key says it is."""

    def __init__(self, record: str, problem: str, advice: str = RELEASES, *, code: str | None = None) -> None:
        self.record, self.problem = record, problem
        super().__init__(f"{record}: {problem}. {advice}", code=code)


def record_refused(record: str, problem: str, advice: str = RELEASES) -> RecordError:
    """A name or a value that no record can have. Nothing was written."""
    return RecordError(record, problem, advice, code="record_refused")


def ledger_unavailable(what: str, problem: str) -> WeightSyncError:
    """A file of the ledger cannot be read or written, or the chain may not be moved as it is."""
    return WeightSyncError(f"{what}: {problem}", code="ledger_unavailable")
