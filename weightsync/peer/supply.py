"""Gets the slots that this host wants, one at a time, the most urgent first; `Turns` says which is next."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from weightsync.control.records import ErrorInfo, PartRecord
from weightsync.errors import ArenaFull, DigestMismatch, ManifestError, PeerError, PeerUnreachable, WeightSyncError
from weightsync.peer.fetch import Bring
from weightsync.peer.messages import Key
from weightsync.peer.metrics import PeerMetrics
from weightsync.peer.shelf import Shelf

log = logging.getLogger("hotswap.peer")

AGAIN_S = 0.5  # after a fetch that found nobody to read from
FIRST_PAUSE_S, LONGEST_PAUSE_S = (
    5.0,
    60.0,
)  # after a fetch that failed, and how long one that waits lets others go first


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
        victims = [k for k in list(self._shelf.copies) if k.delta_of or Key(k.digest) not in urgent]
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
            self.problems[key] = _told(error)

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
        info = self.problems[key] = _told(error)
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


def _told(error: Exception) -> ErrorInfo:
    if isinstance(error, WeightSyncError):
        return ErrorInfo(error.code, str(error), error.tensor)
    return ErrorInfo("internal_error", f"{type(error).__name__}: {error}")
