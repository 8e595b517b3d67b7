"""Pauses of generation: while a pause record exists, the engines of the model generate nothing.

A pause record hangs on a lease, so it ends with its writer. An instance without the store cannot see that: it lets a
pause go when the record's time to live has passed since it last saw the record.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterable

from weightsync.control.records import Keys, PauseRecord
from weightsync.errors import RecordError, StoreError
from weightsync.store.protocol import KeyValue, Store

log = logging.getLogger(__name__)
RETRY_S = 0.2
LEAST_TTL_S = 0.1

Callback = Callable[[], Awaitable[object]]


class Pauses:
    """The pauses an instance knows of, and until when each holds without being seen in the store again."""

    def __init__(self) -> None:
        self._ends: dict[str, float] = {}

    def see(self, found: Iterable[KeyValue], now: float) -> None:
        """Take in what the store holds at the time `now` (seconds of any clock that only grows)."""
        self._ends = {}
        for kv in found:
            try:
                record = PauseRecord.from_json(kv.value)
            except RecordError as error:
                log.error("ignoring %s: %s", kv.key, error)
                continue
            self._ends[kv.key] = now + max(record.ttl_s, LEAST_TTL_S)

    def wanted(self, now: float) -> bool:
        """Whether generation must stand still."""
        return any(end > now for end in self._ends.values())

    def left_s(self, now: float) -> float | None:
        """Seconds until the first of them must have been seen again; None if there is none."""
        return min((end - now for end in self._ends.values() if end > now), default=None)

    def clear(self) -> None:
        self._ends = {}


class PauseFollower:
    """Calls `pause` when the first pause record appears and `resume` when the last one is gone or out of date."""

    def __init__(self, store: Store, keys: Keys, pause: Callback, resume: Callback) -> None:
        self._store, self._keys, self._pause, self._resume = store, keys, pause, resume
        self._known = Pauses()
        self._paused = False

    @property
    def paused(self) -> bool:
        return self._paused

    async def run(self) -> None:
        """Follow for ever; cancelled, it resumes first."""
        try:
            while True:
                try:
                    await self._follow()
                except (StoreError, TimeoutError) as error:
                    log.debug("pauses are not seen without the store: %s", error)
                    await self._apply()
                    await asyncio.sleep(min(RETRY_S, self._look_again_s() or RETRY_S))
        finally:
            self._known.clear()
            await self._apply()

    async def _follow(self) -> None:
        """Look, act, and look again when a record changes, or in good time before what is known is out of date."""
        async with asyncio.timeout(self._look_again_s()):  # a store may also just not answer
            found, revision = await self._store.list(self._keys.pauses)
        self._known.see(found, time.monotonic())
        await self._apply()
        async with contextlib.aclosing(self._store.watch(self._keys.pauses, revision + 1)) as events:
            change = asyncio.ensure_future(anext(events))  # type: ignore[arg-type]
            try:
                await asyncio.wait({change}, timeout=self._look_again_s())
                if change.done():
                    change.result()
            finally:
                change.cancel()
                await asyncio.gather(change, return_exceptions=True)

    async def _apply(self) -> None:
        wanted = self._known.wanted(time.monotonic())
        if wanted == self._paused:
            return
        log.info("generation %s", "pauses" if wanted else "goes on")
        try:
            await (self._pause() if wanted else self._resume())
            self._paused = wanted
        except Exception:
            log.exception("could not %s generation; trying again", "pause" if wanted else "resume")

    def _look_again_s(self) -> float | None:
        """How soon at the latest: several times before a pause is out of date, or soon after a callback failed."""
        now = time.monotonic()
        if self._known.wanted(now) != self._paused:
            return RETRY_S
        left = self._known.left_s(now)
        return max(0.01, left / 3) if left is not None else None
