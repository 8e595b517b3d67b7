"""Generations, whose commits flip references on a CPU and contents on an accelerator; and staging as on the latter,
driven on a CPU: buffers, the ring, and versions that move between device and host.

Those marked `gpu` need one: streams, graphs, and memory that the device reads.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from loadtest.gpu_day import engine
from tests.weightsync.codes import refused
from weightsync import Publisher, SlotReader
from weightsync.vllm_engine.device import cuda
from weightsync.vllm_engine.device.cuda import (
    CopyGeneration,
    Cuda,
    DeviceBuffer,
    DevicePool,
    Ring,
    require_memory,
    storage_nbytes,
)
from weightsync.vllm_engine.device.generation import Flips, Generation, build_flips
from weightsync.vllm_engine.device.room import COPIES_ENV, Room, wanted_copies
from weightsync.vllm_engine.model.layout import plan_layout, words_of
from weightsync.vllm_engine.model.placement import pair_parameters
from weightsync.vllm_engine.model.processing import GONE, Change
from weightsync.vllm_engine.staging.bundle import HeldBundles
from weightsync.vllm_engine.staging.stager import describe

CPU = torch.device("cpu")
DEVICES = [CPU, pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)]
NBYTES = 24


@pytest.fixture(params=DEVICES, ids=str)
def device(request: pytest.FixtureRequest) -> torch.device:
    found: torch.device = request.param
    return found


def linear(device: torch.device) -> nn.Linear:
    return nn.Linear(3, 2, bias=False, device=device).requires_grad_(False)


def staged(pool: DevicePool, module: nn.Linear, version: int) -> CopyGeneration:
    """A version whose every weight is its number."""
    buffer = pool.acquire(NBYTES)
    weight = buffer.data[:NBYTES].view(torch.float32).view(2, 3)
    weight.fill_(version)
    buffer.seal("key", buffer.notes)
    return CopyGeneration(version, f"d{version}", Flips([(module.weight, weight)]), buffer)


def value(module: nn.Linear) -> float:
    assert len(set(module.weight.flatten().tolist())) == 1
    return float(module.weight[0, 0])


# generations ----------------------------------------------------------------------------------------------------------

KINDS = [Generation, CopyGeneration]


def flips(module: nn.Linear, value: float) -> Flips:
    return Flips([(module.weight, torch.full((2, 3), value))])


def test_what_a_flip_replaced_is_handed_to_the_caller() -> None:
    module = linear(CPU)
    kernel = object()
    module.__dict__["kernel"] = "before"
    one = Generation(1, "d1", Flips(flips(module, 1.0).tensors, [Change("kernel", module.__dict__, "kernel", kernel)]))
    two = Generation(2, "d2", Flips([], [Change("kernel", module.__dict__, "kernel", GONE)]))
    before, former = one.commit()
    assert before.shape == (2, 3)
    assert former == "before"
    assert module.__dict__["kernel"] is kernel
    assert two.commit() == [kernel]
    assert "kernel" not in module.__dict__


@pytest.mark.parametrize("kind", KINDS)
def test_a_flip_that_failed_halfway_is_undone_by_the_version_before(kind: type[Generation]) -> None:
    """Staged weights never change, so committing the old version again puts all of it back."""

    refuses: Any = MappingProxyType({})
    module = linear(CPU)
    one, two = (kind(v, f"d{v}", flips(module, float(v))) for v in (1, 2))
    two.flips.changes.append(Change("broken", refuses, "broken", 1))
    one.commit()
    with pytest.raises(TypeError, match="item assignment"):
        two.commit()
    assert value(module) == 2
    one.commit()
    assert value(module) == 1


def two_layers(width: int = 2) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(2))).requires_grad_(False)


@pytest.mark.parametrize("kind", KINDS)
def test_a_tied_weight_is_flipped_once_for_both_of_its_modules(kind: type[Generation]) -> None:
    live, twin = two_layers(), two_layers()
    twin[1].weight = twin[0].weight
    assert {s.name: s.source for s in pair_parameters(live, twin)} == {"0.weight": "0.weight", "1.weight": "0.weight"}
    live[1].weight = live[0].weight
    address, holder = live[0].weight.data_ptr(), live[0].weight
    pairs = pair_parameters(live, twin)
    layout = plan_layout(pairs, CPU, 0, 1)
    for version in (1, 2, 1):
        data = torch.zeros(layout.nbytes, dtype=torch.uint8)
        layout.plain["0.weight"].view(data).fill_(version)
        found = build_flips(pairs, layout, data, {})
        assert len(found.tensors) == 1
        kind(version, "d", found).commit()
        assert value(live[0]) == value(live[1]) == version
        assert holder is live[0].weight, "holders of the tensor follow"
        assert (holder.data_ptr() == address) == (kind is CopyGeneration)


def test_a_tied_tensor_that_a_version_has_twice_is_refused_unless_both_are_equal() -> None:
    """The running model looks up and multiplies by one tensor: the head's bytes would be the embedding's, too."""
    live, twin = two_layers(), two_layers()
    live[1].weight = live[0].weight
    pairs = pair_parameters(live, twin)
    layout = plan_layout(pairs, CPU, 0, 1)
    data = torch.zeros(layout.nbytes, dtype=torch.uint8)
    for name in ("0.weight", "1.weight"):
        layout.plain[name].view(data).fill_(7)
    Generation(1, "d", build_flips(pairs, layout, data, {})).commit()
    assert value(live[0]) == 7
    layout.plain["1.weight"].view(data)[0, 0] = 8
    with refused("unsupported_model", r"'0.weight' and '1.weight' are one tensor"):
        build_flips(pairs, layout, data, {})


# buffers --------------------------------------------------------------------------------------------------------------


def buffer(generation: CopyGeneration) -> DeviceBuffer:
    assert isinstance(generation.slot, DeviceBuffer)
    return generation.slot


def swap_and_roll_back(stage: Callable[[int], CopyGeneration], runs: Callable[[], float], room: int) -> None:
    """Live, previous and staged: the one that was committed longest ago makes room for what is staged."""
    held: list[CopyGeneration] = []
    for version in range(1, 7):
        new = stage(version)
        assert buffer(new).on_device == (room > 0)
        new.commit()
        assert runs() == version
        held = [*held, new]
        if len(held) > 1:
            held[-2].commit()
            assert runs() == version - 1, "a rollback"
            new.commit()
            assert runs() == version
        if len(held) == 3:
            held.pop(0).release()
        assert sum(buffer(g).on_device for g in held) == min(room, len(held))


@pytest.mark.parametrize("copies", [0, 1, 2, 3])
def test_versions_wait_where_there_is_room(device: torch.device, copies: int) -> None:
    pool, module = DevicePool(device, copies), linear(device)
    address = module.weight.data_ptr()
    swap_and_roll_back(lambda version: staged(pool, module, version), lambda: value(module), copies)
    assert module.weight.data_ptr() == address


def test_failed_flips_leave_their_buffers_to_the_next_versions(device: torch.device) -> None:
    """Three of them: as many as there are buffers."""
    pool, module, held = DevicePool(device, 3), linear(device), HeldBundles()
    first = staged(pool, module, 1)
    held.commit(engine.bundle(1, first), None)
    for version in (2, 3, 4):
        broken = staged(pool, module, version)
        assert buffer(broken).on_device
        engine.breaks(broken)
        bundle = engine.bundle(version, broken)
        with pytest.raises(engine.FlipRefused):
            held.commit(bundle, bundle)
        assert value(module) == 1
        for generation in held.sweep()[0]:
            generation.release()
    assert len(pool._held) == 1
    assert pool._held[0] is buffer(first)


def test_the_stall_of_a_commit_is_known_before_it(device: torch.device) -> None:
    """By what the last copies took: from the host and on the device."""
    place, module = Cuda(device, copies=1), linear(device)
    place.reserve(module)
    pool = place._pool
    assert pool is not None
    one, two = staged(pool, module, 1), staged(pool, module, 2)
    assert (buffer(one).on_device, buffer(two).on_device) == (True, False)
    if device.type == "cuda":
        assert pool.ms_per_byte[True] > 0, "measured when the memory was taken"
    else:
        assert place.expected_flip_ms(buffer(one)) is None
    one.commit()
    pool.ms_per_byte = {True: 0.5, False: 3.0}
    assert place.expected_flip_ms(buffer(one)) == 0.5 * buffer(one).data.numel()
    assert place.expected_flip_ms(buffer(two)) == 3.0 * buffer(two).data.numel()
    two.commit()
    assert pool.ms_per_byte[False] != 3.0


def test_a_buffer_that_was_given_back_is_used_again(device: torch.device) -> None:
    pool, module = DevicePool(device, 1), linear(device)
    first = staged(pool, module, 1)
    address = buffer(first).data.data_ptr()
    first.release()
    first.release()
    second = staged(pool, module, 2)
    assert buffer(second).data.data_ptr() == address
    third = staged(pool, module, 3)
    assert not buffer(third).on_device, "the second one was never committed: it is what a commit waits for"
    for generation in (second, third, second):
        generation.commit()
        assert value(module) == generation.version


def test_a_layout_that_grew_gets_a_larger_buffer(device: torch.device) -> None:
    pool = DevicePool(device, 1)
    pool.reserve(8)
    small = pool.acquire(8)
    small.release()
    large = pool.acquire(1000)
    assert large.on_device
    assert large.data.numel() >= 1000


@pytest.mark.parametrize("copies", [0, 1, 2, 3])
def test_host_memory_is_taken_before_the_first_version(monkeypatch: pytest.MonkeyPatch, copies: int) -> None:
    """Of the three versions that a worker holds: pinned later, it would stop the steps for as long as that takes."""
    taken: list[int] = []
    on_host = cuda.on_host
    monkeypatch.setattr(cuda, "on_host", lambda nbytes, device: (taken.append(nbytes), on_host(nbytes, device))[1])
    pool, module = DevicePool(CPU, copies), linear(CPU)
    pool.reserve(2 * NBYTES)
    nbytes = 2 * NBYTES if copies else NBYTES  # a buffer of the device moves there as a whole

    def stage(version: int) -> CopyGeneration:
        generation = staged(pool, module, version)
        assert taken == [nbytes] * (3 - copies)
        return generation

    swap_and_roll_back(stage, lambda: value(module), copies)


def test_what_the_device_cannot_hold_is_left_to_the_host(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Memory that somebody else took meanwhile costs speed, and no swap."""
    empty = torch.empty

    def out_of_memory(*args: object, **kwargs: object) -> torch.Tensor:
        if "device" in kwargs:
            raise torch.OutOfMemoryError
        return empty(*args, **kwargs)  # type: ignore[call-overload, no-any-return]

    pool, module = DevicePool(CPU, 2), linear(CPU)
    monkeypatch.setattr(cuda.torch, "empty", out_of_memory)
    generation = staged(pool, module, 1)
    assert COPIES_ENV in caplog.text
    assert not buffer(generation).on_device
    generation.commit()
    assert value(module) == 1
    caplog.clear()
    assert not buffer(staged(pool, module, 2)).on_device
    assert not caplog.text, "it is said once"
    monkeypatch.setattr(cuda.torch, "empty", empty)
    assert buffer(staged(pool, module, 3)).on_device, "the memory came back"


@pytest.mark.parametrize(("allocated", "scratch"), [(200, 0), (100, 100)])
def test_a_buffer_leaves_room_to_what_else_runs_on_the_device(
    monkeypatch: pytest.MonkeyPatch, allocated: int, scratch: int
) -> None:
    """Torch is not even asked: before it gives up it returns what it keeps for the steps. Scratch is no room."""
    device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (500, 3200))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 300)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: allocated)
    require_memory(device, 500, apart=scratch)
    with pytest.raises(torch.OutOfMemoryError):
        require_memory(device, 501, apart=scratch)
    require_memory(CPU, 1 << 60)


def test_copies_are_counted_against_what_the_instance_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Cuda(CPU, share=0.45)
    monkeypatch.setattr(place, "_stream", object())
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (70, 80))
    assert (place._room(10), Cuda(CPU)._room(10)) == (Room(36), Room(0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (20, 80))
    assert place._room(10) == Room(30), "another process has the rest"


def test_scratch_is_one_pool_until_the_worker_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch gives back what it keeps outside of a pool whenever vLLM measures, and the KV cache gets it."""
    used: list[object] = []

    def use(pool: object, _device: torch.device) -> contextlib.AbstractContextManager[None]:
        used.append(pool)
        return contextlib.nullcontext()

    monkeypatch.setattr(torch.cuda, "MemPool", object)
    monkeypatch.setattr(torch.cuda, "use_mem_pool", use)
    place = Cuda(CPU, copies=1)
    with place.scratch():
        assert not used, "a CPU has none"
    monkeypatch.setattr(place, "_stream", object())
    for _ in range(2):
        with place.scratch():
            pass
    place.vacate()
    with place.scratch():
        pass
    assert used[0] is used[1]
    assert used[2] is not used[0]


def test_what_a_staging_takes_is_there_before_the_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the KV cache gets it. Sums of a piece are tried beside a layer, for their tables and the kernel."""
    place, model, steps = Cuda(CPU, copies=1), linear(CPU), list[str]()
    monkeypatch.setattr(place, "_stream", SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "MemPool", object)
    monkeypatch.setattr(torch.cuda, "use_mem_pool", lambda *_: contextlib.nullcontext())
    kept = iter([100, 100 + cuda.PIECE_NBYTES])
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: next(kept))
    monkeypatch.setattr(cuda, "find", lambda _: {"layers.0.experts": model})

    def summed(piece: torch.Tensor) -> None:
        steps.append(f"sum of {piece.nbytes >> 20} MiB")

    monkeypatch.setattr(cuda, "device_rectangle", summed)
    monkeypatch.setattr(cuda, "require_memory", lambda _device, nbytes, *_: steps.append(f"{nbytes} bytes"))
    monkeypatch.setattr(DevicePool, "measure_host", lambda _: None)
    monkeypatch.setattr(DevicePool, "measure", lambda _: None)
    place.reserve(model)
    layer, weights = 3 * model.weight.nbytes, storage_nbytes(model)
    assert steps == [f"{layer} bytes", "sum of 32 MiB", f"{weights} bytes"]
    assert place._pool is not None
    assert place._pool.scratch == cuda.PIECE_NBYTES, "no slab can lie there"


def test_a_worker_says_how_many_copies_it_has_room_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beside the log, whose level hides what is no warning."""
    place = Cuda(CPU, copies=2)
    assert place.copies == 0
    place.reserve(linear(CPU))
    assert place.copies == 2
    assert not capsys.readouterr().err, "a CPU points references"
    monkeypatch.setattr(place, "_stream", object())
    place._tell(5 << 20)
    assert "2 versions of 5 MB have room" in capsys.readouterr().err


def test_a_staging_without_device_memory_says_what_helps() -> None:
    told = describe(
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB. See documentation for more")
    )
    assert told["code"] == "staging_failed"
    assert "lower --gpu-memory-utilization (CUDA out of memory. Tried to allocate 2.00 MiB)" in (told["message"] or "")


@pytest.mark.parametrize("fails", [False, True])
def test_a_staging_leaves_no_work_behind(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """Its ring may be taken away, and its version be committed, as soon as its thread has ended."""
    place, waited = Cuda(CPU), list[bool]()
    monkeypatch.setattr(place, "_stream", SimpleNamespace(synchronize=lambda: waited.append(True)))
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    with contextlib.suppress(RuntimeError), place.staging():
        if fails:
            raise RuntimeError
    assert waited


def test_a_sleeping_worker_gives_the_memory_back_and_keeps_its_versions(device: torch.device) -> None:
    pool, module = DevicePool(device, 3), linear(device)
    one, two = staged(pool, module, 1), staged(pool, module, 2)
    one.commit()
    two.commit()
    pool.vacate()
    assert not buffer(one).on_device
    assert not buffer(two).on_device
    one.commit()
    assert value(module) == 1
    two.commit()
    assert value(module) == 2
    assert buffer(staged(pool, module, 3)).on_device, "awake, it takes the memory again"


def test_a_full_device_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft's buffers are asked for when the KV cache has its part: what cannot be had must not end the worker."""

    def refused(_device: torch.device) -> float:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(cuda, "ms_per_byte_from_host", refused)
    pool, module = DevicePool(CPU, 0), linear(CPU)
    pool.measure_host()
    assert pool.ms_per_byte == {}
    staged(pool, module, 1).commit()
    assert pool.ms_per_byte[False] > 0


def test_a_version_moves_into_host_memory_that_is_larger(device: torch.device) -> None:
    """Buffers that are taken after a sleep are as large as a version, those of the start as large as the model."""
    pool, module = DevicePool(device, 1), linear(device)
    pool.reserve(2 * NBYTES)
    first = staged(pool, module, 1)
    pool.vacate()
    first.release()
    second = staged(pool, module, 2)
    pool.vacate()
    second.commit()
    assert value(module) == 2


def test_a_version_is_not_moved_while_it_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rollback to the version that makes room for the next one: the buffer is not written to before it is through."""
    pool, module = DevicePool(CPU, 1), linear(CPU)
    one = staged(pool, module, 1)
    copying, go_on = threading.Event(), threading.Event()
    copy = CopyGeneration._copy

    def slow(self: CopyGeneration) -> float:
        copying.set()
        assert go_on.wait(30)
        return copy(self)

    monkeypatch.setattr(CopyGeneration, "_copy", slow)
    committing = threading.Thread(target=one.commit)
    buffer(one).committed = 1
    committing.start()
    assert copying.wait(30)
    staging = threading.Thread(target=staged, args=(pool, module, 2))
    staging.start()
    staging.join(0.2)
    assert staging.is_alive(), "it waits for the commit"
    go_on.set()
    committing.join(30)
    staging.join(30)
    assert value(module) == 1


def test_a_wait_for_a_piece_leaves_the_core_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, bool]] = []

    def event(**how: bool) -> SimpleNamespace:
        made.append(how)
        return SimpleNamespace(record=lambda _: None, synchronize=lambda: None)

    monkeypatch.setattr(torch.cuda, "Event", event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: None)
    monkeypatch.setattr(cuda, "on_host", lambda nbytes, _: torch.empty(nbytes, dtype=torch.uint8))
    ring, target = Ring(torch.device("cuda"), nbytes=16), torch.zeros(8, 8, dtype=torch.int16)
    ring.copy(target, np.ones((8, 8), np.int16))
    assert bool(target.all())
    assert made == [{"blocking": True}] * cuda.PIECES


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8])
@pytest.mark.parametrize("shape", [(7, 33), (1, 5000), (300, 2), (0, 4)])
def test_the_ring_copies_any_matrix(device: torch.device, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """Pieces that are smaller than it, and larger; parts of rows that lie apart."""
    ring = Ring(device, nbytes=512)
    for seed in range(3):
        words = torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
        wide = torch.zeros(shape[0], shape[1] + 6, dtype=dtype, device=device)
        source = words_of(words).numpy().copy()
        ring.copy(wide[:, 3 : 3 + shape[1]], source)
        source[:] = 0  # the ring has taken what it needs
        assert torch.equal(wide[:, 3 : 3 + shape[1]].cpu(), words)
        assert not wide[:, :3].any()
        assert not wide[:, 3 + shape[1] :].any()


@pytest.mark.parametrize("part", [False, True])
def test_the_device_reads_a_slot_itself_if_all_of_it_is_there(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch, part: bool
) -> None:
    """And what lies elsewhere goes through the ring, as everything does when no slot is read."""
    publisher.publish({"w": torch.randn(64, 8)}, activate=False)
    place, rung = Cuda(CPU), list[int]()
    monkeypatch.setattr(place._ring, "copy", lambda _, source: rung.append(source.nbytes))
    with SlotReader.open(publisher.versions()[-1].slot) as reader:
        monkeypatch.setattr(reader, "is_part", part)
        words, target = np.frombuffer(reader.buffer("w"), np.int16).reshape(64, 16), torch.zeros(64, 8)
        with place.reading(reader):
            place.copy(target, words)
            assert bool(rung) is part
            assert torch.equal(target, torch.zeros(64, 8)) is part
            place.copy(target, words.copy())
        place.copy(target, words)
        assert rung == [words.nbytes] * (3 if part else 2)
        assert part or np.array_equal(target.view(torch.int16).numpy(), words)


def test_how_many_copies_fit() -> None:
    room = Room(80)
    assert [room.copies(nbytes) for nbytes in (11, 12, 17, 18, 32, 33)] == [3, 2, 2, 1, 1, 0]
    assert room.copies(11, scratch=2) == 2


def test_copies_leave_a_kv_cache_of_a_fixed_size_what_it_is_to_have() -> None:
    """Of 160 bytes steps are counted with 10: 150 are for the KV cache, the weights and their copies."""
    assert [Room(160, kv_cache=cache).copies(20) for cache in (70, 71, 91, 111, 131)] == [3, 2, 1, 0, 0]
    assert Room(160, kv_cache=30).copies(20, scratch=41) == 2
    assert (Room(160).left(20, 3), Room(160).left(20, 3, 41), Room(160).left(40, 3)) == (70, 29, -10)


def test_the_number_of_copies_is_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(COPIES_ENV, raising=False)
    assert wanted_copies() is None
    monkeypatch.setenv(COPIES_ENV, "2")
    assert wanted_copies() == 2
    monkeypatch.setenv(COPIES_ENV, "4")
    with pytest.raises(ValueError, match="say auto, or how many"):
        Cuda(CPU)


def test_tied_weights_count_once() -> None:
    model = two_layers(64)
    both = storage_nbytes(model)
    model[1].weight = model[0].weight
    assert (both, storage_nbytes(model)) == (2 * 64 * 64 * 4, 64 * 64 * 4)


@pytest.mark.gpu
def test_a_captured_graph_computes_with_the_weights_of_each_commit() -> None:
    where = torch.device("cuda")
    pool, module = DevicePool(where, 2), linear(where)
    x = torch.ones(1, 3, device=where)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        module(x)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        y = module(x)
    versions = [staged(pool, module, version) for version in (1, 2)]
    for generation in (*versions, versions[0]):
        generation.commit()
        graph.replay()
        torch.cuda.synchronize()
        assert y.tolist() == [[3.0 * generation.version] * 2]


@pytest.mark.gpu
def test_pinned_memory_is_what_the_device_reads() -> None:
    data = cuda.on_host(1 << 20, torch.device("cuda"))
    assert data.is_pinned()
    data.copy_(torch.from_numpy(np.arange(1 << 20, dtype=np.uint8)))
    assert torch.equal(data.to("cuda", non_blocking=True).cpu(), data)
