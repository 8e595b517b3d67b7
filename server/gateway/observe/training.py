"""What a trainer reports of its steps: the last `KEPT`, in the store: all gateways know them, after restarts too.

A point supersedes those of the same and of later steps that were reported before it: a run that went back to a
checkpoint, or a new one, goes on from where it is. What is reported of one step in several requests is put together.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Iterable, Mapping

import orjson

from weightsync.errors import StoreError
from weightsync.records import Keys
from weightsync.store import Store
from weightsync.store.protocol import KeyValue

log = logging.getLogger("hotswap.gateway")

KEPT = 500
RETRY_S = 1.0
Point = dict[str, float]


class TrainingLog:
    """The points as far as this gateway has seen them, by step."""

    def __init__(self, store: Store, model: str) -> None:
        self._store, self._keys = store, Keys(model)
        self._slots: dict[str, Point] = {}

    @property
    def points(self) -> list[Point]:
        """By step; `time` is when the gateway was told, unix seconds."""
        kept: list[Point] = []
        for point in sorted(self._slots.values(), key=lambda p: p["time"]):
            while kept and kept[-1]["step"] >= point["step"]:
                kept.pop()
            kept.append(point)
        return kept

    async def add(self, values: Mapping[str, float]) -> Point:
        """Writes what is reported of `values["step"]`; the point as it is now. Raises StoreUnavailable."""
        step = int(values["step"])
        key = self._keys.training_point(step % KEPT)
        last = self.points[-1:]
        before = last[0] if last and last[0]["step"] == step else {}
        point = {**before, **values, "time": time.time()}
        await self._store.put(key, orjson.dumps(point))
        self._slots[key] = point
        return point

    async def run(self) -> None:
        """Follows the store for ever, however often it is away."""
        while True:
            try:
                found, revision = await self._store.list(self._keys.training)
                self._slots = {}
                self._see(found)
                async with contextlib.aclosing(self._store.watch(self._keys.training, revision + 1)) as events:
                    async for event in events:
                        if event.kind == "put":
                            self._see([event.kv])
                        else:
                            self._slots.pop(event.kv.key, None)
            except StoreError as error:
                log.debug("no news of training until the store answers: %s", error)
                await asyncio.sleep(RETRY_S)

    def _see(self, found: Iterable[KeyValue]) -> None:
        for kv in found:
            if not kv.key.removeprefix(self._keys.training).isdigit():
                continue  # of a model whose name begins like this one's
            try:
                self._slots[kv.key] = _checked(orjson.loads(kv.value))
            except ValueError as error:
                log.error("ignoring %s: %s", kv.key, error)


def _checked(raw: object) -> Point:
    """Raises ValueError."""
    if not isinstance(raw, dict) or not {"step", "time"} <= raw.keys():
        raise ValueError("not a point with step and time")
    if not all(isinstance(v, int | float) and math.isfinite(v) for v in raw.values()):
        raise ValueError("not all of it is numbers")
    return raw
