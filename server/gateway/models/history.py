"""The console's data: throughput over the last ten minutes, and what a trainer reported of its last steps.

Throughput comes from the counters that the engines keep: it is the fleet's, whichever gateway asks. Training points are
in the store: all gateways know them, after restarts too. A point supersedes those of the same and of later steps that
were reported before it: a run that went back to a checkpoint, or a new one, goes on from where it is. Reports of one
step in several requests are put together.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import orjson

from server.gateway.fleet.instance import Instance, Signals
from weightsync.control.records import Keys
from weightsync.errors import StoreError
from weightsync.store import Store
from weightsync.store.protocol import KeyValue

EARLY_S = 0.002  # which a sleep may end before its time
INTERVAL_S = 2.0
KEPT_SAMPLES = 300


@dataclass(frozen=True, slots=True)
class Sample:
    """Rates are tokens per second over the last two scrapes of each instance; `time` is unix seconds."""

    time: float
    generation_tokens_per_s: float
    prompt_tokens_per_s: float
    running: float
    waiting: float
    in_flight: int


class _Rate:
    """Of one instance, between its last two scrapes."""

    def __init__(self, signals: Signals) -> None:
        self._last = signals
        self.generation = self.prompt = 0.0

    def see(self, signals: Signals) -> None:
        """A counter that went back began anew with its engine."""
        seconds = signals.read_at - self._last.read_at
        if seconds <= 0:
            return
        self.generation = max(0.0, signals.generation_tokens - self._last.generation_tokens) / seconds
        self.prompt = max(0.0, signals.prompt_tokens - self._last.prompt_tokens) / seconds
        self._last = signals


class Throughput:
    """A ring of samples, oldest first."""

    def __init__(self) -> None:
        self.samples: deque[Sample] = deque(maxlen=KEPT_SAMPLES)
        self._rates: dict[str, _Rate] = {}

    def sample(self, instances: Mapping[str, Instance], now: float) -> None:
        """Adds what the instances say at the time `now`; one whose last scrape failed counts as idle."""
        seen = {name: i.signals for name, i in instances.items() if i.signals is not None}
        self._rates = {name: rate for name, rate in self._rates.items() if name in seen}
        for name, signals in seen.items():
            self._rates.setdefault(name, _Rate(signals)).see(signals)
        self.samples.append(
            Sample(
                time=round(now, 3),
                generation_tokens_per_s=round(sum(r.generation for r in self._rates.values()), 3),
                prompt_tokens_per_s=round(sum(r.prompt for r in self._rates.values()), 3),
                running=sum(s.num_requests_running for s in seen.values()),
                waiting=sum(s.num_requests_waiting for s in seen.values()),
                in_flight=sum(i.inflight for i in instances.values()),
            )
        )

    async def run(self, instances: Mapping[str, Instance]) -> None:
        """Samples for ever, at full multiples of the interval: several gateways' samples then stand side by side."""
        while True:
            tick = (time.time() // INTERVAL_S + 1) * INTERVAL_S
            await asyncio.sleep(max(0.0, tick - time.time()) + EARLY_S)
            self.sample(instances, tick)


log = logging.getLogger("hotswap.gateway")

KEPT_POINTS = 500
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
        key = self._keys.training_point(step % KEPT_POINTS)
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
