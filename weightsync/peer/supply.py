"""Gets the slots that this host wants, one at a time, the most urgent first, from whoever has them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from weightsync.errors import ArenaFull, DigestMismatch, ManifestError, PeerError, PeerUnreachable, WeightSyncError
from weightsync.peer.bring import Bring
from weightsync.peer.messages import Key
from weightsync.peer.metrics import PeerMetrics
from weightsync.peer.shelf import Shelf
from weightsync.peer.turns import Turns
from weightsync.records import PartRecord

log = logging.getLogger("hotswap.peer")


@dataclass
class _Current:
    """The fetch in flight."""

    key: Key
    task: asyncio.Task[None]


class Supply:
    """Belongs to the event loop. `changed` is called whenever there is something new to announce."""

    def __init__(self, shelf: Shelf, bring: Bring, metrics: PeerMetrics, changed: Callable[[], None]) -> None:
        self._shelf, self._bring, self._metrics, self._changed = shelf, bring, metrics, changed
        self._current: _Current | None = None
        self._wanted: list[PartRecord] = []
        self.turns = Turns()

    async def steer(self, wanted: Sequence[PartRecord]) -> None:
        """See to it that what is most urgent is being fetched, and nothing else."""
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
        """Whether to end it, for `key`. What has just come whole is about to end by itself, and to say so."""
        return current.task.done() or (current.key != key and not self._shelf.has(current.key))

    async def keep_to(self, alive: set[Key]) -> None:
        """End the fetch of what is not in `alive`: only then may its slot be let go."""
        if self._current is not None and self._current.key not in alive:
            await self.stop()

    async def stop(self) -> None:
        """End the fetch in flight; what it has stays, to be gone on with."""
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
