"""The GPUs of a host, as NVML tells of them: CUDA is not initialised, and CUDA_VISIBLE_DEVICES has no effect."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU, or with a `uuid` that begins with "MIG-" a part of one; `index` is that of the whole GPU.

    `nbytes` is its memory, `free_nbytes` what no process has of it now; both are 0 where the driver does not say.
    """

    index: int
    uuid: str
    name: str
    nbytes: int
    free_nbytes: int

    @property
    def is_part(self) -> bool:
        return self.uuid.startswith("MIG-")


@dataclass(frozen=True, slots=True)
class Gpus:
    """The GPUs that NVML sees: whole ones by index, each before its parts. `why_none` is "" unless it sees none."""

    devices: tuple[Gpu, ...]
    driver: str = ""
    why_none: str = ""

    def named(self, name: str) -> Gpu | None:
        """The one that a name in CUDA_VISIBLE_DEVICES means, if vLLM takes it: an index, or a whole UUID."""
        return next((gpu for gpu in self.devices if name == gpu.uuid or name == str(gpu.index)), None)

    def by_uuid(self, bare: str) -> Gpu | None:
        """The one whose UUID, without what is before its first dash, is `bare`, as CUDA gives it."""
        return next((gpu for gpu in self.devices if gpu.uuid.partition("-")[2] == bare), None)


def look() -> Gpus | None:
    """Ask NVML now; None where nvidia-ml-py is not installed, so that nothing is known."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        try:
            found = tuple(_found(pynvml))
            return Gpus(found, pynvml.nvmlSystemGetDriverVersion(), "" if found else "the driver has no GPU")
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        return Gpus((), why_none=f"NVML: {error}")


def of_device(bare: str) -> tuple[str, int | None]:
    """(UUID, index) of the device that CUDA tells of by this UUID, without "GPU-" or "MIG-"; None: NVML knows none."""
    seen = look()
    gpu = seen.by_uuid(bare) if seen is not None else None
    return (gpu.uuid, gpu.index) if gpu is not None else (f"GPU-{bare}", None)


def _found(nvml: Any) -> Iterator[Gpu]:
    for index in range(nvml.nvmlDeviceGetCount()):
        whole = nvml.nvmlDeviceGetHandleByIndex(index)
        yield _gpu(nvml, index, whole)
        for part in _parts(nvml, whole):
            yield _gpu(nvml, index, part)


def _parts(nvml: Any, whole: Any) -> Iterator[Any]:
    try:
        count = nvml.nvmlDeviceGetMaxMigDeviceCount(whole)
    except nvml.NVMLError:  # it cannot be divided
        return
    for number in range(count):
        try:
            yield nvml.nvmlDeviceGetMigDeviceHandleByIndex(whole, number)
        except nvml.NVMLError:  # there are fewer
            return


def _gpu(nvml: Any, index: int, handle: Any) -> Gpu:
    uuid, name = nvml.nvmlDeviceGetUUID(handle), nvml.nvmlDeviceGetName(handle)
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    except nvml.NVMLError:  # its memory is the host's
        return Gpu(index, uuid, name, 0, 0)
    return Gpu(index, uuid, name, int(memory.total), int(memory.free))
