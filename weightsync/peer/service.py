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
from weightsync.control.editions import prefix_of
from weightsync.control.hosts import slot_name
from weightsync.control.parts import BASE
from weightsync.control.records import CopyRecord, CopyState, ErrorInfo, Keys, PartRecord
from weightsync.errors import (
    ArenaError,
    LeaseLost,
    ManifestError,
    PeerError,
    PeerUnreachable,
    StoreError,
    TensorError,
    WeightSyncError,
)
from weightsync.memory.arena import Arena
from weightsync.peer.control import Control, PeerClient, serving
from weightsync.peer.copies import (
    Announcer,
    CopyBoard,
    Since,
    hosts_with_peers,
    kept_parts,
    wanted_slots,
)
from weightsync.peer.fetch import Bring
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
        self._shelf = Shelf(arena, settings.model, Regions(transport))
        self._pool = ThreadPoolExecutor(DIGEST_THREADS, thread_name_prefix="peer-digest")
        self._tickets = Tickets(
            settings.host, self._shelf, transport, self.metrics, self._pool,
            chunk_nbytes=settings.chunk_nbytes, most=settings.readers,
        )  # fmt: skip
        self._shelf.dropping = self._tickets.close_all
        self.control = Control(self._tickets, self.metrics)
        self._copies = CopyBoard(self._keys, settings.host)
        self._announcer = Announcer(store, self._keys, settings.host, settings.lease_ttl_s, settings.rack)
        self._since = Since()
        self._needs = Needs(self._keys, settings.host, self._copies.changed.set)
        self._shelf.needs = self._needs.of
        bring = Bring(settings, self._shelf, client, transport, self._copies, self._like_this, self.metrics)
        self._supply = Supply(self._shelf, bring, self.metrics, self._copies.changed.set)
        self._settings = settings
        self._offers = Offers(settings.host, self._shelf)

    async def run(self) -> None:
        """For ever. When cancelled, it unlocks the slots and deletes its records."""
        await asyncio.to_thread(self._shelf.adopt)
        sweeping = asyncio.create_task(self._tickets.sweep())
        try:
            await self._follow()
        finally:
            sweeping.cancel()
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
        prefixes = (*self._keys.concerns, (prefix_of(self._keys), ""))
        async with asyncio.TaskGroup() as tasks, Board.follow(self._store, self._keys, *prefixes) as board:
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
        kept = kept_parts(board)
        alive = {part.manifest_digest for part in kept}
        await self._supply.keep_to(alive)
        self._drop_all_but(alive)
        await self._offers.offer(kept)
        wanted = wanted_slots(board)
        missing = [part.manifest_digest for part in wanted if not self._shelf.has(part.manifest_digest)]
        self._copies.keep_to(set(missing))
        await self._supply.steer(wanted)
        records = list(self._records())
        self._since.keep({record.digest for record in records})
        parts = list(self._parts())
        await self._announcer.say(records, alive, parts, self._needs.group)
        for state in STATES:
            self.metrics.copies.labels(state).set(sum(record.state == state for record in records))
        self.metrics.copies.labels("slices").set(len(parts))

    async def _like_this(self, part: PartRecord) -> list[tuple[str, str]]:
        """(rack, host) of the hosts that need the same of a slot. Slices are of the base model alone."""
        return await hosts_with_peers(self._store, self._keys, self._needs.group if part.name == BASE else None)

    def _drop_all_but(self, alive: set[str]) -> None:
        for digest in self._shelf.copies.keys() - alive:
            self._shelf.drop(digest)
        for digest in self._shelf.published.keys() - alive:
            self._tickets.close_all(digest)
            del self._shelf.published[digest]
        self._shelf.forget(alive)

    def _records(self) -> list[CopyRecord]:
        """The records of slots that this host has, is fetching or cannot fetch."""
        digests = {**self._shelf.published, **self._shelf.copies, **self._supply.turns.problems}
        return [self._record(digest, self._shelf.find(digest)) for digest in digests]

    def _parts(self) -> Iterator[PartCopyRecord]:
        """The copies that lack chunks, but none that are needed here."""
        for digest, copy in list(self._shelf.copies.items()):
            if not copy.whole and copy.head is not None and self._shelf.is_met(copy):
                met = self._needs.met(copy.head.manifest.schema.digest)
                yield PartCopyRecord(self._host, slot_name(copy.path, self._host), digest, met)

    def _record(self, digest: str, here: Copy | Published | None) -> CopyRecord:
        problem = self._supply.turns.problems.get(digest)
        state: CopyState = "failed" if digest in self._supply.turns.failed else "fetching"
        if here is not None and here.have is None:
            state, problem = "ready", None
        return CopyRecord(
            host=self._host,
            slot=slot_name(here.path, self._host) if here is not None else "",
            digest=digest,
            nbytes=here.nbytes if here is not None else 0,
            state=state,
            address=self._address,
            since=self._since.of(digest, state),
            error=problem,
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

    digest: str
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
        parts = {part.manifest_digest: part for part in wanted}
        self.turns.keep_to(set(parts))
        self._bring.keep_to(set(parts))
        self._look_at_current()
        digest = self.turns.next([digest for digest in parts if not self._shelf.has(digest)])
        if self._current is not None and self._is_over(self._current, digest):
            await self.stop()
        if digest is not None and self._current is None:
            self._current = _Current(digest, asyncio.create_task(self._get(parts[digest]), name=f"fetch {digest}"))

    def _is_over(self, current: _Current, digest: str | None) -> bool:
        """Whether to stop it in favour of `digest`. A fetch whose slot has just become whole is about to end by
        itself."""
        return current.task.done() or (current.digest != digest and not self._shelf.has(current.digest))

    async def keep_to(self, alive: set[str]) -> None:
        """Stop a fetch of a slot that is not in `alive`; its slot may be dropped only after that."""
        if self._current is not None and self._current.digest not in alive:
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
            self.turns.waits(self._current.digest, problem)
        elif self._bring.waiting.has_moved:
            self.turns.goes_on(self._current.digest)

    async def _get(self, part: PartRecord) -> None:
        started, digest = time.monotonic(), part.manifest_digest
        try:
            await self._bring.slot(part, self._changed)
        except ArenaError as error:
            if error.code != "arena_full" or not self._make_room(digest):
                self._failed(digest, error)
        except (PeerError, PeerUnreachable) as error:
            if error.code == "share_lost":
                self._failed(digest, error)
            else:
                self.turns.ended(digest, error, failed=False)
        except (TensorError, ManifestError) as error:  # of the hosts it came from, which are left out now
            if self._bring.has_others(digest):
                self.turns.ended(digest, error, failed=False)
            else:
                self._failed(digest, error)
        except (WeightSyncError, OSError) as error:
            self._failed(digest, error)
        except Exception as error:  # a fault of ours: said, and not tried again at once
            log.exception("the fetch of %s broke", digest)
            self._failed(digest, error)
        else:
            self._metrics.fetch_seconds.observe(time.monotonic() - started)
            self.turns.done(digest)
            log.info("%s (%s) is here after %.2f s", digest, part.name or "base", time.monotonic() - started)
        self._changed()

    def _failed(self, digest: str, error: Exception) -> None:
        self._metrics.failures.labels(self.turns.ended(digest, error, failed=True).code).inc()

    def _make_room(self, digest: str) -> bool:
        """Drop copies that are less urgent than `digest`; False if there are none."""
        order = [part.manifest_digest for part in self._wanted]
        urgent = order[: order.index(digest) + 1] if digest in order else [digest]
        victims = [d for d, copy in list(self._shelf.copies.items()) if not copy.is_source and d not in urgent]
        for victim in victims:
            log.info("%s is dropped: there is no room for it beside %s", victim, digest)
            self._shelf.drop(victim)
        return bool(victims)


class Turns:
    """The order of missing slots to fetch, and what holds up the others. Times are of the monotonic clock."""

    def __init__(self) -> None:
        self.problems: dict[str, ErrorInfo] = {}  # the latest error of each fetch
        self.failed: set[str] = set()  # fetches that ended with their error
        self._again_at: dict[str, float] = {}
        self._pauses: dict[str, float] = {}
        self._passed_over: dict[str, float] = {}  # until when; those only wait for a holder

    def next(self, missing: Sequence[str]) -> str | None:
        """The most urgent slot that may be tried; one that waits for a holder goes after the others."""
        now = time.monotonic()
        due = [digest for digest in missing if self._again_at.get(digest, 0.0) <= now]
        return next((digest for digest in due if self._passed_over.get(digest, 0.0) <= now), due[0] if due else None)

    def waits(self, digest: str, error: WeightSyncError) -> None:
        """No holder of it can be read from: keep waiting, let other missing slots go first, log with back-off."""
        now = time.monotonic()
        if self._passed_over.get(digest, 0.0) > now:
            return
        pause = self._longer(digest)
        log.warning("%s waits for a holder; others are not held up for %g s: %s", digest, pause, error)
        self._passed_over[digest] = now + pause
        if digest not in self.failed:
            self.problems[digest] = ErrorInfo.of(error)

    def goes_on(self, digest: str) -> None:
        """The slot is being read."""
        if digest not in self.failed:
            self._forget(digest)

    def done(self, digest: str) -> None:
        """The slot is here."""
        self.failed.discard(digest)
        self._forget(digest)

    def ended(self, digest: str, error: Exception, *, failed: bool) -> ErrorInfo:
        """The fetch ended with an error. `failed`: trying again at once would not help."""
        info = self.problems[digest] = ErrorInfo.of(error)
        pause = self._longer(digest) if failed else AGAIN_S
        if failed:
            self.failed.add(digest)
        log.warning("%s could not be fetched; again in %g s: %s", digest, pause, error)
        self._again_at[digest] = time.monotonic() + pause
        return info

    def keep_to(self, wanted: set[str]) -> None:
        """Forget all others."""
        self.failed &= wanted
        for told in (self.problems, self._again_at, self._pauses, self._passed_over):
            for digest in told.keys() - wanted:
                del told[digest]  # type: ignore[attr-defined]

    def _forget(self, digest: str) -> None:
        for told in (self.problems, self._again_at, self._pauses, self._passed_over):
            told.pop(digest, None)  # type: ignore[attr-defined]

    def _longer(self, digest: str) -> float:
        pause = self._pauses[digest] = min(2 * self._pauses.get(digest, FIRST_PAUSE_S / 2), LONGEST_PAUSE_S)
        return pause
