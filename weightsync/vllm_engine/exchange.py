"""Generations on an accelerator: captured graphs hold the addresses of the live weights, so their contents change.

The version is staged into a buffer on the device; a commit exchanges it with the live tensors, on the device, between
two batches. What the buffer holds afterwards is the version before, so a rollback is the same exchange again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from .generation import Generation


@dataclass
class DeviceBuffer:
    """Stands in for a layout slot: uint8 [nbytes] on the device, owned by one worker."""

    data: torch.Tensor
    built: bool = False
    sums: dict[str, list[list[int]]] = field(default_factory=dict)

    def seal(self, _key: str, _sums: dict[str, list[list[int]]]) -> None:
        """The copies were queued by the staging thread; the commit must find them done."""
        if self.data.is_cuda:
            torch.cuda.synchronize(self.data.device)
        self.built = True

    def release(self) -> None:
        self.data = self.data.new_empty(0)


class DevicePool:
    """Hands out one buffer per staging; the allocator reuses what is released."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._nbytes, self._device = nbytes, device

    def acquire(self, _key: str) -> DeviceBuffer:
        return DeviceBuffer(torch.empty(self._nbytes, dtype=torch.uint8, device=self._device))


@dataclass
class ExchangeGeneration(Generation):
    """A generation whose commit exchanges contents; the object then holds the weights it displaced."""

    def commit(self) -> list[Any]:
        with torch.no_grad():
            for flip in self.flips:
                for name, staged in flip.parameters.items():
                    live = flip.module._parameters[name]
                    assert live is not None
                    before = live.data.clone()
                    live.data.copy_(staged.data)
                    staged.data.copy_(before)
        return []

    def displaced(self, live: Generation | None) -> Generation | None:
        if live is None:
            self.release()  # the weights the model was started with are nobody's version
            return None
        return ExchangeGeneration(live.version, live.digest, self.flips, self.slot, self.private, live.sums)
