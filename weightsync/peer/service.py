"""The peer of one host: offers what is published here, fetches what this host should have, and announces both.

The store may go away at any time: reads in both directions go on, and are announced when the store is back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import socket
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from weightsync.control.board import Board
from weightsync.control.hosts import slot_name
from weightsync.control.records import CopyRecord, CopyState, Keys
from weightsync.errors import LeaseLost, StoreError
from weightsync.memory.arena import Arena
from weightsync.peer.announce import Announcer, CopyBoard, Since, hosts_with_peers
from weightsync.peer.control import Control, PeerClient, serving
from weightsync.peer.copies import all_parts, ready_versions, wanted_slots
from weightsync.peer.deltas import Speeds
from weightsync.peer.fetch import Bring
from weightsync.peer.messages import Key
from weightsync.peer.metrics import PeerMetrics
from weightsync.peer.serve import Offers, Tickets
from weightsync.peer.settings import PeerSettings
from weightsync.peer.shelf import Copy, Published, Regions, Shelf
from weightsync.peer.supply import Supply
from weightsync.store.protocol import Store
from weightsync.tls import ClusterTls
from weightsync.transport import Transport

log = logging.getLogger("hotswap.peer")

LOOK_AGAIN_S = 0.5
FIRST_RETRY_S, LAST_RETRY_S = 0.1, 2.0
DIGEST_THREADS = 2
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
        hosts = partial(hosts_with_peers, store, self._keys)
        bring = Bring(settings, self._shelf, client, transport, self._copies, hosts, self.metrics, self._speeds)
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
        async with asyncio.TaskGroup() as tasks, Board.follow(self._store, self._keys, *self._keys.concerns) as board:
            tasks.create_task(self._copies.follow(self._store))
            lost = tasks.create_task(_raise_when_lost(lease.lost, lease.id))
            while True:
                self._copies.changed.clear()
                await self._reconcile(board)
                woken = tasks.create_task(self._copies.changed.wait())  # type: ignore[arg-type]
                await board.changed(LOOK_AGAIN_S, woken, lost)
                woken.cancel()

    async def _reconcile(self, board: Board) -> None:
        """Offer, drop, fetch and announce as the records have it now."""
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
        await self._announcer.say(records, [key.digest for key in alive])
        for state in STATES:
            self.metrics.copies.labels(state).set(sum(record.state == state for record in records))

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
