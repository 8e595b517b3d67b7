"""Builds the next generation on a background thread while the worker decodes; the live model is never touched here."""

from __future__ import annotations

import ctypes
import os
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from weightsync.errors import MissingTensor, WeightSyncError
from weightsync.manifest import Schema, require_same_schema
from weightsync.receiver import SlotReader

from .exchange import DevicePool, ExchangeGeneration
from .generation import Generation, Memory, build_flips
from .kernels import LinearFn, onednn_linear, pack_into
from .layout import plan_layout
from .pool import LayoutPool
from .skeleton import Slot, build_skeleton, group_by_layer, layer_of, load_group, pair_parameters

# Decoding goes first. The stager gives the memory bus and the interpreter back for a moment with every large tensor,
# and the decode thread need not wait Python's usual 5 ms for a lock the stager holds. Staging takes half as long again;
# what it adds to the longest gap between tokens fell from about 30 ms to 12-21 ms (loadtest/swap_stall.py, 0.4 B).
SWITCH_INTERVAL_S = 0.0002
YIELD_BYTES = 64 << 10
YIELD_RATE = 2e9  # bytes per second of pause
LONGEST_YIELD_S = 0.002


@dataclass(frozen=True)
class StageOrder:
    """What to stage: a published slot, its manifest digest, and where layout slots live."""

    version: int
    slot: str
    manifest_digest: str
    schema: Schema | None = None


@dataclass(frozen=True)
class StageReport:
    """How a staging went. `error`: None or {"code", "message", "tensor"}; times in ms, rate in GB/s of tensor bytes."""

    version: int
    running: bool = False
    digest: str = ""
    path: str = ""
    stage_ms: float = 0.0
    staging_gbps: float = 0.0
    error: dict[str, str | None] | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Garbage:
    """What nobody will run again: generations, and references that commits replaced. Freed on the staging thread."""

    generations: list[Generation]
    replaced: list[Any]

    def free(self) -> None:
        for generation in self.generations:
            generation.release()
        self.generations.clear()
        self.replaced.clear()


class Stager:
    """Turns published slots into generations. One staging at a time; `wait` returns its report."""

    def __init__(self, model: torch.nn.Module, vllm_config: Any, model_config: Any, device: torch.device) -> None:
        self._twin = build_skeleton(vllm_config, model_config, device)
        self._slots = pair_parameters(model, self._twin)
        parallel = vllm_config.parallel_config
        self._layout = plan_layout(self._slots, device, parallel.rank, parallel.world_size)
        self._scratch: dict[str, torch.Tensor] = {}
        self._pool: LayoutPool | DevicePool | None = None
        self._device = device
        self._thread: threading.Thread | None = None
        self.report = StageReport(version=0)
        self.generation: Generation | None = None

    def start(self, order: StageOrder, garbage: Garbage) -> None:
        """Begin staging `order`; `garbage` is freed first, on the same thread."""
        self.wait()
        if self.generation is not None:
            garbage.generations.append(self.take())
        self.report = StageReport(order.version, running=True)
        self._thread = threading.Thread(target=self._run, args=(order, garbage), name="hotswap-stager", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Block until no staging runs."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def take(self) -> Generation:
        """Hand over the staged generation, once."""
        assert self.generation is not None
        generation, self.generation = self.generation, None
        return generation

    def _run(self, order: StageOrder, garbage: Garbage) -> None:
        use_one_core()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        started = time.perf_counter()
        try:
            garbage.free()
            self.generation, nbytes = self._build(order)
        except Exception as error:  # reported to the coordinator: the old version goes on serving
            self.report = StageReport(order.version, error=describe(error))
            return
        seconds = time.perf_counter() - started
        self.report = StageReport(
            order.version,
            digest=order.manifest_digest,
            path="+".join(sorted({k for s, k in self._layout.kernels.items() if self._is_linear(s)})) or "plain",
            stage_ms=seconds * 1e3,
            staging_gbps=nbytes / 1e9 / seconds,
        )

    def _is_linear(self, name: str) -> bool:
        return any(s.name == name and s.role == "linear" for s in self._slots)

    def _build(self, order: StageOrder) -> tuple[Generation, int]:
        reader = SlotReader.open(Path(order.slot), manifest_digest=order.manifest_digest, version=order.version)
        try:
            if order.schema is not None:
                require_same_schema(order.schema, reader.manifest.schema)
            slot: Memory = self._memory(Path(order.slot).parent).acquire(order.manifest_digest)
            private: dict[str, LinearFn] = {}
            try:
                if not slot.built or self._needs_private():
                    private = self._fill(reader, slot)
                if not slot.built:
                    slot.seal(order.manifest_digest)
            except BaseException:
                slot.release()
                raise
            flips = build_flips(self._slots, self._layout, slot.data, private)
            kind = Generation if self._device.type == "cpu" else ExchangeGeneration
            return kind(order.version, order.manifest_digest, flips, slot, private), reader.nbytes
        finally:
            reader.close()

    def _memory(self, directory: Path) -> LayoutPool | DevicePool:
        if self._pool is None:
            layout = self._layout
            host = self._device.type == "cpu"
            self._pool = (
                LayoutPool(directory, layout.fingerprint, layout.nbytes)
                if host
                else DevicePool(layout.nbytes, self._device)
            )
        return self._pool

    def _needs_private(self) -> bool:
        return "onednn" in self._layout.kernels.values()

    def _fill(self, reader: SlotReader, slot: Memory) -> dict[str, LinearFn]:
        """Load every tensor into `slot`, one decoder layer at a time, so that raw weights stay in the cache."""
        self._point_parameters(slot)
        private: dict[str, LinearFn] = {}
        loaded: set[str] = set()
        done: set[str] = set()
        for names in group_by_layer(reader.manifest.tensors):
            loaded |= load_group(self._twin, verified_tensors(reader, names))
            ready = self._ready(layer_of(names[0]), done)
            private |= self._process(ready, slot)
            done |= {s.source for s in ready}
        missing = sorted({s.source for s in self._slots} - loaded)
        if missing:
            raise MissingTensor(missing[0])
        return private

    def _ready(self, layer: str, done: set[str]) -> list[Slot]:
        """Sources whose tensors have all been loaded once `layer` is; the last group ("") completes the rest."""
        own = [s for s in self._slots if s.name == s.source and s.source not in done]
        return own if not layer else [s for s in own if layer_of(s.name) == layer]

    def _point_parameters(self, slot: Memory) -> None:
        """Aim each twin parameter at its place in the slot, or at scratch where its bytes are reordered afterwards."""
        plain = self._layout.plain
        for s in self._slots:
            if s.name != s.source:
                continue
            entry = plain.get(s.source)
            if entry is not None and not slot.built and entry.dtype == dtype_name(s.parameter):
                s.parameter.data = entry.view(slot.data)
            else:
                s.parameter.data = self._scratch_for(s)

    def _scratch_for(self, slot: Slot) -> torch.Tensor:
        """Raw weights of one decoder layer; the next layer reuses them."""
        role = re.sub(r"\.\d+(?=\.)", ".*", slot.name)
        parameter = slot.parameter
        if role not in self._scratch or self._scratch[role].shape != parameter.shape:
            self._scratch[role] = torch.empty(parameter.shape, dtype=parameter.dtype, device=self._device)
        return self._scratch[role]

    def _process(self, ready: list[Slot], slot: Memory) -> dict[str, LinearFn]:
        """Reorder what was loaded into what the kernels want."""
        plain, packed = self._layout.plain, self._layout.packed
        private: dict[str, LinearFn] = {}
        users = {s.source: self._layout.kernels[s.name] for s in self._slots if s.role == "linear"}
        for s in ready:
            raw = s.parameter.data
            if s.source in packed and not slot.built:
                pack_into(packed[s.source].view(slot.data), raw)
            if users.get(s.source) == "onednn":
                private[s.source] = onednn_linear(raw)
            entry = plain.get(s.source)
            if entry is not None and not slot.built and entry.dtype != dtype_name(raw):
                entry.view(slot.data).copy_(raw)
        return private


def verified_tensors(reader: SlotReader, names: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) views on the published slot, each checked against its digest just before it is read."""
    for name in names:
        reader.verify(name)
        entry = reader.manifest.tensors[name]
        if entry.nbytes >= YIELD_BYTES:
            time.sleep(min(LONGEST_YIELD_S, entry.nbytes / YIELD_RATE))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the mapping is read-only, and nothing here writes to it
            flat = torch.frombuffer(reader.buffer(name), dtype=getattr(torch, entry.dtype)) if entry.nbytes else None
        yield name, (torch.empty(entry.shape) if flat is None else flat.view(entry.shape))


def describe(error: Exception) -> dict[str, str | None]:
    """The wire form of a staging failure: what broke and, where one is to blame, which tensor."""
    if isinstance(error, WeightSyncError):
        return error.to_json()
    return {"code": "staging_failed", "message": str(error) or type(error).__name__, "tensor": None}


def dtype_name(tensor: torch.Tensor) -> str:
    """ "bfloat16" for torch.bfloat16, as manifests and layouts write it."""
    return str(tensor.dtype).removeprefix("torch.")


def use_one_core() -> None:
    """Let this thread run anywhere, with one OpenMP thread: the decode threads keep their cores and their team."""
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    for set_threads in _openmp_setters():
        set_threads(1)


def _openmp_setters() -> list[Callable[[int], None]]:
    """`omp_set_num_threads` of every OpenMP runtime in the process; it acts on the calling thread alone."""
    maps = Path("/proc/self/maps").read_text()
    paths = sorted(set(re.findall(r"(/\S*lib(?:gomp|iomp5|omp)[^/\s]*\.so\S*)", maps)))
    return [ctypes.CDLL(path).omp_set_num_threads for path in paths]
