"""The device's virtual memory: physical memory in handles, reserved addresses, and what is mapped where.

The driver is behind one small protocol, so that a model of it can take its place on a CPU.
"""

from __future__ import annotations

import importlib
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from weightsync.errors import EngineError, unsupported_model

FLIP_ENV = "HOTSWAP_DEVICE_FLIP"
LARGEST_HANDLE = 16 << 30  # 16 GiB in one are mapped in 0.8 ms on an H200, in handles of 1 GiB in 1.8 ms
Mapped = tuple[int, int]  # address and size of a handle


def remap_unavailable(why: str) -> EngineError:
    """This machine or this model cannot be flipped by remapping; the message says what to do."""
    return unsupported_model(f"{FLIP_ENV}=remap: {why}, or set {FLIP_ENV}=copy")


class Driver(Protocol):
    """Virtual memory as CUDA's driver manages it. `granularity`: sizes of handles are multiples of it."""

    @property
    def granularity(self) -> int: ...

    def reserve(self, nbytes: int, /) -> int:
        """An address from which on so many bytes are nobody else's; nothing is mapped there."""

    def free(self, address: int, nbytes: int, /) -> None:
        """Give reserved addresses back."""

    def create(self, nbytes: int, /) -> Any:
        """A handle of physical memory. Raises torch.OutOfMemoryError."""

    def release(self, handle: Any, /) -> None:
        """The memory goes when it is mapped nowhere any more."""

    def map(self, address: int, nbytes: int, handle: Any, /) -> None:
        """Put memory behind addresses. The device can use it from `allow` on."""

    def allow(self, address: int, nbytes: int, /) -> None:
        """Let the device read and write what is mapped there."""

    def unmap(self, address: int, nbytes: int, /) -> None:
        """Take away what `map` put there, as a whole."""

    def bytes_at(self, address: int, nbytes: int, /) -> torch.Tensor:
        """uint8 [nbytes] over mapped addresses."""

    def wait(self) -> None:
        """Until the device has done all that was queued."""


class CudaDriver:
    """cuda.bindings, on one device, in torch's context."""

    def __init__(self, device: torch.device) -> None:
        """Raises EngineError."""
        try:
            self._driver: Any = importlib.import_module("cuda.bindings.driver")
        except ImportError:
            raise remap_unavailable(
                "cuda.bindings is missing; install cuda-bindings of the release of CUDA that torch has"
            ) from None
        self._device = device if device.index is not None else torch.device("cuda", torch.cuda.current_device())
        torch.cuda.synchronize(self._device)  # torch makes its context, if it has not yet
        driver, location = self._driver, self._driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        if not self._call("cuDeviceGetAttribute", attribute, self._device.index):
            raise remap_unavailable("this device does not map memory; take another one")
        self._kind = driver.CUmemAllocationProp()
        self._kind.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._kind.location.type, self._kind.location.id = location, self._device.index
        self._access = driver.CUmemAccessDesc()
        self._access.location.type, self._access.location.id = location, self._device.index
        self._access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        option = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        self._granularity = int(self._call("cuMemGetAllocationGranularity", self._kind, option))

    @property
    def granularity(self) -> int:
        return self._granularity

    def reserve(self, nbytes: int) -> int:
        return int(self._call("cuMemAddressReserve", nbytes, 0, 0, 0))

    def free(self, address: int, nbytes: int) -> None:
        self._call("cuMemAddressFree", address, nbytes)

    def create(self, nbytes: int) -> Any:
        return self._call("cuMemCreate", nbytes, self._kind, 0)

    def release(self, handle: Any) -> None:
        self._call("cuMemRelease", handle)

    def map(self, address: int, nbytes: int, handle: Any) -> None:
        self._call("cuMemMap", address, nbytes, 0, handle, 0)

    def allow(self, address: int, nbytes: int) -> None:
        self._call("cuMemSetAccess", address, nbytes, [self._access], 1)

    def unmap(self, address: int, nbytes: int) -> None:
        self._call("cuMemUnmap", address, nbytes)

    def bytes_at(self, address: int, nbytes: int) -> torch.Tensor:
        class Foreign:
            __cuda_array_interface__ = {  # noqa: RUF012 - a protocol
                "shape": (nbytes,),
                "typestr": "|u1",
                "data": (address, False),
                "version": 3,
                "strides": None,
            }

        return torch.as_tensor(Foreign(), device=self._device)

    def wait(self) -> None:
        torch.cuda.synchronize(self._device)

    def _call(self, name: str, *arguments: Any) -> Any:
        """Call the driver. Returns the value behind its status, or None. Raises RuntimeError,
        torch.OutOfMemoryError."""
        self._enter()
        status, *values = getattr(self._driver, name)(*arguments)
        if status == self._driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            raise torch.OutOfMemoryError(f"{name}: the device has no memory left")
        if int(status):
            raise RuntimeError(f"{name}: the driver answers {status}")
        return values[0] if values else None

    def _enter(self) -> None:
        """A thread that has not used torch's context yet has none."""
        driver = self._driver
        if int(driver.cuCtxGetCurrent()[1]) == 0:
            context = driver.cuDevicePrimaryCtxRetain(driver.cuDeviceGet(self._device.index)[1])[1]
            driver.cuCtxSetCurrent(context)


class Range:
    """Reserved addresses, and the memory that is mapped there: all of it, or none.

    `data`: uint8 over the whole range. The addresses go when no tensor is left that lies there.
    """

    def __init__(self, driver: Driver, memory: Memory) -> None:
        """`memory` is what is mapped first."""
        self._driver, self._sizes = driver, memory.sizes
        self.nbytes = sum(self._sizes)
        self.address = driver.reserve(self.nbytes)
        self._mapped: list[Mapped] = []
        try:
            self._map(memory)
            self.data = driver.bytes_at(self.address, self.nbytes)
        except BaseException:
            _leave(driver, self.address, self.nbytes, self._mapped)
            raise
        _at_end(self.data, _leave, driver, self.address, self.nbytes, self._mapped)

    def show(self, memory: Memory, instead: Memory) -> None:
        """Map `memory` in the place of what is there; `instead` if that fails. The device must be idle.

        Raises RuntimeError.
        """
        try:
            self._unmap()
            self._map(memory)
        except BaseException:
            self._unmap()
            self._map(instead)
            raise

    def _map(self, memory: Memory) -> None:
        address = self.address
        for nbytes, handle in zip(memory.sizes, memory.handles, strict=True):
            self._driver.map(address, nbytes, handle)
            self._mapped.append((address, nbytes))
            address += nbytes
        self._driver.allow(self.address, self.nbytes)

    def _unmap(self) -> None:
        while self._mapped:
            self._driver.unmap(*self._mapped[-1])
            self._mapped.pop()


def _at_end(data: torch.Tensor, work: Callable[..., None], *arguments: Any) -> None:
    """When no tensor lies there any more; not when the process ends, which gives everything back."""
    weakref.finalize(data.untyped_storage(), work, *arguments).atexit = False


def _leave(driver: Driver, address: int, nbytes: int, mapped: list[Mapped]) -> None:
    """Unmap what is left in a range, and give its addresses back."""
    driver.wait()
    while mapped:
        driver.unmap(*mapped.pop())
    driver.free(address, nbytes)


class Memory:
    """Physical memory in handles, and the addresses at which it is written and read as long as it is there: `data`."""

    def __init__(self, driver: Driver, sizes: Sequence[int]) -> None:
        """Raises torch.OutOfMemoryError."""
        self.sizes, self.handles = sizes, list[Any]()
        try:
            for nbytes in sizes:
                self.handles.append(driver.create(nbytes))
            self.data = Range(driver, self).data
        finally:  # where it is mapped it stays
            if not hasattr(self, "data"):
                _release(driver, self.handles)
        _at_end(self.data, _release, driver, self.handles)


def _release(driver: Driver, handles: list[Any]) -> None:
    while handles:
        driver.release(handles.pop())


def handle_sizes(nbytes: int, granularity: int, largest: int = LARGEST_HANDLE) -> list[int]:
    """Sizes of the handles that hold `nbytes`: large ones, and the rest."""
    largest = max(granularity, largest // granularity * granularity)
    whole, rest = divmod(math.ceil(nbytes / granularity) * granularity, largest)
    return [largest] * whole + ([rest] if rest else [])
