"""Throughput over the last ten minutes, from the counters the engines keep: the fleet's, whichever gateway asks."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from server.gateway.fleet.instance import Signals

EARLY_S = 0.002  # which a sleep may end before its time
INTERVAL_S = 2.0
KEPT = 300


class Scraped(Protocol):
    """What is looked at of an instance."""

    signals: Signals | None
    inflight: int


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
        self.samples: deque[Sample] = deque(maxlen=KEPT)
        self._rates: dict[str, _Rate] = {}

    def sample(self, instances: Mapping[str, Scraped], now: float) -> None:
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

    async def run(self, instances: Mapping[str, Scraped]) -> None:
        """Samples for ever, at full multiples of the interval: several gateways' samples then stand side by side."""
        while True:
            tick = (time.time() // INTERVAL_S + 1) * INTERVAL_S
            await asyncio.sleep(max(0.0, tick - time.time()) + EARLY_S)
            self.sample(instances, tick)
