"""Errors of the store and its records."""

from __future__ import annotations

from weightsync.errors.base import WeightSyncError


class StoreError(WeightSyncError):
    """The store refused or could not answer."""


class StoreUnavailable(StoreError):
    """The store cannot be used now; reading or writing again later may work."""

    def __init__(self, path: str, reason: str, advice: str) -> None:
        self.path, self.reason, self.advice = path, reason, advice
        super().__init__(f"store {path}: {reason}. {advice}")


class StoreRefused(StoreUnavailable):
    """The store answers and refuses this client or what it asks; trying again helps after somebody has changed it."""


class StoreLost(StoreUnavailable):
    """There is another store than the one this process was using, or an older copy of it.

    It is never taken for that one: its version numbers would begin again under engines that run some, and its keys
    would be none.
    """


class StoreClosed(StoreError):
    """This program has closed its connection to the store, or the publisher that had it."""

    def __init__(self, owner: str) -> None:
        super().__init__(f"this {owner} was closed: make another")


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

    def __init__(
        self, record: str, problem: str, advice: str = "Was it written by another release? Run the same one everywhere"
    ) -> None:
        self.record, self.problem = record, problem
        super().__init__(f"{record}: {problem}. {advice}")


class RecordRefused(RecordError):
    """A name or a value that no record can have. Nothing was written."""


class LedgerUnavailable(WeightSyncError):
    """A file of the ledger cannot be read or written, or the chain may not be moved as it is."""

    def __init__(self, what: str, problem: str) -> None:
        super().__init__(f"{what}: {problem}")
