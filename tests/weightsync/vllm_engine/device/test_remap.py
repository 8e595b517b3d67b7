"""Flips by remapping, driven on a CPU: memory that is really mapped and unmapped at the addresses of the weights.

`HostDriver` refuses what CUDA's driver refuses, and a read at an address that was taken away ends the process. The
calls of CUDA's driver are in the form in which cuda.bindings takes and answers them.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from loadtest.models.mapped_memory import HostDriver
from tests.weightsync.codes import refused
from tests.weightsync.vllm_engine.device.test_cuda import buffer, swap_and_roll_back
from weightsync.vllm_engine.device import remap
from weightsync.vllm_engine.device.cuda import DevicePool
from weightsync.vllm_engine.device.generation import Flips
from weightsync.vllm_engine.device.mapping import FLIP_ENV, CudaDriver, Driver, Memory, Range, handle_sizes
from weightsync.vllm_engine.device.remap import Remap, RemapGeneration, RemapPool, flips_by_remapping, without
from weightsync.vllm_engine.device.room import COPIES_ENV
from weightsync.vllm_engine.model.layout import Entry, Layout
from weightsync.vllm_engine.model.processing import Change
from weightsync.vllm_engine.staging.bundle import BASE, Bundle, HeldBundles, Piece
from weightsync.vllm_engine.staging.stager import staging_device

CPU = torch.device("cpu")
PAGE = HostDriver.granularity
ROWS, COLS = 3, 2 * PAGE // 4  # a weight that takes several handles, and does not fill the last one


class Model(nn.Module):
    """`counter` is what the model counts itself: no version has it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(COLS, ROWS, bias=False).requires_grad_(False)
        self.register_buffer("counter", torch.zeros(5))


class Staging:
    """Versions of a `Model`, every weight of which is the version's number."""

    def __init__(self, sets: int = 3, model: nn.Module | None = None) -> None:
        self.driver = HostDriver()
        self.place = Remap(CPU, copies=sets, driver=self.driver, largest_handle=2 * PAGE)
        self.model: Any = model if model is not None else Model()
        self.place.reserve(self.model)
        assert self.place._mapped is not None
        self.pool: RemapPool = self.place._mapped
        self.address = self.model.linear.weight.data_ptr()

    def layout(self, *also: torch.Tensor) -> Layout:
        weight = self.model.linear.weight
        plain = Layout((Entry("w", 0, "float32", tuple(weight.shape), 0, weight.nbytes),), {}, {}, weight.nbytes, "f")
        return self.place.arranged(plain, {"w": [weight, *also]})

    def stage(self, version: int, *also: torch.Tensor, changes: list[Change] | None = None) -> RemapGeneration:
        """`also`: other live tensors that get the weight."""
        layout, weight = self.layout(*also), self.model.linear.weight
        slot = self.place.acquire(Path(), layout, "")
        staged = layout.plain["w"].view(slot.data)
        staged.fill_(version)
        slot.seal("key", slot.notes)
        flips = Flips([(live, staged) for live in (weight, *also)], changes or [])
        return RemapGeneration(version, f"d{version}", flips, slot)

    def moved(self, tensor: torch.Tensor) -> bool:
        return 0 <= tensor.data_ptr() - self.pool.live.address < self.pool.live.nbytes

    def run(self, *generations: RemapGeneration) -> None:
        """Commit one after the other: each runs then."""
        for generation in generations:
            generation.commit()
            assert self.value() == generation.version

    def value(self) -> float:
        assert self.model.linear.weight.data_ptr() == self.address
        assert len(set(self.model.linear.weight.flatten().tolist())) == 1
        return float(self.model.linear.weight[0, 0])


@pytest.mark.parametrize("sets", [2, 3])
def test_versions_are_mapped_and_wait_where_there_is_room(sets: int) -> None:
    staging = Staging(sets)
    swap_and_roll_back(staging.stage, staging.value, sets)
    assert len(staging.driver.handles) == sets * len(staging.pool._sizes), "the live version is one of them"


def test_a_commit_copies_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory is what runs: a byte that is written there afterwards is seen at the address of the weights."""
    staging = Staging()
    one = staging.stage(1)
    monkeypatch.setattr(RemapPool, "_exchange", None)
    one.commit()
    buffer(one).data[:4].view(torch.float32)[0] = 9
    assert staging.model.linear.weight[0, 0] == 9


def test_the_device_is_idle_when_addresses_are_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    staging = Staging()
    one, order = staging.stage(1), []
    for name in ("wait", "unmap", "map"):
        call = getattr(staging.driver, name)
        monkeypatch.setattr(
            staging.driver, name, lambda *args, call=call, name=name: (order.append(name), call(*args))[1]
        )
    one.commit()
    assert order.index("wait") < order.index("unmap") < order.index("map")


@pytest.mark.parametrize(("call", "after"), [("map", 0), ("map", 1), ("allow", 0), ("unmap", 0), ("unmap", 1)])
def test_a_mapping_that_fails_halfway_leaves_the_old_version(
    monkeypatch: pytest.MonkeyPatch, call: str, after: int
) -> None:
    staging, held = Staging(), HeldBundles()
    one, two = staging.stage(1), staging.stage(2)
    bundle = Bundle(1, {BASE: Piece(one, {})})
    held.commit(bundle, None)
    whole, calls = getattr(staging.driver, call), iter(range(100))

    def broken(*arguments: Any) -> None:
        if next(calls) == after:
            raise RuntimeError("out of order")
        whole(*arguments)

    monkeypatch.setattr(staging.driver, call, broken)
    with pytest.raises(RuntimeError, match="out of order"):
        held.commit(Bundle(2, {BASE: Piece(two, {})}), None)
    assert staging.value() == 1
    assert held.live is bundle
    staging.run(two)


def test_a_flip_that_fails_behind_the_mapping_is_undone() -> None:
    staging, held = Staging(), HeldBundles()
    refuses: Any = MappingProxyType({})
    held.commit(Bundle(1, {BASE: Piece(staging.stage(1), {})}), None)
    broken = staging.stage(2, changes=[Change("x", refuses, "x", 1)])
    with pytest.raises(TypeError, match="item assignment"):
        held.commit(Bundle(2, {BASE: Piece(broken, {})}), None)
    assert staging.value() == 1


def test_a_version_on_the_host_changes_places_with_the_live_one() -> None:
    """A rollback while another version is staged in the only other set."""
    staging = Staging(sets=2)
    one, two = staging.stage(1), staging.stage(2)
    assert (buffer(one).on_device, buffer(two).on_device) == (True, False)
    staging.run(one, two)
    assert (buffer(one).on_device, buffer(two).on_device) == (False, True)
    three = staging.stage(3)
    assert buffer(three).on_device, "the set of the weights that were loaded is nobody's"
    staging.run(one, three, two, one)


def test_an_exchange_asks_for_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was refused memory when half of the bytes have changed places would leave weights of two versions."""
    staging = Staging(2)
    one, two, three = (staging.stage(version) for version in (1, 2, 3))
    one.commit()
    assert not buffer(three).on_device

    empty = torch.empty

    def out_of_memory(size: Any, **how: Any) -> torch.Tensor:
        if size == 0:
            return empty(size, **how)
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch, "empty", out_of_memory)
    monkeypatch.setattr(torch.Tensor, "clone", out_of_memory)
    staging.run(three, one, two)


@pytest.mark.parametrize("after", range(7))
def test_an_exchange_that_fails_halfway_is_undone(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """The copy that fails has written half of what it should have."""
    monkeypatch.setattr(remap, "PIECE_NBYTES", PAGE)
    staging, held = Staging(2), HeldBundles()
    one, two = staging.stage(1), staging.stage(2)
    held.commit(Bundle(1, {BASE: Piece(one, {})}), None)
    copy, calls = torch.Tensor.copy_, iter(range(100))
    with monkeypatch.context() as patch:

        def broken(target: torch.Tensor, source: torch.Tensor, **how: Any) -> torch.Tensor:
            if next(calls) != after:
                return copy(target, source, **how)
            copy(target[: len(target) // 2], source[: len(source) // 2])
            raise RuntimeError("out of order")

        patch.setattr(RemapPool, "_carry", lambda *_: None)
        patch.setattr(torch.Tensor, "copy_", broken)
        with pytest.raises(RuntimeError, match="out of order"):
            held.commit(Bundle(2, {BASE: Piece(two, {})}), None)
    assert staging.value() == 1
    staging.run(two, one)


def test_what_no_version_fills_goes_on_through_flips() -> None:
    """On sets, and with a version on the host."""
    staging = Staging(sets=2)
    versions = [staging.stage(version) for version in (1, 2)]
    for count, generation in enumerate([*versions, versions[0], versions[1]]):
        staging.model.counter += 1
        generation.commit()
        assert staging.model.counter.tolist() == [count + 1.0] * 5


def test_a_version_that_a_rollback_takes_meanwhile_does_not_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was chosen to make room, and its bytes are on their way to the host, when it becomes the live one again."""
    staging = Staging(sets=2)
    one = staging.stage(1)
    staging.run(one)
    two = staging.stage(2)
    staging.run(two)
    on_host = DevicePool._on_host

    def rolled_back(self: DevicePool, nbytes: int) -> torch.Tensor:
        if not buffer(one).pool._runs(buffer(one).data):
            one.commit()
        return on_host(self, nbytes)

    monkeypatch.setattr(DevicePool, "_on_host", rolled_back)
    three = staging.stage(3)
    assert buffer(one).on_device
    assert not buffer(three).on_device
    assert staging.value() == 1
    staging.run(two, three)


def test_a_worker_that_gives_memory_back_keeps_what_runs_and_its_versions() -> None:
    staging = Staging()
    one, two = staging.stage(1), staging.stage(2)
    staging.run(one, two)
    staging.place.vacate()
    gc.collect()
    assert len(staging.driver.handles) == len(staging.pool._sizes), "that of the live version"
    assert staging.value() == 2
    assert not buffer(one).on_device
    staging.run(one)
    assert buffer(staging.stage(3)).on_device, "awake, it takes the memory again"
    staging.run(two)


def test_memory_and_addresses_go_with_the_last_tensor() -> None:
    staging = Staging()
    driver, one = staging.driver, staging.stage(1)
    one.commit()
    weight = staging.model.linear.weight.data
    del staging, one
    gc.collect()
    assert weight[0, 0] == 1, "what is mapped stays as long as a tensor lies there"
    del weight
    gc.collect()
    assert (driver.handles, driver.mapped, driver.reserved) == ({}, {}, {})


def test_the_stall_of_a_commit_is_known_before_the_first_one() -> None:
    staging = Staging(sets=2)
    one, two = staging.stage(1), staging.stage(2)
    staging.pool.ms_per_byte[False] = 3.0
    expected = staging.place.expected_flip_ms(buffer(one))
    assert expected is not None
    assert expected > 0
    assert staging.place.expected_flip_ms(buffer(two)) == 3.0 * staging.pool.live.nbytes
    one.commit()
    one.commit()
    assert staging.pool.ms_per_byte[True] > 0, "a commit of what runs tells nothing"


# moving in ------------------------------------------------------------------------------------------------------------


class Holders(Model):
    """One weight that many hold."""

    def __init__(self) -> None:
        super().__init__()
        weight = self.linear.weight
        self.tied = nn.Linear(COLS, ROWS, bias=False)
        self.tied.weight = weight
        self.view = weight.data[1:]
        self.lists = [{"transposed": weight.data.t()}]
        self.closure = lambda: weight.data.sum()
        self.apart = [torch.ones(4)]  # which is no parameter, and is found


def test_everybody_who_holds_a_tensor_follows() -> None:
    model = Holders()
    outside = model.linear.weight.data[:, 0]
    before = model.linear.weight.clone()
    staging = Staging(model=model)
    assert torch.equal(model.linear.weight, before)
    assert torch.equal(outside, before[:, 0])
    staging.stage(4).commit()
    assert model.tied.weight is model.linear.weight
    for tensor in (model.view, model.lists[0]["transposed"], outside):
        assert bool((tensor == 4).all())
    assert float(model.closure()) == 4 * ROWS * COLS
    assert model.apart[0].tolist() == [1.0] * 4
    assert staging.moved(model.apart[0])


def test_what_something_outside_of_python_holds_stays_and_is_copied() -> None:
    model, x = Model(), torch.zeros(ROWS, COLS, requires_grad=True)
    y = x.exp()
    model.linear.weight = nn.Parameter(y.detach(), requires_grad=False)
    graph = y.sum()  # which keeps y in C++, for its gradient
    del y
    address = model.linear.weight.data_ptr()
    staging = Staging(model=model)
    assert staging.address == address
    assert staging.moved(model.counter)
    assert not staging.moved(model.linear.weight)
    one, two = staging.stage(1), staging.stage(2)
    staging.run(one, two, one)
    (gradient,) = torch.autograd.grad(graph, x)
    assert bool((gradient == 1).all())


def test_a_tensor_that_no_layer_held_or_of_another_form_is_refused_by_name() -> None:
    staging = Staging()
    layout, weight = staging.layout(), staging.model.linear.weight
    with refused("unsupported_model", rf"no layer held 'w'.*{FLIP_ENV}=copy"):
        staging.place.arranged(layout, {"w": [torch.zeros(ROWS, COLS)]})
    for live in (weight.data.t(), weight.data.view(torch.int32)):
        with refused("unsupported_model", "'w' is not served as it is published"):
            staging.place.arranged(layout, {"w": [live]})


def test_two_published_tensors_for_one_are_refused_by_name() -> None:
    staging = Staging()
    layout, weight = staging.layout(), staging.model.linear.weight
    both = Layout((*layout.entries, Entry("head", 0, "float32", (ROWS, COLS), 0, weight.nbytes)), {}, {}, 0, "f")
    with refused("unsupported_model", "'w' and 'head' are one tensor"):
        staging.place.arranged(both, {"w": [weight], "head": [weight]})


def test_a_second_running_tensor_of_one_source_gets_the_same() -> None:
    model, other = Model(), nn.Linear(COLS, ROWS, bias=False).requires_grad_(False)
    model.other = other
    staging = Staging(model=model)
    staging.stage(6, other.weight).commit()
    assert staging.value() == 6
    assert bool((other.weight == 6).all())


# settings and sizes ---------------------------------------------------------------------------------------------------


def test_the_way_of_flips_is_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FLIP_ENV, raising=False)
    assert not flips_by_remapping()
    monkeypatch.setenv(FLIP_ENV, "remap")
    assert flips_by_remapping()
    assert not isinstance(staging_device(CPU, 1.0), Remap), "a CPU points references"
    monkeypatch.setenv(FLIP_ENV, "swap")
    with pytest.raises(ValueError, match="say copy or remap"):
        flips_by_remapping()


def test_one_version_alone_cannot_be_flipped_to() -> None:
    with refused("unsupported_model", f"{COPIES_ENV}=1"):
        Remap(CPU, copies=1, driver=HostDriver()).reserve(Model())
    with refused("unsupported_model", "use more ranks"):  # this device has no memory at all
        Remap(CPU, driver=HostDriver()).reserve(Model())


def test_memory_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def room_for(sets: int) -> HostDriver:
        driver = HostDriver()
        create, left = driver.create, iter(range(sets))

        def limited(nbytes: int) -> int:
            if next(left, None) is None:
                raise torch.OutOfMemoryError
            return create(nbytes)

        monkeypatch.setattr(driver, "create", limited)
        return driver

    for sets, why in ((0, "missing to move"), (1, "no memory for a second")):
        driver = room_for(sets)
        with refused("unsupported_model", why):
            Remap(CPU, copies=3, driver=driver).reserve(Model())
    place = Remap(CPU, copies=3, driver=room_for(2))
    place.reserve(Model())
    assert COPIES_ENV in caplog.text


def test_handles_are_large_and_hold_all_of_it() -> None:
    assert handle_sizes(1, 4) == [4]
    assert handle_sizes(21, 4, 8) == [8, 8, 8]
    assert handle_sizes(17, 4, 8) == [8, 8, 4]
    assert handle_sizes(16, 4, 8) == [8, 8]
    assert handle_sizes(9, 4, 2) == [4, 4, 4], "the granularity counts"


def test_what_is_left_of_spans() -> None:
    assert list(without([(0, 10)], [])) == [(0, 10)]
    assert list(without([(0, 4096)], [(0, 1024), (2048, 4096)])) == [(1024, 2048)]
    assert list(without([(0, 100), (256, 300)], [])) == [(0, 300)], "padding between them is nobody's"
    assert list(without([(0, 100)], [(0, 100)])) == []


# CUDA's driver --------------------------------------------------------------------------------------------------------


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
        except RuntimeError:
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
    with pytest.raises(RuntimeError, match="cuMemUnmap"):
        ours.unmap(4096, bindings.host.granularity)
    bindings.room = 1
    with pytest.raises(torch.OutOfMemoryError):
        Memory(ours, [bindings.host.granularity] * 2)
    assert not bindings.host.handles, "what it got before is given back"


def test_a_device_that_maps_nothing_is_told(bindings: Bindings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", Bindings(maps=0))  # type: ignore[arg-type]
    with refused("unsupported_model", "does not map memory"):
        of_bindings()


def test_a_machine_without_bindings_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with refused("unsupported_model", "install cuda-bindings"):
        CudaDriver(torch.device("cuda"))
