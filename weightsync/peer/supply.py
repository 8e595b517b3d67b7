"""Gets the slots that this host wants, one at a time, the most urgent first, from whoever has them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from weightsync.errors import (
    ArenaFull,
    DigestMismatch,
    ManifestError,
    PeerError,
    PeerUnreachable,
    WeightSyncError,
)
from weightsync.manifest import PREAMBLE
from weightsync.peer import deltas
from weightsync.peer.announce import CopyBoard
from weightsync.peer.chunks import Head, Shape
from weightsync.peer.client import PeerClient
from weightsync.peer.fetch import Fetch, Pace, first_answer
from weightsync.peer.messages import Key
from weightsync.peer.metrics import PeerMetrics
from weightsync.peer.shelf import Copy, Shelf
from weightsync.peer.sources import WRONG_S, Sources
from weightsync.records import ErrorInfo, PartRecord
from weightsync.transport import Transport

log = logging.getLogger("hotswap.peer")

T = TypeVar("T")
AGAIN_S = 0.5  # after a fetch that found nobody to read from
FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 60.0  # after one that failed


class Supply:
    """Belongs to the event loop. `changed` is called whenever there is something new to announce."""

    def __init__(
        self,
        host: str,
        shelf: Shelf,
        client: PeerClient,
        transport: Transport,
        board: CopyBoard,
        metrics: PeerMetrics,
        pace: Pace,
        changed: Callable[[], None],
        *,
        deltas: bool = True,
    ) -> None:
        self._host, self._shelf, self._client, self._transport = host, shelf, client, transport
        self._board, self._metrics, self._pace, self._changed = board, metrics, pace, changed
        self._deltas = deltas
        self._pool = ThreadPoolExecutor(pace.total, thread_name_prefix="peer-read")
        self._left_out: dict[Key, dict[str, float]] = {}
        self._again_at: dict[Key, float] = {}
        self._pauses: dict[Key, float] = {}
        self._current: tuple[Key, asyncio.Task[None]] | None = None
        self._wanted: list[PartRecord] = []
        self.problems: dict[Key, ErrorInfo] = {}  # what holds up a fetch
        self.failed: set[Key] = set()  # those that ended with it

    async def steer(self, wanted: Sequence[PartRecord]) -> None:
        """See to it that what is most urgent is being fetched, and nothing else."""
        self._wanted = list(wanted)
        self._forget({Key(part.manifest_digest) for part in wanted})
        now = time.monotonic()
        missing = [part for part in wanted if not self._shelf.has(Key(part.manifest_digest))]
        due = next((p for p in missing if self._again_at.get(Key(p.manifest_digest), 0.0) <= now), None)
        key = Key(due.manifest_digest) if due is not None else None
        if self._current is not None and (self._current[0] != key or self._current[1].done()):
            await self.stop()
        if due is not None and key is not None and self._current is None:
            self._current = (key, asyncio.create_task(self._get(key, due), name=f"fetch {key.digest}"))

    async def keep_to(self, alive: set[Key]) -> None:
        """End the fetch of what is not in `alive`: only then may its slot be let go."""
        if self._current is not None and self._current[0] not in alive:
            await self.stop()

    async def stop(self) -> None:
        """End the fetch in flight; what it has stays, to be gone on with."""
        if self._current is not None:
            task = self._current[1]
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            self._current = None

    async def _get(self, key: Key, part: PartRecord) -> None:
        started = time.monotonic()
        try:
            how = await self._fetch_slot(key, part)
        except ArenaFull as error:
            if not self._make_room(key):
                self._note(key, error, failed=True)
        except (PeerError, PeerUnreachable) as error:
            self._note(key, error)
        except (WeightSyncError, OSError) as error:
            self._note(key, error, failed=True)
        else:
            self._metrics.fetch_seconds.labels(how).observe(time.monotonic() - started)
            for told in (self.problems, self._pauses, self._again_at, self._left_out):
                told.pop(key, None)
            self.failed.discard(key)
            log.info("%s (%s) is here after %.2f s", key.digest, part.name or "base", time.monotonic() - started)
        self._changed()

    async def _fetch_slot(self, key: Key, part: PartRecord) -> str:
        """Returns how it came, "full" or "delta"."""
        left_out = self._left_out.setdefault(key, {})
        offered = lambda: self._board.offered(key)  # noqa: E731
        sources = Sources(self._client, self._transport, key, offered, self._host, left_out)
        try:
            first = await first_answer(sources)
            raw = await self._client.manifest(first.host, first.record.address, first.opened.ticket)
            try:
                head = Head.parse(raw, key.digest, first.shape.nbytes)
            except ManifestError:
                left_out[first.host] = time.monotonic() + WRONG_S
                raise
            copy = await self._claim(key, part, first.shape, head)
            self._changed()
            if not len(copy.journal.done) and await self._came_as_delta(key, part, copy, head):
                return "delta"
            fetch = Fetch(copy, sources, self._metrics, self._pool, self._pace, self._host)
            await fetch.run()
        finally:
            await sources.close()
        try:
            await _to_the_end(_finish, copy, head, self._pool)
        except DigestMismatch:
            left_out |= dict.fromkeys(fetch.read_from, time.monotonic() + WRONG_S)
            self._shelf.drop(key)
            raise
        return "full"

    async def _came_as_delta(self, key: Key, part: PartRecord, slot: Copy, head: Head) -> bool:
        """Try the difference from a slot that is here, if somebody offers it; False: fetch all of it."""
        offers = {record.delta_of for record in self._board.offered(key) if record.delta_of}
        base = next((b for digest in offers if (b := self._shelf.find(Key(digest))) and b.have is None), None)
        if base is None or not self._deltas:
            return False
        wish = Key(key.digest, base.key.digest)
        left_out: dict[str, float] = {}
        sources = Sources(self._client, self._transport, wish, lambda: self._board.offered(wish), self._host, left_out)
        try:
            first = await first_answer(sources)
            delta = await self._claim(wish, part, first.shape, None)
            await Fetch(delta, sources, self._metrics, self._pool, self._pace, self._host).run()
            await _to_the_end(deltas.apply, delta, base.path, slot, head)
        except (WeightSyncError, OSError) as error:
            log.warning("%s does not come as a delta, but in full: %s", key.digest, error)
            self._shelf.drop(wish)
            return False
        finally:
            await sources.close()
        delta.whole = True
        return True

    async def _claim(self, key: Key, part: PartRecord, shape: Shape, head: Head | None) -> Copy:
        copy = self._shelf.copies.get(key)
        if copy is not None and copy.shape == shape:
            return copy  # begun before, and put off for something more urgent
        self._shelf.drop(key)
        claimed, resumed = await _to_the_end(self._shelf.claim, key, part.name, shape, head)
        self._metrics.resumed.inc(resumed)
        return claimed

    def _make_room(self, key: Key) -> bool:
        """Drop copies that are less urgent than `key`; False if there are none."""
        order = [Key(part.manifest_digest) for part in self._wanted]
        urgent = set(order[: order.index(key) + 1]) if key in order else {key}
        victims = [k for k in list(self._shelf.copies) if k.delta_of or Key(k.digest) not in urgent]
        for victim in victims:
            log.info("%s is dropped: there is no room for it beside %s", victim.digest, key.digest)
            self._shelf.drop(victim)
        return bool(victims)

    def _note(self, key: Key, error: Exception, *, failed: bool = False) -> None:
        if isinstance(error, WeightSyncError):
            info = ErrorInfo(error.code, str(error), error.tensor)
        else:
            info = ErrorInfo("internal_error", f"{type(error).__name__}: {error}")
        pause = min(2 * self._pauses.get(key, FIRST_PAUSE_S / 2), LONGEST_PAUSE_S) if failed else AGAIN_S
        if failed:
            self._pauses[key] = pause
            self.failed.add(key)
            self._metrics.failures.labels(info.code).inc()
        log.warning("%s could not be fetched; again in %g s: %s", key.digest, pause, error)
        self._again_at[key] = time.monotonic() + pause
        self.problems[key] = info

    def _forget(self, wanted: set[Key]) -> None:
        for told in (self.problems, self._pauses, self._again_at, self._left_out):
            for key in told.keys() - wanted:
                del told[key]  # type: ignore[attr-defined]
        self.failed &= wanted


async def _to_the_end(work: Callable[..., T], *args: Any) -> T:
    """In a thread that writes into slots: who is cancelled meanwhile ends when it has, for the slots to be let go."""
    running = asyncio.create_task(asyncio.to_thread(work, *args))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait({running})
        raise


def _finish(copy: Copy, head: Head, pool: ThreadPoolExecutor) -> None:
    """Check all that was read against the manifest, then write what makes it a slot. Raises DigestMismatch."""
    view = copy.mapped.view
    if bytes(view[PREAMBLE : PREAMBLE + len(head.raw)]) != head.raw:
        raise DigestMismatch("(manifest)", head.digest, "another one")
    if wrong := head.wrong_tensors(view, pool):
        raise DigestMismatch(wrong[0], head.manifest.tensors[wrong[0]].digest, "another one")
    view[:PREAMBLE] = head.preamble
    copy.whole = True
