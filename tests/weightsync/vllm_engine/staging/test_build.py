"""Building in a layout slot, on a model of one's own: opaque parameters, other devices. And the slots: built once,
shared, reused, spare, and built anew after a builder that was killed."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from loadtest.models.mapped_memory import HostDriver
from tests.weightsync.codes import refused
from tests.weightsync.memory.test_arena import small_file_system
from weightsync import Publisher, SlotReader
from weightsync.control.records import VersionRecord
from weightsync.errors import SwapError
from weightsync.format.fingerprint import combine
from weightsync.vllm_engine.device.cpu import Cpu
from weightsync.vllm_engine.device.cuda import Cuda
from weightsync.vllm_engine.device.generation import Pace, build_flips
from weightsync.vllm_engine.device.pool import LayoutPool, Notes
from weightsync.vllm_engine.device.remap import Remap
from weightsync.vllm_engine.model import layout as layouts
from weightsync.vllm_engine.model.layout import plan_layout
from weightsync.vllm_engine.model.placement import pair_parameters
from weightsync.vllm_engine.staging.build import Builder
from weightsync.vllm_engine.staging.published import Published
from weightsync.vllm_engine.staging.sums import compare

TENSORS = {
    "layers.0.q": torch.randn(5, 8),
    "layers.0.k": torch.randn(3, 8),
    "layers.0.norm": torch.randn(8).bfloat16(),
    "layers.1.scaled": torch.randn(4, 4),
    "layers.1.plain": torch.randn(4, 4).half(),
    "spare": torch.randint(0, 255, (7,), dtype=torch.uint8),
}


class Model(torch.nn.Module):
    """q and k fused in `qk`, with a row of padding; a norm in a wider type; `scaled` is what the loader computes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Module() for _ in range(2))
        self._add(0, "qk", torch.zeros(9, 8))
        self._add(0, "norm", torch.zeros(8))
        self._add(1, "scaled", torch.zeros(4, 4))
        self._add(1, "plain", torch.zeros(4, 4, dtype=torch.float16))

    def _add(self, layer: int, name: str, value: torch.Tensor) -> None:
        self.layers[layer].register_parameter(name, torch.nn.Parameter(value, requires_grad=False))

    def load_weights(self, tensors: Any) -> set[str]:
        filled = set()
        for name, tensor in tensors:
            own = dict(self.named_parameters())
            if name.endswith((".q", ".k")):
                target = own["layers.0.qk"].data
                target[:5].copy_(tensor) if name.endswith(".q") else target[5:8].copy_(tensor)
                target[8:].fill_(0)
                filled.add("layers.0.qk")
            elif name in own:
                own[name].data.copy_(tensor * 2 if name.endswith("scaled") else tensor)
                filled.add(name)
        return filled


@pytest.fixture
def record(publisher: Publisher) -> VersionRecord:
    publisher.publish(TENSORS, activate=False)
    return publisher.versions()[-1]


class WithBuffers(Model):
    """One buffer that the checkpoint fills, and one that it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0].register_buffer("scalar", torch.zeros(3))
        self.layers[0].register_buffer("table", torch.ones(3), persistent=False)

    def load_weights(self, tensors: Any) -> set[str]:
        found = dict(tensors)
        if "layers.0.scalar" in found:
            self.layers[0].scalar.copy_(found.pop("layers.0.scalar"))
        return super().load_weights(found.items())


GPU = pytest.param("copied", True, "cuda", marks=pytest.mark.gpu)
KINDS = [
    ("pointed", False, "cpu"),
    *[(kind, graphs, "cpu") for kind in ("copied", "mapped") for graphs in (False, True)],
]


@pytest.mark.parametrize(("kind", "captured", "device"), [*KINDS, GPU])
def test_every_kind_of_parameter_and_buffer(
    publisher: Publisher, tmp_path: Path, kind: str, captured: bool, device: str
) -> None:
    """Built where the device has a version lie, twice, and flipped to as it flips. `captured`: as under graphs."""
    publisher.publish({**TENSORS, "layers.0.scalar": torch.tensor([1.0, 2.0, 3.0])}, activate=False)
    where, driver = torch.device(device), HostDriver()
    record, live, twin = publisher.versions()[-1], WithBuffers().to(where), WithBuffers()
    live.layers[0].table.fill_(7)
    holder = live.layers[0].scalar
    place: Cpu | Cuda | Remap = Cpu() if kind == "pointed" else Cuda(where, copies=1)
    if kind == "mapped":
        place = Remap(where, copies=2, driver=driver, largest_handle=driver.granularity)
    place.replaces = not captured
    place.reserve(live)
    pairs = pair_parameters(live, twin)
    builder = Builder(twin, pairs, place)
    with SlotReader.open(record.slot) as reader:
        layout = builder.prepare(reader, lambda _: None)
        slot = place.acquire(tmp_path, layout, "v")
        slot.data.fill_(0xAA)
        for _ in range(2):
            built = builder.build(reader, slot.data, lambda _: None)
            assert combine([built.sums()]) == record.fingerprint
        slot.seal("v", Notes())
        place.generation(1, "d", build_flips(pairs, layout, slot.data, {}), slot).commit()
        q, k, norm, scaled, plain, _ = TENSORS.values()
        assert holder is live.layers[0].scalar
        assert holder.tolist() == [1.0, 2.0, 3.0]
        assert live.layers[0].table.tolist() == [7.0, 7.0, 7.0]
        assert torch.equal(live.layers[0].qk.cpu(), torch.cat([q, k, torch.zeros(1, 8)]))
        assert torch.equal(live.layers[0].norm.cpu(), norm.float())
        assert torch.equal(live.layers[1].scaled.cpu(), scaled * 2)
        assert torch.equal(live.layers[1].plain.cpu(), plain)
        assert combine([builder.check(reader, slot.data)]) == record.fingerprint
        slot.data[layout.plain["layers.0.qk"].offset + 3] ^= 1
        assert combine([builder.check(reader, slot.data)]) != record.fingerprint


PLACES = {"cpu": Cpu, "device": lambda: Cuda(torch.device("cpu"))}
"""Published bytes are digested as they are used, or on threads beside."""


def build(
    record: VersionRecord, place: str = "cpu", *, allow_non_finite: bool = False, pace: Pace = lambda _: None
) -> None:
    """Builds a `Model` in memory of its own."""
    twin, where = Model(), PLACES[place]()
    builder = Builder(twin, pair_parameters(Model(), twin), where, allow_non_finite=allow_non_finite)
    with SlotReader.open(record.slot) as reader:
        layout = builder.prepare(reader, lambda _: None)
        with where.reading(reader):
            builder.build(reader, torch.zeros(layout.nbytes, dtype=torch.uint8), pace)


@pytest.mark.parametrize("name", ["layers.0.q", "layers.0.norm", "layers.1.scaled", "layers.1.plain"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", PLACES)
def test_weights_that_are_not_finite_are_named(publisher: Publisher, name: str, value: float, place: str) -> None:
    """However they get to their place."""
    bad = {**TENSORS, name: TENSORS[name].clone()}
    bad[name].view(-1)[-1] = value
    publisher.publish(bad, activate=False)
    with refused("not_finite", match=name):
        build(publisher.versions()[-1], place)
    build(publisher.versions()[-1], place, allow_non_finite=True)


@pytest.mark.parametrize("name", ["layers.0.k", "layers.1.scaled", "spare"])
@pytest.mark.parametrize("place", PLACES)
def test_a_changed_byte_is_named(record: VersionRecord, name: str, place: str) -> None:
    """Wherever the tensor goes, if anywhere."""
    with SlotReader.open(record.slot) as reader, Path(record.slot).open("r+b") as file:
        file.seek(reader.entry(name).offset)
        file.write(bytes([reader.buffer(name)[0] ^ 1]))
    with refused("digest_mismatch", match=name):
        build(record, place)


@pytest.mark.parametrize("after", range(7))
def test_a_cancelled_staging_leaves_no_thread_that_reads(record: VersionRecord, after: int) -> None:
    """Whether it is cancelled while it copies, or while it waits for the digests."""
    asked = itertools.count()

    def pace(_: int) -> None:
        if next(asked) >= after:
            raise SwapError("cancelled", code="staging_cancelled")

    def wait(found: Any, timeout: float) -> None:
        pace(0)

    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(SwapError):
        patch.setattr("weightsync.vllm_engine.staging.published.wait", wait)
        build(record, "device", pace=pace)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("hotswap-digests")]


def test_weights_that_overflow_in_the_type_they_are_served_in(publisher: Publisher) -> None:
    publisher.publish({**TENSORS, "wide": torch.tensor([[1.0, 1e30]])}, activate=False)
    with SlotReader.open(publisher.versions()[-1].slot) as reader:
        published = Published(reader, lambda _: None)
        wide = published.tensor("wide")
        assert published.cast("wide", wide, torch.bfloat16).isfinite().all()
        for narrow in (torch.float16, torch.float8_e5m2):
            with refused("not_finite", match=str(narrow).removeprefix("torch.")):
                published.cast("wide", wide, narrow)
        assert published.cast("wide", wide[:, :1], torch.float8_e4m3fn).float().tolist() == [[1.0]]


def test_a_wrong_sum_is_named(record: VersionRecord) -> None:
    with SlotReader.open(record.slot) as reader:
        entry = reader.entry("layers.0.q")
        good = [5, 16, 0, 5, 0, 16, entry.checksum]
        compare({"layers.0.q": [good]}, reader.manifest.tensors)
        compare({"layers.0.q": [[5, 16, 0, 4, 0, 16, 1]]}, reader.manifest.tensors)  # the rest is elsewhere
        with refused("checksum_mismatch", match=r"layers\.0\.q"):
            compare({"layers.0.q": [[*good[:-1], good[-1] ^ 1]]}, reader.manifest.tensors)


# layout slots ---------------------------------------------------------------------------------------------------------


def pool_of(directory: Path) -> LayoutPool:
    """As a new instance opens it."""
    layout = plan_layout(pair_parameters(Model(), Model()), torch.device("cpu"), 0, 1)
    return LayoutPool(directory, layout.fingerprint, layout.nbytes)


@pytest.mark.parametrize(
    "upgrade",
    [
        lambda patch: patch.setattr(layouts, "FORMAT", layouts.FORMAT + 1),
        lambda patch: patch.setattr(metadata, "version", lambda package: f"{package} of tomorrow"),
        lambda patch: patch.setattr(torch, "__version__", "9.9.9"),
        lambda patch: patch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "NO AVX"),
        lambda patch: patch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_of_tomorrow": True}),
    ],
    ids=["our format", "vLLM", "torch", "CPU kernels", "CPU"],
)
def test_releases_do_not_share_slots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, upgrade: Callable[[pytest.MonkeyPatch], None]
) -> None:
    pool_of(tmp_path).acquire("v1").seal("v1", Notes())
    assert pool_of(tmp_path).acquire("v1").built
    upgrade(monkeypatch)
    assert not pool_of(tmp_path).acquire("v1").built


def test_spare_slots(tmp_path: Path) -> None:
    pool = LayoutPool(tmp_path, "f", 1000)
    first = pool.acquire("v1")
    pool.reserve(3)
    files = sorted(tmp_path.glob("layout-f-[0-9]*"))
    assert len(files) == 3
    assert len(pool._maps) == 3
    first.seal("v1", Notes())
    slots = [pool.acquire(f"v{n}") for n in (2, 3)]
    assert sorted(s.path for s in [first, *slots]) == files
    pool.reserve(2)
    assert sorted(tmp_path.glob("layout-f-[0-9]*")) == files
    assert not slots[0].built
    assert first.notes == Notes()


def test_slot_is_built_once_and_shared(tmp_path: Path) -> None:
    pool, other = LayoutPool(tmp_path, "f", 1000), LayoutPool(tmp_path, "f", 1000)
    slot = pool.acquire("v1")
    assert not slot.built
    slot.data.fill_(7)
    notes = Notes({"w": [[1, 2, 0, 1, 0, 2, 7]]}, {"attn._k_scale_float": 0.5})
    slot.seal("v1", notes)
    again = other.acquire("v1")
    assert again.built
    assert int(again.data.sum()) == 7000
    assert again.notes == notes
    assert len(list(tmp_path.glob("layout-f-[0-9]*"))) == 1


def test_slots_in_use_are_kept_and_released_ones_reused(tmp_path: Path) -> None:
    pool = LayoutPool(tmp_path, "f", 64)
    slots = []
    for key in ("v1", "v2", "v3"):
        slots.append(pool.acquire(key))
        slots[-1].seal(key, Notes())
    assert len({s.path for s in slots}) == 3
    slots[0].release()
    fourth = pool.acquire("v4")
    assert fourth.path == slots[0].path
    assert pool.acquire("v2").path == slots[1].path


def test_slots_of_a_layout_that_nobody_runs_make_room(tmp_path: Path) -> None:
    """Swaps to other tensors and back, beside an instance that stays as it is."""
    stays = LayoutPool(tmp_path, "stays", 64)
    first = stays.acquire("v0")
    first.seal("v0", Notes())
    stays.reserve(3)
    pools = [LayoutPool(tmp_path, name, 64) for name in "ab"]
    for turn in range(6):
        slot = pools[turn % 2].acquire(f"v{turn}")
        pools[turn % 2].reserve(3)
        assert not slot.built
        slot.data.fill_(turn)
        slot.seal(f"v{turn}", Notes())
        other = LayoutPool(tmp_path, "ab"[turn % 2], 64).acquire(f"v{turn}")
        assert (other.built, int(other.data.sum())) == (True, 64 * turn)
        assert len(list(tmp_path.glob("layout-*[0-9]"))) == 6
        assert len(pools[turn % 2]._maps) == 3
        for held in (slot, other):
            held.release()
    assert LayoutPool(tmp_path, "stays", 64).acquire("v0").built


def test_what_a_killed_builder_left_is_built_again(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from weightsync.vllm_engine.device.pool import LayoutPool\n"
        "slot = LayoutPool(Path(sys.argv[1]), 'f', 64).acquire('v1'); print('building', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) as builder:
        assert builder.stdout is not None
        assert builder.stdout.readline() == "building\n"
        pool = LayoutPool(tmp_path, "f", 64)
        with refused("layout_pool_error", match="building v1"):
            pool.acquire("v1", timeout_s=0.05)
        os.kill(builder.pid, signal.SIGKILL)
        builder.wait()
        slot = pool.acquire("v1")
    assert not slot.built


def test_a_process_that_is_killed_while_it_makes_a_slot_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def killed(fd: int, begin: int, nbytes: int) -> None:
        os.ftruncate(fd, nbytes // 2)
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", killed)
        with pytest.raises(Killed):
            LayoutPool(tmp_path, "f", 64).reserve(1)
    pool = LayoutPool(tmp_path, "f", 64)
    pool.reserve(2)
    assert {pool.acquire(key).data.numel() for key in ("v1", "v2")} == {64}
    assert len(list(tmp_path.glob("layout-f-*[0-9]"))) == 2


def test_a_full_shared_memory_is_a_typed_error() -> None:
    room = 1 << 20
    with small_file_system(room) as directory:
        pool = LayoutPool(directory, "f", 2 * room)
        with refused("layout_pool_error", match="no room"):
            pool.acquire("v1")
        assert not list(directory.glob("layout-f-[0-9]*"))
