"""A local copy of one model's records, kept by a watch."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterable
from functools import lru_cache
from typing import Any, TypeVar

from weightsync.control.records import (
    ActiveRecord,
    FormRecord,
    InstanceRecord,
    Keys,
    Record,
    StartRecord,
    SwapRecord,
    TargetRecord,
    VersionRecord,
)
from weightsync.errors import RecordError
from weightsync.store.protocol import MISSING, Event, KeyValue, Store

R = TypeVar("R", bound=Record)


class Board:
    """The records as of the last event; `changed(timeout)` waits for the next ones."""

    def __init__(
        self, keys: Keys, found: Iterable[KeyValue], revision: int, events: AsyncGenerator[Event, None] | None = None
    ) -> None:
        """`found` is all there was at `revision`; without `events`, whoever owns the board calls `apply`."""
        self.keys = keys
        self.seen = revision  # of the last event; one transaction may be several events of one revision
        self._found = {kv.key: kv for kv in found}
        self._events = events
        self._next: asyncio.Task[Event] | None = None

    @classmethod
    @contextlib.asynccontextmanager
    async def follow(cls, store: Store, keys: Keys, *, fleet: bool = True) -> AsyncGenerator[Board, None]:
        """Read everything, then watch from there. Raises StoreUnavailable, here and in `changed`.

        Without the `fleet` the board has what an agent or a peer goes by: `active`, `swap`, `target` and `versions`.
        What it costs the store then does not depend on how many others there are.
        """
        if fleet:
            found, revision = await store.list(keys.root)
            events = store.watch(keys.root, revision + 1)
        else:
            active, before = await store.list(keys.active)  # first: the swap may be ahead of it, not the other way
            rest, revision = await store.list(keys.root, first=keys.swap)
            found, events = [*active, *rest], _without_fleet(store, keys, before + 1, revision + 1)
        board = cls(keys, found, revision, events)
        try:
            yield board
        finally:
            await board._close()

    async def changed(self, timeout_s: float | None = None, *others: asyncio.Task[Any]) -> Event | None:
        """Take in the next event and return it; None when the time is up or one of `others` is done.

        Raises StoreUnavailable, WatchCompacted.
        """
        if self._next is None:
            assert self._events is not None
            self._next = _next(self._events)
        await asyncio.wait({self._next, *others}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if not self._next.done():
            return None
        event = await self._next
        self._next = None
        self.apply(event)
        return event

    async def settle(self, seconds: float) -> None:
        """Take in what comes within so many seconds, for who then looks at everything once. Raises as `changed`."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while (left := until - loop.time()) > 0 and await self.changed(left) is not None:
            pass

    def apply(self, event: Event) -> None:
        """Take in one event."""
        self.seen = event.kv.mod_revision
        if event.kind == "put":
            self._found[event.kv.key] = event.kv
        else:
            self._found.pop(event.kv.key, None)

    @property
    def active(self) -> ActiveRecord | None:
        return self._record(ActiveRecord, self.keys.active)

    @property
    def swap(self) -> SwapRecord | None:
        return self._record(SwapRecord, self.keys.swap)

    @property
    def target(self) -> TargetRecord | None:
        return self._record(TargetRecord, self.keys.target)

    @property
    def versions(self) -> list[VersionRecord]:
        """Oldest first."""
        prefix = self.keys.versions
        found = [_parsed(VersionRecord, kv.value) for k, kv in self._found.items() if k.startswith(prefix)]
        return sorted(found, key=lambda record: record.version)

    def version(self, version: int) -> VersionRecord | None:
        return self._record(VersionRecord, self.keys.version(version))

    @property
    def instances(self) -> dict[str, InstanceRecord]:
        """By id. A record that cannot be read is as good as none: its instance does not take part."""
        instances = {}
        for key, kv in self._found.items():
            if key.startswith(self.keys.instances):
                with contextlib.suppress(RecordError):
                    record = _parsed(InstanceRecord, kv.value)
                    instances[record.id] = record
        return instances

    @property
    def starts(self) -> dict[str, StartRecord]:
        """What became of starts that swaps asked for, by instance."""
        prefix = self.keys.starts
        found = {k.removeprefix(prefix): kv for k, kv in self._found.items() if k.startswith(prefix)}
        return {name: _parsed(StartRecord, kv.value) for name, kv in found.items()}

    def form(self, digest: str) -> FormRecord | None:
        """The form of that name; "" is that of the key `schema`, without a configuration of its own."""
        if digest:
            return self._record(FormRecord, self.keys.form(digest))
        found = self._found.get(self.keys.schema)
        return FormRecord(found.value.decode(), "") if found is not None else None

    def revision(self, key: str) -> int:
        """What to compare with before writing `key` (0: it does not exist); of a prefix, that ends with `/`, the newest
        of all keys under it."""
        if key.endswith("/"):
            return max((kv.mod_revision for k, kv in self._found.items() if k.startswith(key)), default=MISSING)
        return self._found[key].mod_revision if key in self._found else MISSING

    def _record(self, kind: type[R], key: str) -> R | None:
        found = self._found.get(key)
        return _parsed(kind, found.value) if found is not None else None

    async def _close(self) -> None:
        if self._next is not None:
            self._next.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await self._next
        if self._events is not None:
            await self._events.aclose()


async def _without_fleet(store: Store, keys: Keys, active: int, rest: int) -> AsyncGenerator[Event, None]:
    """The events of `active` from revision `active` on, and from `rest` on those of the keys from `swap` to the last.

    `swap`, `target` and `versions` are the last keys of a model, so one watch has them in their order. `active` has one
    of its own, and two watches are as fast as they like. Who saw a commit and not yet its swap would not know that it
    has to wait for its turn, or that the version is ready; who saw the end of a swap and not yet its commit would drop
    what it has staged. So a commit record waits here for all that was written up to the swap record that stands, and a
    swap that is done for the commit record that stands.
    """
    commits, others = store.watch(keys.active, active), store.watch(keys.root, rest, first=keys.swap)
    commit, other = _next(commits), _next(others)
    committed, seen = active - 1, rest - 1
    try:
        while True:
            await asyncio.wait({commit, other}, return_when=asyncio.FIRST_COMPLETED)
            until = 0
            if commit.done() and seen < (await commit).kv.mod_revision:
                until = await _written(store, keys.swap)
            while other.done() or seen < until:
                event = await other
                other, seen = _next(others), event.kv.mod_revision
                before = await _written(store, keys.active) if _is_done(keys, event) else 0
                while committed < before < seen:
                    made = await commit
                    commit, committed = _next(commits), made.kv.mod_revision
                    yield made
                yield event
            if commit.done():
                event = await commit
                commit, committed = _next(commits), event.kv.mod_revision
                yield event
    except StopAsyncIteration:
        return  # the store was closed
    finally:
        for task, watch in ((commit, commits), (other, others)):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await watch.aclose()


async def _written(store: Store, key: str) -> int:
    found = await store.get(key)
    return found.mod_revision if found is not None else MISSING


def _is_done(keys: Keys, event: Event) -> bool:
    return event.kv.key == keys.swap and event.kind == "put" and _parsed(SwapRecord, event.kv.value).phase == "done"


def _next(events: AsyncGenerator[Event, None]) -> asyncio.Task[Event]:
    return asyncio.ensure_future(anext(events))  # type: ignore[arg-type]


@lru_cache(maxsize=4096)
def _read(kind: type[Record], raw: bytes) -> Record:
    return kind.from_json(raw)


def _parsed(kind: type[R], raw: bytes) -> R:
    """Records are frozen and looked at after every event, far more often than they change."""
    found = _read(kind, raw)  # type: ignore[arg-type]
    assert isinstance(found, kind)
    return found
