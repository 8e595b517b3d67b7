"""The calls of CUDA's driver, in the form in which cuda.bindings takes and answers them, over memory of the host."""

from __future__ import annotations

import sys
from collections.abc import Callable
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from loadtest.models.mapped_memory import HostDriver
from weightsync.vllm_engine.device.mapping import CudaDriver, Driver, DriverError, Memory, Range, RemapUnavailable


class Status(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2


class Bindings:
    """As `cuda.bindings.driver`: each call answers (status, values...). Enumerations are their own names here."""

    CUresult = Status
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE="device")
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED="pinned")
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE="read and write")
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_RECOMMENDED="recommended")
    CUdevice_attribute = SimpleNamespace(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED="maps")

    def __init__(self, *, maps: int = 1) -> None:
        self.host, self._maps, self.context, self.room = HostDriver(), maps, 0, 100

    def CUmemAllocationProp(self) -> Any:
        return SimpleNamespace(location=SimpleNamespace())

    CUmemAccessDesc = CUmemAllocationProp

    def cuCtxGetCurrent(self) -> Any:
        return Status.CUDA_SUCCESS, self.context

    def cuDeviceGet(self, ordinal: int) -> Any:
        return Status.CUDA_SUCCESS, f"device {ordinal}"

    def cuDevicePrimaryCtxRetain(self, device: str) -> Any:
        return Status.CUDA_SUCCESS, int(device.split()[1]) + 7

    def cuCtxSetCurrent(self, context: int) -> Any:
        self.context = context
        return (Status.CUDA_SUCCESS,)

    def cuDeviceGetAttribute(self, attribute: str, device: int) -> Any:
        assert (attribute, device) == ("maps", 3)
        return Status.CUDA_SUCCESS, self._maps

    def cuMemGetAllocationGranularity(self, kind: Any, option: str) -> Any:
        self._is_ours(kind)
        assert option == "recommended"
        return Status.CUDA_SUCCESS, self.host.granularity

    def cuMemAddressReserve(self, nbytes: int, alignment: int, address: int, flags: int) -> Any:
        assert (alignment, address, flags) == (0, 0, 0)
        return Status.CUDA_SUCCESS, self.host.reserve(nbytes)

    def cuMemAddressFree(self, address: int, nbytes: int) -> Any:
        return self._answer(self.host.free, address, nbytes)

    def cuMemCreate(self, nbytes: int, kind: Any, flags: int) -> Any:
        self._is_ours(kind)
        assert flags == 0
        if not self.room:
            return Status.CUDA_ERROR_OUT_OF_MEMORY, None
        self.room -= 1
        return Status.CUDA_SUCCESS, self.host.create(nbytes)

    def cuMemRelease(self, handle: int) -> Any:
        return self._answer(self.host.release, handle)

    def cuMemMap(self, address: int, nbytes: int, offset: int, handle: int, flags: int) -> Any:
        assert (offset, flags) == (0, 0)
        return self._answer(self.host.map, address, nbytes, handle)

    def cuMemSetAccess(self, address: int, nbytes: int, access: list[Any], count: int) -> Any:
        (one,) = access
        assert (count, one.flags, one.location.type, one.location.id) == (1, "read and write", "device", 3)
        return self._answer(self.host.allow, address, nbytes)

    def cuMemUnmap(self, address: int, nbytes: int) -> Any:
        return self._answer(self.host.unmap, address, nbytes)

    def _is_ours(self, kind: Any) -> None:
        assert (kind.type, kind.location.type, kind.location.id) == ("pinned", "device", 3)

    def _answer(self, call: Callable[..., None], *arguments: int) -> tuple[Status]:
        try:
            call(*arguments)
        except DriverError:
            return (Status.CUDA_ERROR_INVALID_VALUE,)
        return (Status.CUDA_SUCCESS,)


def of_bindings() -> CudaDriver:
    return CudaDriver(torch.device("cuda", 3))


@pytest.fixture
def bindings(monkeypatch: pytest.MonkeyPatch) -> Bindings:
    found = Bindings()
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", found)  # type: ignore[arg-type]
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(CudaDriver, "bytes_at", lambda _, address, nbytes: found.host.bytes_at(address, nbytes))
    return found


@pytest.fixture(params=["model", "bindings", pytest.param("device", marks=pytest.mark.gpu)])
def driver(request: pytest.FixtureRequest) -> Driver:
    if request.param == "bindings":
        request.getfixturevalue("bindings")
        return of_bindings()
    return HostDriver() if request.param == "model" else CudaDriver(torch.device("cuda"))


def test_a_range_is_mapped_as_a_whole(driver: Driver) -> None:
    page = driver.granularity
    one, two = (Memory(driver, [page, 2 * page]) for _ in range(2))
    one.data.fill_(1)
    two.data.fill_(2)
    place = Range(driver, one)
    assert bool((place.data == 1).all())
    driver.wait()
    place.show(two, one)
    assert bool((place.data == 2).all())
    place.data.fill_(3)
    assert bool((two.data == 3).all())
    place.show(one, two)
    assert bool((place.data == 1).all())


def test_memory_is_given_back(bindings: Bindings) -> None:
    ours, host = of_bindings(), bindings.host
    assert ours.granularity == host.granularity
    memory = Memory(ours, [ours.granularity] * 2)
    place = Range(ours, memory)
    assert len(host.handles) == 2
    del memory, place
    assert (host.handles, host.mapped, host.reserved) == ({}, {}, {})


def test_a_thread_without_a_context_gets_torchs(bindings: Bindings) -> None:
    ours = of_bindings()
    bindings.context = 0
    ours.reserve(bindings.host.granularity)
    assert bindings.context == 10


def test_what_the_driver_refuses_is_told(bindings: Bindings) -> None:
    ours = of_bindings()
    with pytest.raises(DriverError, match="cuMemUnmap"):
        ours.unmap(4096, bindings.host.granularity)
    bindings.room = 1
    with pytest.raises(torch.OutOfMemoryError):
        Memory(ours, [bindings.host.granularity] * 2)
    assert not bindings.host.handles, "what it got before is given back"


def test_a_device_that_maps_nothing_is_told(bindings: Bindings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", Bindings(maps=0))  # type: ignore[arg-type]
    with pytest.raises(RemapUnavailable, match="does not map memory"):
        of_bindings()
