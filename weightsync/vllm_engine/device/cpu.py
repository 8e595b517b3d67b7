"""Staging on a CPU: versions lie in shared memory, where all instances of the host run them; commits point at them."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from weightsync.format.fingerprint import Words
from weightsync.memory.receiver import SlotReader
from weightsync.vllm_engine.device.generation import Generation, Memory
from weightsync.vllm_engine.device.pacing import CpuPacer, Staging
from weightsync.vllm_engine.device.pool import LayoutPool
from weightsync.vllm_engine.model.layout import Layout, words_of

VERSIONS_HELD = 3  # live, previous and staged: one layout slot each, shared by all instances of the host
PIECE_NBYTES = 1 << 20  # a piece is digested, copied and summed while it is in the cache


class Cpu:
    """Layout slots in shared memory, and commits that change references."""

    device = twin = torch.device("cpu")
    replaces = True
    piece_nbytes = PIECE_NBYTES
    digesting_threads = 0  # bytes are digested while they are in the cache
    generation = Generation

    def __init__(self) -> None:
        self._pool: LayoutPool | None = None

    def pacer(self, model: torch.nn.Module, staging: Staging) -> CpuPacer:
        return CpuPacer(model, staging)

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
