"""The ledger of a store, read as a whole: verified, exported, and its older entries moved to files.

`verify` names the first entry that does not fit. A chain proves order and wholeness to a reader with a note of an
earlier head: a writer of the whole store can write another chain, which `verify` with an `anchor` notices.

Entries beyond the newest `KEPT` leave the store by `FILE` at a time: for JSONL files in a directory or at a URL of
fsspec's, or, if no place is named, for nowhere; then the record keeps the digest with which the rest begins. A file is
whole before its record is written, and its entries go after that. A crash in between leaves entries in both places.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from weightsync.control.chain import ARCHIVED, HEAD, PREFIX, ArchiveRecord, HeadRecord, LedgerEntry, entry_key, numbered
from weightsync.errors import Conflict, RecordError, ledger_unavailable, record_refused
from weightsync.store import MISSING, KeyValue, Store

KEPT = 2000  # newest entries that stay in the store
FILE = 1000  # entries of one file
BATCH = 100  # keys that one transaction deletes: etcd takes 128


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
            dict(numbered(items)),
        )

    @property
    def before(self) -> HeadRecord:
        """The entry before the first one that is still somewhere."""
        return HeadRecord(self.archived.dropped, self.archived.dropped_digest)

    def blocks(self, place: str = "") -> Iterator[tuple[range, Mapping[int, list[bytes]]]]:
        """All entries, a file at a time, then those of the store alone; an entry in both is there twice. `place`: where
        the files are, if not where they were written. Raises WeightSyncError."""
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

    Raises StoreUnavailable, WeightSyncError (files cannot be read), RecordError (the head cannot).
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
        raise record_refused("anchor", f"{anchor!r} is not NUMBER:DIGEST, as `hotswap ledger verify` prints it")
    return HeadRecord(int(number), digest)


async def export(store: Store, place: str = "", since: int = 1) -> AsyncIterator[bytes]:
    """The entries as they were written, JSON each, oldest first. Raises WeightSyncError, StoreUnavailable."""
    for numbers, found in (await Held.read(store)).blocks(place):
        for number in numbers:
            if number >= since and number in found:
                yield found[number][0]


async def archive(store: Store, where: str = "", *, kept: int | None = None) -> int:
    """Move all but the newest `kept` (default: KEPT) out of the store, a file of FILE entries at a time; returns how
    many left. With no place they are dropped. A chain that does not fit is left as it is.

    Raises WeightSyncError, StoreUnavailable.
    """
    found = await store.get(ARCHIVED)
    held = await Held.read(store)
    done, moved = held.archived, 0
    where = where or done.where
    last_file = range(done.number - FILE + 1, done.number + 1)
    if done.number > done.dropped and where != done.where and _read_file(where, last_file) is None:
        raise ledger_unavailable(where, f"older entries are in {done.where}: move those files there first")
    while held.head.number - done.number >= (KEPT if kept is None else kept) + FILE:
        numbers = range(done.number + 1, done.number + FILE + 1)
        last = HeadRecord(done.number, done.digest)
        for number in numbers:
            last, wrong = _next(last, number, [held.entries[number]] if number in held.entries else [], held)
            if wrong:
                raise ledger_unavailable(f"entry {number} of the ledger", f"{wrong}; run `hotswap ledger verify`")
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
    """The whole file or none; a file of before with other entries is not overwritten. Raises WeightSyncError."""
    name = _name(numbers)
    try:
        if (there := _read(where, name)) is not None and there != data:
            raise ledger_unavailable(f"{where}/{name}", "it holds other entries: archive this ledger elsewhere")
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
        raise ledger_unavailable(f"{where}/{name}", f"it cannot be written ({error})") from error


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
        raise ledger_unavailable(
            where, f"it cannot be opened ({error}): name a directory, or a URL of fsspec's"
        ) from error


def _read_file(where: str, numbers: range) -> bytes | None:
    """None when it is not there. Raises WeightSyncError."""
    try:
        return _read(where, _name(numbers))
    except OSError as error:
        raise ledger_unavailable(f"{where}/{_name(numbers)}", f"it cannot be read ({error})") from error
