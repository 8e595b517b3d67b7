"""Builds the next generation on a background thread while the worker decodes; the live model is never touched here.

Where it lies until it is committed, and how it gets there, is the `StagingDevice`'s: `Cpu`, `Cuda`, `Remap` (device/).
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Collection
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from weightsync.errors import SwapError, WeightSyncError
from weightsync.format import fingerprint
from weightsync.format.fingerprint import TileSums
from weightsync.format.manifest import Schema, require_same_schema
from weightsync.memory.receiver import SlotReader
from weightsync.vllm_engine.device.cpu import Cpu
from weightsync.vllm_engine.device.cuda import Cuda
from weightsync.vllm_engine.device.generation import Generation, Memory, Pace, StagingDevice, build_flips
from weightsync.vllm_engine.device.pacing import Staging
from weightsync.vllm_engine.device.pool import Notes
from weightsync.vllm_engine.device.remap import Remap, flips_by_remapping
from weightsync.vllm_engine.model.placement import Served, WithHead, build_skeleton, pair_parameters
from weightsync.vllm_engine.model.processing import Processing
from weightsync.vllm_engine.openmp import openmp_setters
from weightsync.vllm_engine.staging.build import Builder, Built, Reads


def go_on(stop: threading.Event) -> None:
    """Raises SwapError when the staging is to end."""
    if stop.is_set():
        message = "staging was cancelled: its swap has ended, or another one took its place"
        raise SwapError(message, code="staging_cancelled")


# The decode thread need not wait Python's usual 5 ms for a lock that the stager holds.
SWITCH_INTERVAL_S = 0.0002
RUN = ("linear", "processed")
LOOK_S = 0.01  # for whether to go on, while there is nothing to do but wait


@dataclass(frozen=True)
class StageOrder:
    """A version to stage: a published slot, its manifest digest, and where layout slots live. `unread`: the tensors
    that no worker of the instance reads."""

    version: int
    slot: str
    manifest_digest: str
    schema: Schema | None = None
    unread: tuple[str, ...] = ()


@dataclass(frozen=True)
class StageReport:
    """The report of a staging. `error`: None or {"code", "message", "tensor"}; times in ms, rate in GB/s of tensor
    bytes.

    `sums` goes to `format.fingerprint.combine`: {tensor: [Tile.to_row(), ...]} of what this worker will run. `built`:
    "LAYOUT:DIGEST" of what vLLM's processing made, equal wherever the same layout was built right; "": it made nothing.
    `expected_flip_ms`: how long the commit will stall decoding; `copies`: how many versions have room on the device;
    None where a commit changes references. `step_loss`: by what part of their length the model's steps were longer
    beside the staging; None: there were none to compare.
    """

    version: int
    running: bool = False
    digest: str = ""
    path: str = ""
    stage_ms: float = 0.0
    staging_gbps: float = 0.0
    error: dict[str, str | None] | None = None
    sums: TileSums = field(default_factory=dict)
    built: str = ""
    expected_flip_ms: float | None = None
    copies: int | None = None
    step_loss: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Rules:
    """Of all stagings of a worker. `allow_non_finite`: NaN and infinities are staged. `staging`: see pacing.py."""

    allow_non_finite: bool = False
    staging: Staging = "smooth"


DEFAULT = Rules()


@dataclass
class Garbage:
    """Memory that nobody will use again: generations, and references that commits replaced. Freed on the staging
    thread."""

    generations: list[Generation]
    replaced: list[Any]

    def free(self) -> None:
        for generation in self.generations:
            generation.release()
        self.generations.clear()
        self.replaced.clear()


def staging_device(
    device: torch.device, share: float, kv_cache: int | None = None, *, captured: bool = False
) -> StagingDevice:
    """The staging device for a model that runs on `device`, of which the instance was given `share`.

    `kv_cache`: bytes that are to be left to its KV cache, None: whatever is left. `captured`: graphs hold the model's
    addresses already.
    """
    if device.type == "cpu":
        return Cpu()
    return (Remap if flips_by_remapping() and not captured else Cuda)(device, share=share, kv_cache=kv_cache)


class Stager:
    """Turns published slots into generations, one at a time, on the thread that calls it."""

    def __init__(
        self,
        model: torch.nn.Module,
        vllm_config: Any,
        model_config: Any,
        place: StagingDevice,
        *,
        head: Served | None = None,
        elsewhere: Collection[int] = (),
        rules: Rules = DEFAULT,
    ) -> None:
        """`head` comes in the checkpoints of `model`. `elsewhere`: ids of modules that others fill."""
        fingerprint.warm()
        self.place = place
        self._pacer = place.pacer(model, rules.staging)
        twin = build_skeleton(vllm_config, model_config, place.twin)
        if head is not None:
            model, twin = WithHead(model, head.model), WithHead(twin, head.skeleton(place.twin))
        processing = Processing(model, twin, model_config.dtype, place.device, elsewhere)
        self._pairs = pair_parameters(model, twin, processing)
        parallel = vllm_config.parallel_config  # of ranks that share experts; other data-parallel ranks are alone here
        self._rank = parallel.data_parallel_rank * parallel.world_size + parallel.rank
        self._builder = Builder(
            twin,
            self._pairs,
            place,
            processing=processing,
            rank=self._rank,
            world=parallel.data_parallel_size * parallel.world_size,
            share=(parallel.rank % parallel.local_world_size, parallel.local_world_size),
            allow_non_finite=rules.allow_non_finite,
        )
        self._key_suffix = "-unchecked" if rules.allow_non_finite else ""  # who looks for NaN builds a slot of its own
        self._spares: threading.Thread | None = None
        self.report = StageReport(version=0)

    def reads(self, schema: Schema) -> Reads:
        """This worker's reads of versions with this schema, while no staging runs. Raises as `Builder.reads`."""
        return self._builder.reads(schema)

    def stage(self, order: StageOrder, stop: threading.Event) -> Generation:
        """Build `order`; `report` is about it then. Once `stop` is set it ends soon, with SwapError. Raises any error
        that refuses the version."""
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        started = time.perf_counter()
        try:
            while self._spares is not None and self._spares.is_alive():
                self._spares.join(LOOK_S)
                go_on(stop)
            self._pacer.start(partial(go_on, stop))
            with self.place.staging():
                generation, nbytes = self._build(order, stop)
        except Exception as error:
            self.report = StageReport(order.version, error=describe(error))
            raise
        seconds = time.perf_counter() - started
        self.report = StageReport(
            order.version,
            digest=order.manifest_digest,
            path="+".join(sorted(self._kernels())) or "plain",
            stage_ms=seconds * 1e3,
            staging_gbps=nbytes / 1e9 / seconds,
            sums=generation.sums,
            built=generation.built,
            expected_flip_ms=self.place.expected_flip_ms(generation.slot) if generation.slot else None,
            copies=self.place.copies,
            step_loss=self._pacer.step_loss,
        )
        if self._spares is None:
            self._spares = threading.Thread(target=self._reserve, name="hotswap-spares", daemon=True)
            self._spares.start()
        return generation

    def _reserve(self) -> None:
        """After the first version, which an instance loads before it serves: the memory that its first swaps need."""
        use_one_core()
        self.place.prepare_swaps()

    def _kernels(self) -> set[str]:
        """The kinds of kernel that run this model's matrices."""
        kernels = self._builder.layout.kernels
        return {"processed" if s.role == "processed" else kernels[s.name] for s in self._pairs if s.role in RUN}

    def _build(self, order: StageOrder, stop: threading.Event) -> tuple[Generation, int]:
        reader = SlotReader.open(
            Path(order.slot), manifest_digest=order.manifest_digest, version=order.version, populate=False, part=True
        )
        try:
            if order.schema is not None:
                require_same_schema(order.schema, reader.manifest.schema)
            key = order.manifest_digest + self._key_suffix

            def pace(nbytes: int) -> None:
                go_on(stop)
                if self._spares is not None:  # nobody is served before the first version: what runs is a warm-up
                    self._pacer(nbytes)

            with self.place.scratch():
                layout = self._builder.prepare(reader, pace)
            slot = self.place.acquire(Path(order.slot).parent, layout, key)
            try:
                also = order.unread if self._rank == 0 else ()  # somebody must sum them
                with self.place.reading(reader), self.place.scratch():
                    built, notes = self._complete(reader, slot, pace, also)
                if not slot.built:
                    slot.seal(key, notes)
                flips = build_flips(self._pairs, layout, slot.data, built.private)
            except BaseException:
                slot.release()
                raise
            plan = self._builder.plan
            flips.tensors += [(plan.live[path], view.of(slot.data)) for path, view in layout.views.items()]
            flips.changes += built.changes
            flips.changes += [replace(plan.scalars[path], value=value) for path, value in notes.scalars.items()]
            made = f"{layout.fingerprint}:{notes.built}" if notes.built else ""
            generation = self.place.generation(order.version, order.manifest_digest, flips, slot, notes.sums, made)
            return generation, reader.nbytes
        finally:
            reader.close()

    def _complete(self, reader: SlotReader, slot: Memory, pace: Pace, also: Collection[str]) -> tuple[Built, Notes]:
        """Build what is not there yet; what another instance built is taken with the sums and scalars it noted."""
        found = slot.notes if slot.built else Notes()
        if slot.built and not found.sums:
            found.sums = self._builder.check(reader, slot.data, also)
        if slot.built and not self._builder.has_private:
            return Built(), found
        reader.populate()
        built = self._builder.build(reader, None if slot.built else slot.data, pace, also)
        digest = found.built if slot.built else self._builder.digest(slot.data, built, pace)
        return built, Notes(joined(found.sums, built.sums()), found.scalars | built.scalars, digest)


def joined(first: TileSums, second: TileSums) -> TileSums:
    """The parts of both, by tensor."""
    return {name: [*first.get(name, []), *second.get(name, [])] for name in first.keys() | second.keys()}


def describe(error: Exception) -> dict[str, str | None]:
    """The wire form of a staging failure: what broke and, where one is to blame, which tensor."""
    if isinstance(error, WeightSyncError):
        return error.to_json()
    if isinstance(error, torch.OutOfMemoryError):
        message = (
            "the device has no memory left for what a staging makes there: free it, or lower --gpu-memory-utilization"
        )
        return {"code": "staging_failed", "message": f"{message} ({str(error).partition('. See')[0]})", "tensor": None}
    return {"code": "staging_failed", "message": str(error) or type(error).__name__, "tensor": None}


def use_one_core() -> None:
    """Let this thread run anywhere, with one OpenMP thread: the decode threads keep their cores and their team."""
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    for set_threads in openmp_setters():
        set_threads(1)
