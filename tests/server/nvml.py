"""NVML's answers, in the place of its module, and the hosts that they describe."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from weightsync.vllm_engine.gpus import Gpu, Gpus

GIB = 1 << 30


class NVMLError(Exception):
    """The base of NVML's errors."""


class Nvml:
    """A host whose GPUs have these UUIDs, each with its parts. `why_none`: the driver does not answer; `sized`: it says
    how much memory there is."""

    NVMLError = NVMLError

    def __init__(
        self, uuids: Sequence[str] = (), parts: Sequence[Sequence[str]] = (), why_none: str = "", *, sized: bool = True
    ) -> None:
        self._uuids, self._parts, self._why_none, self._sized = uuids, parts, why_none, sized
        self.opened = 0

    def nvmlInit(self) -> None:
        if self._why_none:
            raise NVMLError(self._why_none)
        self.opened += 1

    def nvmlShutdown(self) -> None:
        self.opened -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.95.05"

    def nvmlDeviceGetCount(self) -> int:
        return len(self._uuids)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return self._uuids[index]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: str) -> int:
        if not self._parts:
            raise NVMLError("Not Supported")
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: str, number: int) -> str:
        parts = self._parts[self._uuids.index(handle)]
        if number >= len(parts):
            raise NVMLError("Not Found")
        return parts[number]

    def nvmlDeviceGetUUID(self, handle: str) -> str:
        return handle

    def nvmlDeviceGetName(self, handle: str) -> str:
        return "NVIDIA H100 80GB HBM3"

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        if not self._sized:
            raise NVMLError("Not Supported")
        return SimpleNamespace(total=80 * GIB, free=79 * GIB)


def of(*uuids: str, free: int = 79 * GIB, driver: str = "580.95.05") -> Gpus:
    """A host with whole H100s of these UUIDs."""
    found = [Gpu(index, uuid, "NVIDIA H100 80GB HBM3", 80 * GIB, free) for index, uuid in enumerate(uuids)]
    return Gpus(tuple(found), driver)


def seven() -> Gpus:
    """A host with seven."""
    return of("GPU-8a", "GPU-51", "GPU-99", "GPU-03", "GPU-04", "GPU-05", "GPU-06")
