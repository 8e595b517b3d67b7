"""The peer of one host: offers what is published here, fetches what this host should have, and announces both.

`Supply` fetches one slot at a time, the most urgent first; `Turns` says which is next. The store may go away at any
time: reads in both directions go on, and are announced when the store is back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from weightsync.control.board import Board
from weightsync.control.hosts import slot_name
from weightsync.control.records import CopyRecord, CopyState, ErrorInfo, Keys, PartRecord
from weightsync.errors import (
    ArenaFull,
    DigestMismatch,
    LeaseLost,
    ManifestError,
    PeerError,
    PeerUnreachable,
    StoreError,
    WeightSyncError,
)
from weightsync.memory.arena import Arena
from weightsync.memory.parts import BASE
from weightsync.peer.control import Control, PeerClient, serving
from weightsync.peer.copies import (
    Announcer,
    CopyBoard,
    Since,
    all_parts,
    hosts_with_peers,
    ready_versions,
    wanted_slots,
)
from weightsync.peer.deltas import Speeds
from weightsync.peer.fetch import Bring
from weightsync.peer.holders import ShareLost
from weightsync.peer.messages import Key
from weightsync.peer.metrics import PeerMetrics
from weightsync.peer.serve import Offers, Tickets
from weightsync.peer.settings import PeerSettings
from weightsync.peer.shelf import Copy, Published, Regions, Shelf
from weightsync.peer.slices import Needs, PartCopyRecord
from weightsync.store.protocol import Store
from weightsync.tls import ClusterTls
from weightsync.transport import Transport

log = logging.getLogger("hotswap.peer")

LOOK_AGAIN_S = 0.5
FIRST_RETRY_S, LAST_RETRY_S = 0.1, 2.0
DIGEST_THREADS = 2
AGAIN_S = 0.5  # after a fetch that found nobody to read from
FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 60.0  # after a fetch that failed; one that waits lets others go first as long
STATES: tuple[CopyState, ...] = ("fetching", "ready", "failed")


class Peer:
    """`run` until it is cancelled. Only one peer at a time may use an arena for a model (__main__.py)."""

    def __init__(
        self,
        settings: PeerSettings,
        store: Store,
        arena: Arena,
        transport: Transport,
        client: PeerClient,
        address: str,
    ) -> None:
        self._store, self._keys, self._host, self._address = store, Keys(settings.model), settings.host, address
        self.metrics = PeerMetrics()
        self._speeds = Speeds(settings.deltas)
        self._shelf = Shelf(arena, settings.model, Regions(transport))
        self._pool = ThreadPoolExecutor(DIGEST_THREADS, thread_name_prefix="peer-digest")
        self._tickets = Tickets(
            settings.host, self._shelf, transport, self.metrics, self._pool,
            chunk_nbytes=settings.chunk_nbytes, most=settings.readers, told=self._speeds.told,
        )  # fmt: skip
        self._shelf.dropping = self._tickets.close_all
        self.control = Control(self._tickets, self.metrics)
        self._copies = CopyBoard(self._keys, settings.host)
        self._announcer = Announcer(store, self._keys, settings.host, settings.lease_ttl_s, settings.rack)
        self._since = Since()
        self._needs = Needs(self._keys, settings.host, self._copies.changed.set)
        self._shelf.needs = self._needs.of
        bring = Bring(
            settings, self._shelf, client, transport, self._copies, self._like_this, self.metrics, self._speeds
        )
        self._supply = Supply(self._shelf, bring, self.metrics, self._copies.changed.set)
        self._settings = settings
        self._offers = Offers(
            settings, store, self._shelf, self._tickets, self._speeds, self._pool, self._copies.changed.set
        )

    async def run(self) -> None:
        """For ever. When cancelled, it unlocks the slots and deletes its records."""
        await asyncio.to_thread(self._shelf.adopt)
        sweeping = asyncio.create_task(self._tickets.sweep())
        try:
            await self._follow()
        finally:
            sweeping.cancel()
            self._offers.stop()
            await self._supply.end()
            await self._announcer.end()
            self._tickets.close_all()
            self._shelf.close()
            self._pool.shutdown(wait=False, cancel_futures=True)

    async def _follow(self) -> None:
        delay = FIRST_RETRY_S
        while True:
            started = time.monotonic()
            try:
                await self._session()
            except* StoreError as errors:
                log.warning("goes on without the store: %s", "; ".join(map(str, _leaves(errors))))
            delay = FIRST_RETRY_S if time.monotonic() - started > LAST_RETRY_S else min(2 * delay, LAST_RETRY_S)
            await asyncio.sleep(delay * random.uniform(0.5, 1.5))  # noqa: S311 - not all hosts at once

    async def _session(self) -> None:
        """Announce under a fresh lease and follow the records until the store or the lease is lost."""
        lease = await self._announcer.begin()
        revision = await self._needs.read(self._store)
        async with asyncio.TaskGroup() as tasks, Board.follow(self._store, self._keys, *self._keys.concerns) as board:
            tasks.create_task(self._copies.follow(self._store))
            tasks.create_task(self._needs.follow(self._store, revision))
            lost = tasks.create_task(_raise_when_lost(lease.lost, lease.id))
            while True:
                self._copies.changed.clear()
                await self._reconcile(board)
                woken = tasks.create_task(self._copies.changed.wait())  # type: ignore[arg-type]
                await board.changed(LOOK_AGAIN_S, woken, lost)
                woken.cancel()

    async def _reconcile(self, board: Board) -> None:
        """Offer, drop, fetch and announce as the records have it now."""
        await self._needs.look(self._store, board.swap.id if board.swap is not None else "")
        versions = ready_versions(board)
        alive = {Key(part.manifest_digest) for version in versions for part in all_parts(version)}
        await self._supply.keep_to(alive)
        self._drop_all_but(alive)
        for version in versions:
            await self._offers.offer(version, versions)
        wanted = wanted_slots(board)
        missing = [part.manifest_digest for part in wanted if not self._shelf.has(Key(part.manifest_digest))]
        self._copies.keep_to(set(missing))
        await self._supply.steer(wanted)
        records = list(self._records())
        self._since.keep({Key(record.digest): record for record in records})
        parts = list(self._parts())
        await self._announcer.say(records, [key.digest for key in alive], parts, self._needs.group)
        for state in STATES:
            self.metrics.copies.labels(state).set(sum(record.state == state for record in records))
        self.metrics.copies.labels("slices").set(len(parts))

    async def _like_this(self, part: PartRecord) -> list[tuple[str, str]]:
        """(rack, host) of the hosts that need the same of a slot. Slices are of the base model alone."""
        return await hosts_with_peers(self._store, self._keys, self._needs.group if part.name == BASE else None)

    def _drop_all_but(self, alive: set[Key]) -> None:
        for key in [key for key in list(self._shelf.copies) if Key(key.digest) not in alive]:
            self._shelf.drop(key)
        for key in self._shelf.published.keys() - alive:
            self._tickets.close_all(key)
            del self._shelf.published[key]
        self._shelf.forget(alive)

    def _records(self) -> list[CopyRecord]:
        """What this host has, and what it is fetching or cannot fetch."""
        found: dict[str, CopyRecord] = {}
        for key in {**self._shelf.published, **self._shelf.copies}:
            here = self._shelf.find(key)
            if here is not None and not key.delta_of and key not in self._offers.preparing:
                found[key.digest] = self._record(key, here)
        for key in self._supply.turns.problems.keys() - self._shelf.copies.keys():
            found.setdefault(key.digest, self._record(key, None))
        return list(found.values())

    def _parts(self) -> Iterator[PartCopyRecord]:
        """The copies that lack chunks, but none that are needed here."""
        for key, copy in list(self._shelf.copies.items()):
            if not copy.whole and copy.head is not None and self._shelf.is_met(copy):
                met = self._needs.met(copy.head.manifest.schema.digest)
                yield PartCopyRecord(self._host, slot_name(copy.path, self._host), key.digest, met)

    def _record(self, key: Key, here: Copy | Published | None) -> CopyRecord:
        problem = self._supply.turns.problems.get(key)
        state: CopyState = "failed" if key in self._supply.turns.failed else "fetching"
        if here is not None and here.have is None:
            state, problem = "ready", None
        return CopyRecord(
            host=self._host,
            slot=slot_name(here.path, self._host) if here is not None else "",
            digest=key.digest,
            nbytes=here.nbytes if here is not None else 0,
            state=state,
            address=self._address,
            since=self._since.of(key, state),
            error=problem,
            delta_of=self._shelf.delta_to(key),
            rack=self._settings.rack or None,
        )


def _leaves(group: BaseExceptionGroup[StoreError]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error


async def _raise_when_lost(lost: asyncio.Event, lease: int) -> None:
    """Raises LeaseLost."""
    await lost.wait()
    raise LeaseLost(lease)


@contextlib.asynccontextmanager
async def running(peer: Peer, listener: socket.socket, tls: ClusterTls | None) -> AsyncIterator[asyncio.Task[None]]:
    """The peer and its control server; the task ends only with an error."""
    async with serving(peer.control.app, listener, tls):
        task = asyncio.create_task(peer.run(), name="peer")
        try:
            yield task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@dataclass
class _Current:
    """The fetch in flight."""

    key: Key
    task: asyncio.Task[None]


class Supply:
    """Fetches what this host wants. `changed` is called whenever there is something new to announce.

    Belongs to the event loop.
    """

    def __init__(self, shelf: Shelf, bring: Bring, metrics: PeerMetrics, changed: Callable[[], None]) -> None:
        self._shelf, self._bring, self._metrics, self._changed = shelf, bring, metrics, changed
        self._current: _Current | None = None
        self._wanted: list[PartRecord] = []
        self.turns = Turns()

    async def steer(self, wanted: Sequence[PartRecord]) -> None:
        """Fetch the most urgent slot, and nothing else."""
        self._wanted = list(wanted)
        parts = {Key(part.manifest_digest): part for part in wanted}
        self.turns.keep_to(set(parts))
        self._bring.keep_to(set(parts))
        self._look_at_current()
        key = self.turns.next([key for key in parts if not self._shelf.has(key)])
        if self._current is not None and self._is_over(self._current, key):
            await self.stop()
        if key is not None and self._current is None:
            self._current = _Current(key, asyncio.create_task(self._get(key, parts[key]), name=f"fetch {key.digest}"))

    def _is_over(self, current: _Current, key: Key | None) -> bool:
        """Whether to stop it in favour of `key`. A fetch whose slot has just become whole is about to end by itself."""
        return current.task.done() or (current.key != key and not self._shelf.has(current.key))

    async def keep_to(self, alive: set[Key]) -> None:
        """Stop a fetch of a slot that is not in `alive`; its slot may be dropped only after that."""
        if self._current is not None and self._current.key not in alive:
            await self.stop()

    async def stop(self) -> None:
        """Stop the fetch in flight. The chunks that it has stay for the next attempt."""
        if self._current is not None:
            self._current.task.cancel()
            await asyncio.wait({self._current.task})  # `gather` would cancel it again, if this is cancelled
            self._current = None

    async def end(self) -> None:
        """As `stop`, for good."""
        await self.stop()
        await self._bring.close()

    def _look_at_current(self) -> None:
        if self._current is None or self._current.task.done() or self._bring.waiting is None:
            return
        if (problem := self._bring.waiting.held_up()) is not None:
            self.turns.waits(self._current.key, problem)
        elif self._bring.waiting.has_moved:
            self.turns.goes_on(self._current.key)

    async def _get(self, key: Key, part: PartRecord) -> None:
        started = time.monotonic()
        try:
            how = await self._bring.slot(key, part, self._changed)
        except ArenaFull as error:
            if not self._make_room(key):
                self._failed(key, error)
        except ShareLost as error:
            self._failed(key, error)
        except (PeerError, PeerUnreachable) as error:
            self.turns.ended(key, error, failed=False)
        except (DigestMismatch, ManifestError) as error:  # of the hosts it came from, which are left out now
            if self._bring.has_others(key):
                self.turns.ended(key, error, failed=False)
            else:
                self._failed(key, error)
        except (WeightSyncError, OSError) as error:
            self._failed(key, error)
        except Exception as error:  # a fault of ours: said, and not tried again at once
            log.exception("the fetch of %s broke", key.digest)
            self._failed(key, error)
        else:
            self._metrics.fetch_seconds.labels(how).observe(time.monotonic() - started)
            self.turns.done(key)
            log.info("%s (%s) is here after %.2f s", key.digest, part.name or "base", time.monotonic() - started)
        self._changed()

    def _failed(self, key: Key, error: Exception) -> None:
        self._metrics.failures.labels(self.turns.ended(key, error, failed=True).code).inc()

    def _make_room(self, key: Key) -> bool:
        """Drop copies that are less urgent than `key`; False if there are none."""
        order = [Key(part.manifest_digest) for part in self._wanted]
        urgent = set(order[: order.index(key) + 1]) if key in order else {key}
        spare = [key for key, copy in list(self._shelf.copies.items()) if not copy.is_source]
        victims = [k for k in spare if k.delta_of or Key(k.digest) not in urgent]
        for victim in victims:
            log.info("%s is dropped: there is no room for it beside %s", victim.digest, key.digest)
            self._shelf.drop(victim)
        return bool(victims)


class Turns:
    """The order of missing slots to fetch, and what holds up the others. Times are of the monotonic clock."""

    def __init__(self) -> None:
        self.problems: dict[Key, ErrorInfo] = {}  # the latest error of each fetch
        self.failed: set[Key] = set()  # fetches that ended with their error
        self._again_at: dict[Key, float] = {}
        self._pauses: dict[Key, float] = {}
        self._passed_over: dict[Key, float] = {}  # until when; those only wait for a holder

    def next(self, missing: Sequence[Key]) -> Key | None:
        """The most urgent slot that may be tried; one that waits for a holder goes after the others."""
        now = time.monotonic()
        due = [key for key in missing if self._again_at.get(key, 0.0) <= now]
        return next((key for key in due if self._passed_over.get(key, 0.0) <= now), due[0] if due else None)

    def waits(self, key: Key, error: WeightSyncError) -> None:
        """No holder of it can be read from: keep waiting, let other missing slots go first, log with back-off."""
        now = time.monotonic()
        if self._passed_over.get(key, 0.0) > now:
            return
        pause = self._longer(key)
        log.warning("%s waits for a holder; others are not held up for %g s: %s", key.digest, pause, error)
        self._passed_over[key] = now + pause
        if key not in self.failed:
            self.problems[key] = ErrorInfo.of(error)

    def goes_on(self, key: Key) -> None:
        """The slot is being read."""
        if key not in self.failed:
            self._forget(key)

    def done(self, key: Key) -> None:
        """The slot is here."""
        self.failed.discard(key)
        self._forget(key)

    def ended(self, key: Key, error: Exception, *, failed: bool) -> ErrorInfo:
        """The fetch ended with an error. `failed`: trying again at once would not help."""
        info = self.problems[key] = ErrorInfo.of(error)
        pause = self._longer(key) if failed else AGAIN_S
        if failed:
            self.failed.add(key)
        log.warning("%s could not be fetched; again in %g s: %s", key.digest, pause, error)
        self._again_at[key] = time.monotonic() + pause
        return info

    def keep_to(self, wanted: set[Key]) -> None:
        """Forget all others."""
        self.failed &= wanted
        for told in (self.problems, self._again_at, self._pauses, self._passed_over):
            for key in told.keys() - wanted:
                del told[key]  # type: ignore[attr-defined]

    def _forget(self, key: Key) -> None:
        for told in (self.problems, self._again_at, self._pauses, self._passed_over):
            told.pop(key, None)  # type: ignore[attr-defined]

    def _longer(self, key: Key) -> float:
        pause = self._pauses[key] = min(2 * self._pauses.get(key, FIRST_PAUSE_S / 2), LONGEST_PAUSE_S)
        return pause
