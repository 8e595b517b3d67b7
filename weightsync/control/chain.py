"""The ledger: what was done to the weights and to who may do it, in a chain of entries that only grows.

    ledger/head           HeadRecord: number and digest of the last entry
    ledger/entries/{n}    LedgerEntry
    ledger/archived       ArchiveRecord: how far older entries have left the store, and where to

An entry holds the digest of the one before it, and its own: an entry that is changed, taken out or put elsewhere no
longer fits, and `verify` names the first that does not. There is one chain for all models of a store, since keys and
policies are for all of them.

`append` writes entries in the very transaction that does what they record, and compares the head: there is no commit
without its entry, whoever dies when, and writers that meet come one after the other. The head is compared last, so that
a conflict over anything else is told to the caller as before.

Entries beyond the newest `KEPT` leave the store by `FILE` at a time: for JSONL files in a directory or at a URL of
fsspec's, or, if no place is named, for nowhere; then the record keeps the digest with which the rest begins. A file is
whole before its record is written, and its entries go after that. A crash in between leaves entries in both places.

A chain proves order and wholeness to a reader who has noted an earlier head. A writer of the whole store can write
another chain: `verify` with an `anchor` notices.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from weightsync.control.strict_json import Record
from weightsync.errors import Conflict, LedgerUnavailable, RecordError, RecordRefused
from weightsync.store.protocol import MISSING, KeyValue, Store

log = logging.getLogger(__name__)

PREFIX = "ledger/"
HEAD = f"{PREFIX}head"
ENTRIES = f"{PREFIX}entries/"
ARCHIVED = f"{PREFIX}archived"
KEPT = 2000  # newest entries that stay in the store
FILE = 1000  # entries of one file
BATCH = 100  # keys that one transaction deletes: etcd takes 128
Action = Literal[
    "publish", "activate", "rollback", "split", "commit", "revert", "done", "abort",
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


@dataclass(frozen=True)
class Held:
    """The part of the chain that the store has. `entries` are bytes by number."""

    head: HeadRecord
    archived: ArchiveRecord
    entries: Mapping[int, bytes]

    @classmethod
    async def read(cls, store: Store) -> Held:
        """All at one revision. Raises StoreUnavailable, RecordError."""
        items, _ = await store.list(PREFIX)
        found = {kv.key: kv for kv in items}
        head, archived = found.get(HEAD), found.get(ARCHIVED)
        return cls(
            HeadRecord.from_json(head.value) if head is not None else HeadRecord(),
            ArchiveRecord.from_json(archived.value) if archived is not None else ArchiveRecord(),
            dict(_numbered(items)),
        )

    @property
    def before(self) -> HeadRecord:
        """The entry before the first one that is still somewhere."""
        return HeadRecord(self.archived.dropped, self.archived.dropped_digest)

    def blocks(self, place: str = "") -> Iterator[tuple[range, Mapping[int, list[bytes]]]]:
        """All entries, a file at a time, then those of the store alone; an entry in both is there twice. `place`: where
        the files are, if not where they were written. Raises LedgerUnavailable."""
        moved = self.archived
        for start in range(moved.dropped + 1, moved.number + 1, FILE):
            numbers = range(start, start + FILE)
            found = {number: [self.entries[number]] for number in numbers if number in self.entries}
            lines = (_read_file(place or moved.where, numbers) or b"").splitlines()
            for number, line in zip(range(start, start + FILE + 1), lines, strict=False):  # one too many is seen
                found.setdefault(min(number, numbers[-1]), []).append(line)
            yield numbers, found
        rest = {number: [line] for number, line in self.entries.items() if number > moved.number}
        yield range(moved.number + 1, max(self.head.number, moved.number, *rest) + 1), rest


def _numbered(items: list[KeyValue]) -> Iterator[tuple[int, bytes]]:
    for kv in items:
        tail = kv.key.removeprefix(ENTRIES)
        if tail.isascii() and tail.isdigit():
            yield int(tail), kv.value


@dataclass(frozen=True)
class Verdict:
    """The finding of `verify`: the entries from `first` on fit up to `head` (NUMBER:DIGEST), or `number` does not."""

    entries: int
    first: int
    head: str
    number: int | None = None
    problem: str = ""

    @property
    def ok(self) -> bool:
        return self.number is None


async def verify(store: Store, place: str = "", anchor: str | None = None) -> Verdict:
    """Read the whole chain. `anchor`: a NUMBER:DIGEST noted before, which it must still have.

    Raises StoreUnavailable, LedgerUnavailable (files cannot be read), RecordError (the head cannot).
    """
    held = await Held.read(store)
    noted = _parsed(anchor) if anchor is not None else None
    first, last = held.before.number + 1, held.before
    for numbers, found in held.blocks(place):
        for number in numbers:
            after, wrong = _next(last, number, found.get(number, []), held)
            if not wrong and noted is not None and noted.number == number and noted.digest != after.digest:
                wrong = "another one was noted: this is another chain from here or from before"
            if wrong:
                return _verdict(first, last, number, wrong)
            last = after
    if last != held.head:
        return _verdict(first, last, held.head.number, "the head does not name it by its digest")
    if noted is not None and noted.number > last.number:
        return _verdict(first, last, noted.number, f"it was noted before, and the chain ends at entry {last.number}")
    return _verdict(first, last)


def _verdict(first: int, last: HeadRecord, number: int | None = None, problem: str = "") -> Verdict:
    return Verdict(last.number - first + 1, first, f"{last.number}:{last.digest}", number, problem)


def _next(last: HeadRecord, number: int, lines: list[bytes], held: Held) -> tuple[HeadRecord, str]:
    """The end of the chain with entry `number`, and what is wrong with it ("": nothing)."""
    if not lines:
        return last, "it is missing"
    if any(line != lines[0] for line in lines):
        return last, "the store and the files hold it in different forms"
    if number > held.head.number:
        return last, f"it comes after the head, which is entry {held.head.number}"
    try:
        entry = LedgerEntry.from_json(lines[0])
    except RecordError as error:
        return last, f"it cannot be read ({error})"
    if entry.number != number:
        return last, f"in its place is entry {entry.number}"
    if entry.digest != entry.expected:
        return last, "it was changed: its digest is not that of its content"
    if entry.previous != last.digest:
        return last, f"it does not follow entry {last.number}"
    if held.archived.number == number and held.archived.digest != entry.digest:
        return last, "it is not the one that was archived"
    return HeadRecord(number, entry.digest), ""


def _parsed(anchor: str) -> HeadRecord:
    number, _, digest = anchor.partition(":")
    if not number.isdecimal() or len(digest) != 64:
        raise RecordRefused("anchor", f"{anchor!r} is not NUMBER:DIGEST, as `hotswap ledger verify` prints it")
    return HeadRecord(int(number), digest)


async def export(store: Store, place: str = "", since: int = 1) -> AsyncIterator[bytes]:
    """The entries as they were written, JSON each, oldest first. Raises LedgerUnavailable, StoreUnavailable."""
    for numbers, found in (await Held.read(store)).blocks(place):
        for number in numbers:
            if number >= since and number in found:
                yield found[number][0]


async def recent(store: Store, most: int, before: int | None = None) -> list[LedgerEntry]:
    """The newest entries in the store, or those before a number, newest first. Raises StoreUnavailable."""
    found = await store.get(HEAD)
    last = HeadRecord.from_json(found.value).number if found is not None else 0
    last = last if before is None else min(last, before - 1)
    entries: list[LedgerEntry] = []
    for hundred in range(last // 100, -1, -1):  # as their keys have it: entry_key
        items, _ = await store.list(f"{ENTRIES}{hundred:010d}")
        there = sorted(((n, line) for n, line in _numbered(items) if n <= last), reverse=True)
        entries += [LedgerEntry.from_json(line) for _, line in there]
        if len(entries) >= most or (not there and hundred < last // 100):
            break
    return entries[:most]


async def archive(store: Store, where: str = "", *, kept: int | None = None) -> int:
    """Move all but the newest `kept` (default: KEPT) out of the store, a file of FILE entries at a time; returns how
    many left. With no place they are dropped. A chain that does not fit is left as it is.

    Raises LedgerUnavailable, StoreUnavailable.
    """
    found = await store.get(ARCHIVED)
    held = await Held.read(store)
    done, moved = held.archived, 0
    where = where or done.where
    last_file = range(done.number - FILE + 1, done.number + 1)
    if done.number > done.dropped and where != done.where and _read_file(where, last_file) is None:
        raise LedgerUnavailable(where, f"older entries are in {done.where}: move those files there first")
    while held.head.number - done.number >= (KEPT if kept is None else kept) + FILE:
        numbers = range(done.number + 1, done.number + FILE + 1)
        last = HeadRecord(done.number, done.digest)
        for number in numbers:
            last, wrong = _next(last, number, [held.entries[number]] if number in held.entries else [], held)
            if wrong:
                raise LedgerUnavailable(f"entry {number} of the ledger", f"{wrong}; run `hotswap ledger verify`")
        if where:
            _write(where, numbers, b"".join(held.entries[number] + b"\n" for number in numbers))
            done = replace(done, number=last.number, digest=last.digest, where=where)
        else:
            done = ArchiveRecord(last.number, last.digest, "", last.number, last.digest)
        try:
            revision = await store.compare_and_swap(ARCHIVED, found.mod_revision if found else MISSING, done.to_json())
        except Conflict:
            return moved  # another gateway is at it
        found = KeyValue(ARCHIVED, b"", revision, revision)
        moved += FILE
    left = sorted(number for number in held.entries if number <= done.number)
    for start in range(0, len(left), BATCH):
        await store.txn({}, {entry_key(number): None for number in left[start : start + BATCH]})
    return moved


def _name(numbers: range) -> str:
    return f"ledger-{numbers[0]:012d}-{numbers[-1]:012d}.jsonl"


def _write(where: str, numbers: range, data: bytes) -> None:
    """The whole file or none; a file of before with other entries is not overwritten. Raises LedgerUnavailable."""
    name = _name(numbers)
    try:
        if (there := _read(where, name)) is not None and there != data:
            raise LedgerUnavailable(f"{where}/{name}", "it holds other entries: archive this ledger elsewhere")
        if "://" not in where:
            directory = Path(where)
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            new = directory / f".{name}.{os.getpid()}"
            with new.open("wb") as file:
                os.fchmod(file.fileno(), 0o600)
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            new.rename(directory / name)
            return
        files, path = _remote(where)
        files.makedirs(path, exist_ok=True)
        files.pipe_file(f"{path}/{name}", data)
    except OSError as error:
        raise LedgerUnavailable(f"{where}/{name}", f"it cannot be written ({error})") from error


def _read(where: str, name: str) -> bytes | None:
    """None when there is no such file. Raises OSError."""
    try:
        if "://" not in where:
            return (Path(where) / name).read_bytes()
        files, path = _remote(where)
        data: bytes = files.cat_file(f"{path}/{name}")
        return data
    except FileNotFoundError:
        return None


def _remote(where: str) -> tuple[Any, str]:
    try:
        from fsspec.core import url_to_fs

        return url_to_fs(where)  # type: ignore[no-any-return]
    except (ImportError, ValueError) as error:
        raise LedgerUnavailable(
            where, f"it cannot be opened ({error}): name a directory, or a URL of fsspec's"
        ) from error


def _read_file(where: str, numbers: range) -> bytes | None:
    """None when it is not there. Raises LedgerUnavailable."""
    try:
        return _read(where, _name(numbers))
    except OSError as error:
        raise LedgerUnavailable(f"{where}/{_name(numbers)}", f"it cannot be read ({error})") from error
