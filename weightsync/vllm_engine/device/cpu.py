"""Staging on a CPU: versions lie in shared memory, where all instances of the host run them; commits point at them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from weightsync.format.fingerprint import Words
from weightsync.memory.receiver import SlotReader
from weightsync.vllm_engine.device.generation import Generation, Memory, Pace
from weightsync.vllm_engine.device.pool import LayoutPool
from weightsync.vllm_engine.model.layout import Layout, words_of

VERSIONS_HELD = 3  # live, previous and staged: one layout slot each, shared by all instances of the host
PIECE_NBYTES = 1 << 20  # a piece is digested, copied and summed while it is in the cache

# Decoding goes first. The stager gives the memory bus and the interpreter back for a moment with every piece (1 MB).
# The work takes 0.16 s of a core for 0.8 GB, the pauses about 0.5 s: staging goes at 1 GB/s beside 16 streams
# (loadtest/swaps/stall.py, 0.4 B), and at 4 to 5 GB/s with none (loadtest/swaps/staging.py).
YIELD_BYTES = 64 << 10
YIELD_RATE = 2e9  # bytes per second of pause
LONGEST_YIELD_S = 0.002
IDLE_AFTER_S = 0.05  # without a step: sampling, scheduling and a slow client's next request fit in between


class Pacer:
    """Called with the bytes that are about to be read; sleeps for as long as decoding is to be left alone.

    At full speed while nothing decodes, in small bites while something does.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._owed = 0
        self._running = False
        self._stepped_at = float("-inf")
        model.register_forward_pre_hook(self._begin)
        model.register_forward_hook(self._end, always_call=True)

    @property
    def decoding(self) -> bool:
        """Whether a step runs, or one ended a moment ago."""
        return self._running or time.monotonic() - self._stepped_at < IDLE_AFTER_S

    def __call__(self, nbytes: int) -> None:
        self._owed += nbytes
        if self._owed < YIELD_BYTES:
            return
        if self.decoding:
            time.sleep(min(LONGEST_YIELD_S, self._owed / YIELD_RATE))
        self._owed = 0

    def _begin(self, *_: Any) -> None:
        self._running = True

    def _end(self, *_: Any) -> None:
        self._running = False
        self._stepped_at = time.monotonic()


class Cpu:
    """Layout slots in shared memory, and commits that change references."""

    device = twin = torch.device("cpu")
    replaces = True
    piece_nbytes = PIECE_NBYTES
    digesting_threads = 0  # bytes are digested while they are in the cache
    generation = Generation

    def __init__(self) -> None:
        self._pool: LayoutPool | None = None

    def pacer(self, model: torch.nn.Module) -> Pace:
        return Pacer(model)

    def staging(self) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def reading(self, _reader: SlotReader) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def scratch(self) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    @property
    def copies(self) -> None:
        """References change: nothing is copied."""

    def reserve(self, model: torch.nn.Module) -> None:
        """Nothing: pages are taken as they are needed."""

    def arranged(self, layout: Layout, _running: Mapping[str, Sequence[torch.Tensor]]) -> Layout:
        """As it is: live tensors are pointed to wherever the staged ones lie."""
        return layout

    def acquire(self, directory: Path, layout: Layout, key: str) -> Memory:
        if self._pool is None or self._pool.fingerprint != layout.fingerprint:
            self._pool = LayoutPool(directory, layout.fingerprint, layout.nbytes)
        return self._pool.acquire(key)

    def prepare_swaps(self) -> None:
        if self._pool is not None:
            with contextlib.suppress(OSError):  # the directory went: so does this process
                self._pool.reserve(VERSIONS_HELD)

    def copy(self, target: torch.Tensor, source: Words) -> None:
        np.copyto(words_of(target).numpy(), source)

    def expected_flip_ms(self, _memory: Memory) -> None:
        """References change, whatever the size."""

    def vacate(self) -> None:
        """Nothing: the slots belong to all instances of the host."""
