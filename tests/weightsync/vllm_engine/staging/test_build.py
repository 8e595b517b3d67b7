"""Building in a layout slot, on a model of one's own: opaque parameters, other devices, spare slots."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from loadtest.models.mapped_memory import HostDriver
from weightsync import Publisher, SlotReader
from weightsync.control.records import VersionRecord
from weightsync.errors import ChecksumMismatch, DigestMismatch, NotFinite, StagingCancelled
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


GPU = pytest.param("captured", "cuda", marks=pytest.mark.gpu)


@pytest.mark.parametrize(("kind", "device"), [("shared", "cpu"), ("device", "cpu"), ("captured", "cpu"), GPU])
def test_every_kind_of_parameter(record: VersionRecord, tmp_path: Path, kind: str, device: str) -> None:
    where = torch.device(device)
    place: Cpu | Cuda = Cpu() if kind == "shared" else Cuda(where, copies=1)
    place.replaces = kind != "captured"  # as under captured graphs, whatever the device
    live, twin = Model().to(where), Model()
    builder = Builder(twin, pair_parameters(live, twin), place)
    with SlotReader.open(record.slot) as reader:
        layout = builder.prepare(reader, lambda _: None)
        data = place.acquire(tmp_path, layout, "v").data.fill_(0xAA)
        for _ in range(2):
            built = builder.build(reader, data, lambda _: None)
            assert combine([built.sums()]) == record.fingerprint
        assert combine([builder.check(reader, data)]) == record.fingerprint
        found = {entry.source: entry.view(data).cpu().clone() for entry in layout.entries}
        data[layout.plain["layers.0.qk"].offset + 3] ^= 1
        assert combine([builder.check(reader, data)]) != record.fingerprint
    q, k, norm, scaled, plain, _ = TENSORS.values()
    assert torch.equal(found["layers.0.qk"], torch.cat([q, k, torch.zeros(1, 8)]))
    assert torch.equal(found["layers.0.norm"], norm.float())
    assert torch.equal(found["layers.1.scaled"], scaled * 2)
    assert torch.equal(found["layers.1.plain"], plain)


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


@pytest.mark.parametrize("kind", ["pointed", "mapped", "mapped under graphs"])
def test_buffers_that_loaders_fill_swap_and_others_stay(publisher: Publisher, tmp_path: Path, kind: str) -> None:
    """Built where the device has a version lie, and flipped to as it flips."""
    publisher.publish({**TENSORS, "layers.0.scalar": torch.tensor([1.0, 2.0, 3.0])}, activate=False)
    record, live, twin = publisher.versions()[-1], WithBuffers(), WithBuffers()
    live.layers[0].table.fill_(7)
    holder, driver = live.layers[0].scalar, HostDriver()
    mapped = Remap(torch.device("cpu"), copies=2, driver=driver, largest_handle=driver.granularity)
    place: Cpu | Remap = Cpu() if kind == "pointed" else mapped
    place.replaces = kind != "mapped under graphs"
    place.reserve(live)
    pairs = pair_parameters(live, twin)
    builder = Builder(twin, pairs, place)
    with SlotReader.open(record.slot) as reader:
        layout = builder.prepare(reader, lambda _: None)
        slot = place.acquire(tmp_path, layout, "v")
        built = builder.build(reader, slot.data, lambda _: None)
        assert combine([built.sums()]) == record.fingerprint
        slot.seal("v", Notes())
        place.generation(1, "d", build_flips(pairs, layout, slot.data, {}), slot).commit()
        assert combine([builder.check(reader, slot.data)]) == record.fingerprint
    q, k, norm, scaled, *_ = TENSORS.values()
    assert holder is live.layers[0].scalar
    assert holder.tolist() == [1.0, 2.0, 3.0]
    assert live.layers[0].table.tolist() == [7.0, 7.0, 7.0]
    assert torch.equal(live.layers[0].norm, norm.float())
    assert torch.equal(live.layers[0].qk[:8], torch.cat([q, k]))
    assert torch.equal(live.layers[1].scaled, scaled * 2)


PLACES = {"cpu": Cpu, "device": lambda: Cuda(torch.device("cpu"))}
"""Published bytes are digested as they are used, or on threads beside."""


def build(
    record: VersionRecord, place: str = "cpu", *, allow_non_finite: bool = False, pace: Pace = lambda _: None
) -> Builder:
    """Builds a `Model` in memory of its own."""
    twin, where = Model(), PLACES[place]()
    builder = Builder(twin, pair_parameters(Model(), twin), where, allow_non_finite=allow_non_finite)
    with SlotReader.open(record.slot) as reader:
        layout = builder.prepare(reader, lambda _: None)
        with where.reading(reader):
            builder.build(reader, torch.zeros(layout.nbytes, dtype=torch.uint8), pace)
    return builder


def test_what_cannot_be_told_from_the_slot_is_summed_as_published(record: VersionRecord) -> None:
    builder = build(record)
    assert builder._learnt is not None
    placement = builder._learnt[1]
    assert placement.opaque.keys() == {"layers.1.scaled"}
    assert set(placement.opaque["layers.1.scaled"]) == {"layers.1.scaled", "layers.1.plain"}
    assert set(placement.unused) == {"layers.1.scaled", "spare"}


@pytest.mark.parametrize("name", ["layers.0.q", "layers.0.norm", "layers.1.scaled", "layers.1.plain"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", PLACES)
def test_weights_that_are_not_finite_are_named(publisher: Publisher, name: str, value: float, place: str) -> None:
    """However they get to their place."""
    bad = {**TENSORS, name: TENSORS[name].clone()}
    bad[name].view(-1)[-1] = value
    publisher.publish(bad, activate=False)
    with pytest.raises(NotFinite, match=name):
        build(publisher.versions()[-1], place)
    build(publisher.versions()[-1], place, allow_non_finite=True)


@pytest.mark.parametrize("name", ["layers.0.k", "layers.1.scaled", "spare"])
@pytest.mark.parametrize("place", PLACES)
def test_a_changed_byte_is_named(record: VersionRecord, name: str, place: str) -> None:
    """Wherever the tensor goes, if anywhere."""
    with SlotReader.open(record.slot) as reader, Path(record.slot).open("r+b") as file:
        file.seek(reader.entry(name).offset)
        file.write(bytes([reader.buffer(name)[0] ^ 1]))
    with pytest.raises(DigestMismatch, match=name):
        build(record, place)


@pytest.mark.parametrize("after", range(7))
def test_a_cancelled_staging_leaves_no_thread_that_reads(record: VersionRecord, after: int) -> None:
    """Whether it is cancelled while it copies, or while it waits for the digests."""
    asked = itertools.count()

    def pace(_: int) -> None:
        if next(asked) >= after:
            raise StagingCancelled

    def wait(found: Any, timeout: float) -> None:
        pace(0)

    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(StagingCancelled):
        patch.setattr("weightsync.vllm_engine.staging.published.wait", wait)
        build(record, "device", pace=pace)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("hotswap-digests")]


def test_weights_that_overflow_in_the_type_they_are_served_in(publisher: Publisher) -> None:
    publisher.publish({**TENSORS, "wide": torch.tensor([[1.0, 1e30]])}, activate=False)
    with SlotReader.open(publisher.versions()[-1].slot) as reader:
        published = Published(reader, lambda _: None)
        wide = published.tensor("wide")
        assert published.cast("wide", wide, torch.bfloat16).isfinite().all()
        with pytest.raises(NotFinite, match="float16"):
            published.cast("wide", wide, torch.float16)


def test_a_wrong_sum_is_named(record: VersionRecord) -> None:
    with SlotReader.open(record.slot) as reader:
        entry = reader.entry("layers.0.q")
        good = [5, 16, 0, 5, 0, 16, entry.checksum]
        compare({"layers.0.q": [good]}, reader.manifest.tensors)
        compare({"layers.0.q": [[5, 16, 0, 4, 0, 16, 1]]}, reader.manifest.tensors)  # the rest is elsewhere
        with pytest.raises(ChecksumMismatch, match=r"layers\.0\.q"):
            compare({"layers.0.q": [[*good[:-1], good[-1] ^ 1]]}, reader.manifest.tensors)


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
