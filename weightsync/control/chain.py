"""The ledger: the changes of weights, and of rights over them, in a chain of entries that only grows.

    ledger/head           HeadRecord: number and digest of the last entry
    ledger/entries/{n}    LedgerEntry
    ledger/archived       ArchiveRecord: how far older entries have left the store, and where to

An entry holds the digest of the one before it, and its own: an entry that is changed, taken out or put elsewhere no
longer fits. There is one chain for all models of a store, since keys and policies are for all of them.

`append` writes entries in the very transaction that does what they record, and compares the head: there is no commit
without its entry, whichever process dies, and writers that meet come one after the other. The head is compared last, so
that a conflict over anything else is told to the caller as before. The server verifies, exports and archives the chain.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from weightsync.control.strict_json import Record
from weightsync.errors import Conflict
from weightsync.store.protocol import MISSING, KeyValue, Store

PREFIX = "ledger/"
HEAD = f"{PREFIX}head"
ENTRIES = f"{PREFIX}entries/"
ARCHIVED = f"{PREFIX}archived"
Action = Literal[
    "publish", "withdraw", "activate", "rollback", "split", "commit", "revert", "done", "abort",
    "release", "release_end", "release_policy",
    "key_create", "key_change", "key_rotate", "key_revoke", "key_forget", "inference_open",
    "policy", "approval_wait", "approve", "refuse", "lapse",
]  # fmt: skip
ACTIONS: tuple[Action, ...] = get_args(Action)


@dataclass(frozen=True)
class LedgerEntry(Record):
    """One deed. `at` is unix seconds; `who` an admin identity, LINEAGE@HOST:PID or "coordinator".

    `reason` is why, in the words of `who`; `outcome` is the result, where that is known with the deed itself.
    `swap` is the id that a request for a version shares with the commit, the end and the history of its swap.
    """

    action: Action
    who: str
    at: float = field(default_factory=time.time)
    model: str = ""
    version: int | None = None
    swap: str = ""
    subject: str = ""
    reason: str = ""
    outcome: str = ""
    number: int = 0
    previous: str = ""
    digest: str = ""

    def after(self, head: HeadRecord) -> LedgerEntry:
        """The same, as the entry that follows `head`."""
        linked = replace(self, number=head.number + 1, previous=head.digest, digest="")
        return replace(linked, digest=linked.expected)

    @property
    def expected(self) -> str:
        """The digest it must have: SHA-256 in hexadecimal of its JSON without one."""
        return hashlib.sha256(replace(self, digest="").to_json()).hexdigest()


@dataclass(frozen=True)
class HeadRecord(Record):
    """The end of the chain; number 0 before the first entry."""

    number: int = 0
    digest: str = ""


@dataclass(frozen=True)
class ArchiveRecord(Record):
    """Entries up to `number`, whose digest is `digest`, have left the store: for files at `where`, those up to
    `dropped`, whose digest is `dropped_digest`, for nowhere."""

    number: int = 0
    digest: str = ""
    where: str = ""
    dropped: int = 0
    dropped_digest: str = ""


def entry_key(number: int) -> str:
    return f"{ENTRIES}{number:012d}"


async def append(
    store: Store,
    compares: Mapping[str, int],
    puts: Mapping[str, bytes | None],
    *entries: LedgerEntry,
) -> int:
    """`store.txn`, with `entries` in the same transaction. Raises as it does."""
    if not entries:
        return await store.txn(compares, puts)
    while True:
        found = await store.get(HEAD)
        head = HeadRecord.from_json(found.value) if found is not None else HeadRecord()
        written: dict[str, bytes | None] = {}
        for entry in entries:
            linked = entry.after(head)
            written[entry_key(linked.number)] = linked.to_json()
            head = HeadRecord(linked.number, linked.digest)
        written[HEAD] = head.to_json()
        expected = {**compares, HEAD: found.mod_revision if found is not None else MISSING}
        try:
            return await store.txn(expected, {**puts, **written})
        except Conflict as conflict:
            if conflict.key != HEAD:
                raise


async def recent(store: Store, most: int, before: int | None = None) -> list[LedgerEntry]:
    """The newest entries in the store, or those before a number, newest first. Raises StoreUnavailable."""
    found = await store.get(HEAD)
    last = HeadRecord.from_json(found.value).number if found is not None else 0
    last = last if before is None else min(last, before - 1)
    entries: list[LedgerEntry] = []
    for hundred in range(last // 100, -1, -1):  # as their keys have it: entry_key
        items, _ = await store.list(f"{ENTRIES}{hundred:010d}")
        there = sorted(((n, line) for n, line in numbered(items) if n <= last), reverse=True)
        entries += [LedgerEntry.from_json(line) for _, line in there]
        if len(entries) >= most or (not there and hundred < last // 100):
            break
    return entries[:most]


def numbered(items: list[KeyValue]) -> Iterator[tuple[int, bytes]]:
    """The entries among `items`, by number."""
    for kv in items:
        tail = kv.key.removeprefix(ENTRIES)
        if tail.isascii() and tail.isdigit():
            yield int(tail), kv.value
