"""All that the phases without vLLM use of weightsync.vllm_engine: stagers, builders, generations, buffers.

They drive the code that an instance on an accelerator runs (`device/cuda.py`), on a CPU, too. vLLM itself is not there,
even where it is installed: the stager's few questions to it are answered here, so that a machine without it and a
machine with it run the same.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from loadtest.gpu_day.calls import ARENAS
from loadtest.gpu_day.device import Device
from loadtest.gpu_day.report import Skipped
from loadtest.gpu_day.stack import DTYPE, Part, Shape, Stack, parts
from loadtest.models.mapped_memory import HostDriver
from weightsync import Publisher
from weightsync.control.records import VersionRecord
from weightsync.errors import EngineError
from weightsync.format.fingerprint import combine
from weightsync.store import SyncStore
from weightsync.vllm_engine.device.cuda import PIECE_NBYTES, CopyGeneration, Cuda, Ring
from weightsync.vllm_engine.device.generation import Generation, build_flips, running
from weightsync.vllm_engine.device.pool import Notes
from weightsync.vllm_engine.device.remap import Remap
from weightsync.vllm_engine.device.room import MOST_COPIES
from weightsync.vllm_engine.model.layout import plan_layout
from weightsync.vllm_engine.model.placement import pair_parameters
from weightsync.vllm_engine.model.processing import Change
from weightsync.vllm_engine.staging import stager as stagers
from weightsync.vllm_engine.staging.bundle import BASE, Bundle, HeldBundles, Piece
from weightsync.vllm_engine.staging.stager import Garbage, StageOrder, Stager, describe, use_one_core

__all__ = ["BASE", "Bundle", "HeldBundles"]
MODEL = "gpu-day"
SHM = Path("/dev/shm")  # noqa: S108 - where instances keep their slots
TWIN = Cuda.twin  # where a twin is made
KEPT = 3  # published versions: live, previous and the one that is written


def _stub(**names: Any) -> ModuleType:
    module = ModuleType("stub")
    module.__dict__.update(names)
    return module


class _Nothing:
    """A class of vLLM's that no module here is of."""


STUBS = {
    "vllm.model_executor.layers.attention": _stub(Attention=_Nothing, is_deferred_attention_layer=lambda _: False),
    "vllm.model_executor.layers.quantization.base_config": _stub(QuantizeMethodBase=_Nothing),
    "vllm.model_executor.model_loader.mtp_validation": _stub(disable_mtp_completeness_check=contextlib.nullcontext),
}


@contextlib.contextmanager
def without_vllm() -> Iterator[None]:
    """Stubs stand in for the parts of vLLM that the stager uses. Any other import of vLLM fails, as without vLLM."""
    stubs: dict[str, Any] = {**STUBS, "vllm": None}
    saved = {name: sys.modules[name] for name in stubs if name in sys.modules}
    sys.modules.update(stubs)
    try:
        yield
    finally:
        for name in stubs:
            del sys.modules[name]
        sys.modules.update(saved)


@contextlib.contextmanager
def arena(nbytes: int) -> Iterator[Path]:
    """A directory for slots of so many bytes in all: in shared memory, or on a disk where that is too small."""
    found = os.statvfs(SHM)
    root = SHM if found.f_bavail * found.f_frsize > nbytes else Path(tempfile.gettempdir())
    directory = Path(tempfile.mkdtemp(prefix=f"{ARENAS}{os.getpgid(0)}-", dir=root))
    try:
        with patch.dict(os.environ, {"HOTSWAP_ARENA": str(directory)}):
            yield directory
    finally:
        while directory.exists():  # a stager's spare slots may still be on their way
            shutil.rmtree(directory, ignore_errors=True)


class Versions:
    """Publishes what `stack.Part.value` gives for a number, or what the caller puts in its place."""

    def __init__(self, publisher: Publisher, shape: Shape, device: Device) -> None:
        self._publisher, self._shape, self._device = publisher, shape, device

    def publish(self, number: int, instead: Mapping[str, torch.Tensor] | None = None) -> VersionRecord:
        """`instead` replaces tensors by name, or adds some."""
        version = self._publisher.publish(self._tensors(number, dict(instead or {})), activate=False)
        return next(record for record in self._publisher.versions() if record.version == version)

    def _tensors(self, number: int, given: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        for part in parts(self._shape):
            found = given.pop(part.name, None)
            yield part.name, found if found is not None else part.value(number, self._device.torch).cpu()
        yield from given.items()


@contextlib.contextmanager
def versions(shape: Shape, device: Device) -> Iterator[Versions]:
    """A store and an arena of their own, and what a `Side` needs around it."""
    with arena(shape.nbytes * KEPT) as directory, without_vllm():
        url = f"sqlite://{directory}/store.db"
        SyncStore(url).close()
        with Publisher(url, model=MODEL) as publisher:
            yield Versions(publisher, shape, device)


def placed(live: nn.Module, device: Device, way: str, copies: int = MOST_COPIES) -> Cuda:
    """Where versions of `live` wait, and how they are flipped to: "copy" or "remap"; its memory is taken.

    On a CPU remapping goes through a stand-in of the driver. Raises Skipped.
    """
    if way == "copy":
        place = Cuda(device.torch, copies=copies)
    else:
        try:
            place = Remap(device.torch, copies=copies, driver=None if device.cuda else HostDriver())
        except EngineError as error:
            raise Skipped(str(error)) from None
    with without_vllm():
        place.reserve(live)
    return place


class Side:
    """The staging side of a worker: a model that runs, its twin, and the stager over both."""

    def __init__(
        self, live: nn.Module, twin: Callable[[], nn.Module], device: Device, *, piece_nbytes: int = PIECE_NBYTES
    ) -> None:
        """`piece_nbytes`: what is read, copied and summed at a time."""
        alone = {"data_parallel_rank": 0, "data_parallel_size": 1}
        parallel = SimpleNamespace(rank=0, world_size=1, local_world_size=1, **alone)
        place = placed(live, device, "copy")
        place.piece_nbytes, place._ring = piece_nbytes, Ring(device.torch, piece_nbytes)
        self.live, self.place = live, place
        self.twin: nn.Module | None = None

        def skeleton(*_: Any) -> nn.Module:
            self.twin = twin()
            return self.twin

        with patch.object(stagers, "build_skeleton", skeleton):
            config = SimpleNamespace(parallel_config=parallel)
            self.stager = Stager(live, config, SimpleNamespace(dtype=DTYPE), place)
        self._thread = ThreadPoolExecutor(1, "stager", use_one_core)
        self._work: Future[Generation] | None = None

    def start(self, record: VersionRecord, garbage: Garbage | None = None) -> None:
        """Begin staging; `garbage` is freed first, on the stager's thread."""
        order = StageOrder(record.version, record.slot, record.manifest_digest)
        self._work = self._thread.submit(self._run, order, garbage or Garbage([], []))

    def _run(self, order: StageOrder, garbage: Garbage) -> Generation:
        garbage.free()
        return self.stager.stage(order, threading.Event())

    def staged(self, record: VersionRecord) -> Generation:
        """Wait for it. Raises StagingFailed, also where what was built has another fingerprint than what was
        published."""
        assert self._work is not None
        try:
            generation = self._work.result()
        except Exception as error:
            raise StagingFailed(f"version {record.version} was not staged: {describe(error)['message']}") from error
        if combine([self.stager.report.sums]) != record.fingerprint:
            raise StagingFailed(f"version {record.version} was built with another fingerprint than the published one")
        return generation

    def stage(self, record: VersionRecord, garbage: Garbage | None = None) -> Generation:
        self.start(record, garbage)
        return self.staged(record)

    def buffers(self) -> list[int]:
        """Bytes of each buffer for a version that the device has."""
        pool = self.place._pool
        return [slab.nbytes for slab in pool._slabs] if pool is not None else []


class StagingFailed(Exception):
    """A version could not be staged; the message says why."""


def bundle(version: int, generation: Generation) -> Bundle:
    """A version of a base model alone."""
    return Bundle(version, {BASE: Piece(generation, {})})


class Unpublished:
    """Generations of a `Stack` whose buffers are filled on the device itself: nothing is published or staged."""

    def __init__(self, live: Stack, place: Cuda) -> None:
        """`place`: as `placed` made it for `live`."""
        twin = Stack(live.shape, torch.device("meta"))
        self._parts: dict[str, list[Part]] = {}
        for part in parts(live.shape):
            self._parts.setdefault(part.target, []).append(part)
        self._place, self._pairs = place, pair_parameters(live, twin)
        layout, lives = (
            plan_layout(self._pairs, place.device, 0, 1, filled=self._parts),
            dict[str, list[torch.Tensor]](),
        )
        for source, tensor in running(self._pairs, layout):
            lives.setdefault(source, []).append(tensor)
        self._layout = place.arranged(layout, lives)

    def generation(self, number: int) -> CopyGeneration:
        """One that makes the live model what `live.load(number)` makes it."""
        slot = self._place.acquire(Path(), self._layout, "")
        for entry in self._layout.entries:
            target = entry.view(slot.data)
            for part in self._parts[entry.source]:
                part.of(target).copy_(part.value(number, target.device))
        slot.seal(f"v{number}", Notes())
        flips = build_flips(self._pairs, self._layout, slot.data, {})
        return self._place.generation(number, f"v{number}", flips, slot)


class FlipRefused(Exception):
    """Raised by a commit that `breaks` has made to fail."""


class _Refuses(dict[str, Any]):
    def __setitem__(self, key: str, value: Any) -> None:
        raise FlipRefused("this flip fails when its tensors are copied")


def breaks(generation: Generation) -> None:
    """Have its commit fail behind its tensors: all of them are copied by then."""
    generation.flips.changes.append(Change("broken", _Refuses(), "broken", 1))


def staged_tensors(generation: Generation) -> list[torch.Tensor]:
    """The tensors in its buffer."""
    return [staged for _, staged in generation.flips.tensors]


def reserved_tensors(side: Side) -> list[torch.Tensor]:
    """The tensors that the stager's pool and builder hold themselves, besides those that generations hold."""
    return list(_tensors_in([side.stager.place, side.stager._builder], set()))


def _tensors_in(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for held in value.values():
            yield from _tensors_in(held, seen)
    elif isinstance(value, (list, tuple, set)):
        for held in value:
            yield from _tensors_in(held, seen)
    elif type(value).__module__.startswith("weightsync.vllm_engine"):
        slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
        for held in [*(getattr(value, name, None) for name in slots), *getattr(value, "__dict__", {}).values()]:
            yield from _tensors_in(held, seen)
