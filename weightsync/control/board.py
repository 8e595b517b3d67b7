"""A local copy of one model's records, kept by a watch."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterable, Mapping
from functools import lru_cache
from typing import Any, TypeVar

from weightsync.control.editions import EditionRecord, prefix_of, readable
from weightsync.control.records import (
    ActiveRecord,
    FormRecord,
    InstanceRecord,
    Keys,
    StartRecord,
    SwapRecord,
    TargetRecord,
    VersionRecord,
)
from weightsync.control.strict_json import Record
from weightsync.errors import RecordError
from weightsync.store.protocol import MISSING, Event, KeyValue, Store

R = TypeVar("R", bound=Record)
MANY = 1000  # events after which somebody should look at what they say


class Board:
    """The records as of the last event; `changed(timeout)` waits for the next ones.

    Each prefix is followed by a watch of its own, from a first key on. Events of one watch come in order; of two, the
    later event may come first.
    """

    def __init__(self, keys: Keys, found: Iterable[KeyValue] = (), revision: int = 0) -> None:
        """`found` is all there was at `revision`. A caller that does not `follow` a store calls `apply`."""
        self.keys = keys
        self.seen = revision  # of the last event; one transaction may be several events of one revision
        self._found: dict[str, KeyValue] = {}
        self._instances: dict[str, InstanceRecord] = {}
        self._watches: dict[str, _Watch] = {}
        for kv in found:
            self._put(kv)

    @classmethod
    @contextlib.asynccontextmanager
    async def follow(cls, store: Store, keys: Keys, *prefixes: tuple[str, str]) -> AsyncGenerator[Board, None]:
        """Read what is under `prefixes`, from the first key of each on (none: everything), then watch from there.
        Raises StoreUnavailable, here and in `changed`."""
        board = cls(keys)
        try:
            for prefix, first in prefixes or ((keys.root, ""),):
                await board.also(store, prefix, first)
            yield board
        finally:
            for prefix in list(board._watches):
                await board.leave(prefix)

    async def also(self, store: Store, prefix: str, first: str = "") -> None:
        """Follow this prefix from now on, too. Raises StoreUnavailable."""
        revision = await self.look(store, prefix, first)
        self._watches[prefix] = _Watch(store.watch(prefix, revision + 1, first=first))

    async def leave(self, prefix: str) -> None:
        """Follow it no longer; what is known of it stays."""
        watch = self._watches.pop(prefix, None)
        if watch is not None:
            await watch.close()

    async def look(self, store: Store, prefix: str, first: str = "") -> int:
        """Read what is under `prefix` now; returns the revision. Raises StoreUnavailable."""
        found, revision = await store.list(prefix, first=first)
        for key in [key for key in self._found if key.startswith(prefix) and key >= first]:
            self._drop(key)
        for kv in found:
            self._put(kv)
        self.seen = max(self.seen, revision)
        return revision

    async def changed(self, timeout_s: float | None = None, *others: asyncio.Task[Any]) -> list[Event]:
        """Take in the next event, and those that have come with it; none when the time is up or one of `others` is
        done.

        Raises StoreUnavailable, WatchCompacted.
        """
        waiting = {watch.next() for watch in self._watches.values()}
        await asyncio.wait({*waiting, *others}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        found = [event for watch in self._watches.values() for event in await watch.taken()]
        for event in found:
            self.apply(event)
        return found

    def apply(self, event: Event) -> None:
        """Take in one event, unless something newer was read already."""
        self.seen = max(self.seen, event.kv.mod_revision)
        if event.kv.mod_revision < self.revision(event.kv.key):
            return
        if event.kind == "put":
            self._put(event.kv)
        else:
            self._drop(event.kv.key)

    def _put(self, kv: KeyValue) -> None:
        self._found[kv.key] = kv
        if kv.key.startswith(self.keys.instances):
            self._instances.pop(kv.key.removeprefix(self.keys.instances), None)
            with contextlib.suppress(RecordError):
                record = _parsed(InstanceRecord, kv.value)
                self._instances[record.id] = record

    def _drop(self, key: str) -> None:
        self._found.pop(key, None)
        self._instances.pop(key.removeprefix(self.keys.instances), None)

    @property
    def active(self) -> ActiveRecord | None:
        return self._record(ActiveRecord, self.keys.active)

    @property
    def swap(self) -> SwapRecord | None:
        return self._record(SwapRecord, self.keys.swap)

    @property
    def target(self) -> TargetRecord | None:
        found = self._found.get(self.keys.target)
        return TargetRecord.readable(found.key, found.value) if found is not None else None

    @property
    def versions(self) -> list[VersionRecord]:
        """Those that can be read, oldest first."""
        return readable_versions(kv for key, kv in self._found.items() if key.startswith(self.keys.versions))

    @property
    def editions(self) -> list[EditionRecord]:
        """Of adapters: those that can be read, oldest first, where their prefix is followed."""
        prefix = prefix_of(self.keys)
        return readable({key: kv.value for key, kv in self._found.items() if key.startswith(prefix)})

    def version(self, version: int) -> VersionRecord | None:
        found = self._found.get(self.keys.version(version))
        return VersionRecord.readable(found.key, found.value) if found is not None else None

    @property
    def instances(self) -> Mapping[str, InstanceRecord]:
        """By id. A record that cannot be read is as good as none: its instance does not take part."""
        return self._instances

    @property
    def starts(self) -> dict[str, StartRecord]:
        """The outcomes of starts that swaps asked for, by instance."""
        prefix = self.keys.starts
        found = {k.removeprefix(prefix): kv for k, kv in self._found.items() if k.startswith(prefix)}
        return {name: _parsed(StartRecord, kv.value) for name, kv in found.items()}

    def form(self, digest: str) -> FormRecord | None:
        """The form of that name; "" is that of the keys `schema` and `config`."""
        if digest:
            return self._record(FormRecord, self.keys.form(digest))
        tensors, config = self._found.get(self.keys.schema), self._found.get(self.keys.config)
        own = config.value.decode() if config is not None else ""
        return FormRecord(tensors.value.decode(), own) if tensors is not None else None

    def revision(self, key: str) -> int:
        """The revision to compare with before a write of `key` (0: there is no such key). If `key` ends with "/": the
        newest revision under it, for a write that depends on all keys there."""
        if key.endswith("/"):
            return max((kv.mod_revision for k, kv in self._found.items() if k.startswith(key)), default=MISSING)
        return self._found[key].mod_revision if key in self._found else MISSING

    def _record(self, kind: type[R], key: str) -> R | None:
        found = self._found.get(key)
        return _parsed(kind, found.value) if found is not None else None


def readable_versions(found: Iterable[KeyValue]) -> list[VersionRecord]:
    """The records of versions among `found` that can be read, oldest first."""
    records = (VersionRecord.readable(kv.key, kv.value) for kv in found)
    return sorted((record for record in records if record is not None), key=lambda record: record.version)


class _Watch:
    """The events of one prefix."""

    def __init__(self, events: AsyncGenerator[Event, None]) -> None:
        self._events = events
        self._task: asyncio.Task[Event] | None = None

    def next(self) -> asyncio.Task[Event]:
        """Done when there is an event."""
        if self._task is None:
            self._task = asyncio.ensure_future(anext(self._events))  # type: ignore[arg-type]
        return self._task

    async def taken(self) -> list[Event]:
        """All that have come, up to `MANY`."""
        found: list[Event] = []
        while len(found) < MANY and self.next().done():
            event = await self.next()
            self._task = None
            found.append(event)
            self.next()
            await asyncio.sleep(0)  # what the store sent with it is there after one turn of the loop
        return found

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await self._task
        await self._events.aclose()


@lru_cache(maxsize=4096)
def _read(kind: type[Record], raw: bytes) -> Record:
    return kind.from_json(raw)


def _parsed(kind: type[R], raw: bytes) -> R:
    """Records are frozen and looked at after every event, far more often than they change."""
    found = _read(kind, raw)  # type: ignore[arg-type]
    assert isinstance(found, kind)
    return found
