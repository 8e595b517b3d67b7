"""How the memory of a device is divided: weights, copies of them for swaps, scratch, steps and the KV cache.

Arithmetic alone, in bytes and without torch: a worker asks before it takes memory, and `hotswap doctor` before a server
is started.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

COPIES_ENV = "HOTSWAP_DEVICE_COPIES"
MOST_COPIES = 3  # live, previous, staged
# For each number of copies: the largest share of the room that the weights and these copies may take.
SHARES = {3: 0.55, 2: 0.65, 1: 0.8}
UTILIZATION = 0.92  # vLLM's default of --gpu-memory-utilization
STEPS = 16  # steps and graphs are counted with a 16th of the room
SCRATCH = 3  # a layer as it is loaded, as it is processed, and what its processing takes besides


@dataclass(frozen=True)
class Room:
    """The memory that one instance has on a device for its weights, copies, scratch, steps and KV cache together.

    `kv_cache`: bytes that the KV cache is to have (--kv-cache-memory-bytes); None: whatever the rest leaves.
    """

    nbytes: int
    kv_cache: int | None = None

    @staticmethod
    def of(
        total: int, free: int, weights: int = 0, *, utilization: float = UTILIZATION, kv_cache: int | None = None
    ) -> Room:
        """Of a device of `total` bytes: the instance's share, or what other processes leave of it if that is less.

        `free`: what no process holds now; `weights`: what the instance holds already.
        """
        return Room(max(0, min(int(utilization * total), free + weights)), kv_cache)

    @property
    def steps(self) -> int:
        """The bytes that steps and graphs are counted with."""
        return self.nbytes // STEPS

    def copies(self, weights: int, scratch: int = 0) -> int:
        """How many copies of `weights` fit, at most `MOST_COPIES`.

        They leave a KV cache of a fixed size what it is to have, and another one its share.
        """
        room = self.nbytes - scratch
        if self.kv_cache is not None:
            fit = (room - self.kv_cache - self.steps) // max(1, weights) - 1
            return max(0, min(MOST_COPIES, fit))
        return next((n for n, share in SHARES.items() if (1 + n) * weights <= share * room), 0)

    def left(self, weights: int, copies: int, scratch: int = 0) -> int:
        """The bytes that the KV cache gets beside so many copies; negative where they do not fit."""
        return self.nbytes - self.steps - scratch - (1 + copies) * weights


def wanted_copies(environ: Mapping[str, str] = os.environ) -> int | None:
    """The number in HOTSWAP_DEVICE_COPIES; None: as many as fit. Raises ValueError."""
    text = environ.get(COPIES_ENV, "auto")
    if text == "auto":
        return None
    if text not in [str(n) for n in range(MOST_COPIES + 1)]:
        raise ValueError(f"{COPIES_ENV}={text!r}: say auto, or how many versions lie on the device (0 to 3)")
    return int(text)
