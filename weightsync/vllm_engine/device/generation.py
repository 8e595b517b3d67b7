"""One version, ready to run: what a commit flips the live model to, and what a rollback flips it back to.

A flip has two parts. `tensors`: a live tensor and the staged one whose contents it gets; every holder of the live
tensor follows. `changes`: attributes of live objects that are replaced as a whole, kernels above all.

On a CPU a live tensor is pointed at the memory of the staged one (cpu.py). On an accelerator captured graphs hold the
addresses of the live weights, so the staged bytes are copied into them (cuda.py), or mapped there (remap.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from weightsync.errors import unsupported_model
from weightsync.format.fingerprint import Words
from weightsync.memory.receiver import SlotReader
from weightsync.vllm_engine.device.pacing import Pacer, Staging
from weightsync.vllm_engine.device.pool import Notes
from weightsync.vllm_engine.model.layout import Layout
from weightsync.vllm_engine.model.linear import LinearFn, packed_linear, plain_linear
from weightsync.vllm_engine.model.placement import Pair, held
from weightsync.vllm_engine.model.processing import GONE, Change

Pace = Callable[[int], None]


class Memory(Protocol):
    """The memory of a generation's tensors: a layout slot in shared memory, or a buffer on the device."""

    data: torch.Tensor
    built: bool

    @property
    def notes(self) -> Notes:
        """Those that `seal` was given, by whoever built it."""

    def seal(self, key: str, notes: Notes, /) -> None:
        """The version `key` is complete."""

    def release(self) -> None:
        """Give the memory up: this worker no longer runs on it."""


class StagingDevice(Protocol):
    """Where versions wait for their commit, how they get there, and what a commit does: `Cpu`, `Cuda` or `Remap`."""

    @property
    def device(self) -> torch.device:
        """Where the running weights lie."""

    @property
    def twin(self) -> torch.device:
        """Where the tensors of the model's twin are made."""

    @property
    def replaces(self) -> bool:
        """Whether a commit may replace attributes of the running model, and not only contents."""

    @property
    def piece_nbytes(self) -> int:
        """How much is read, copied and summed at a time."""

    @property
    def digesting_threads(self) -> int:
        """How many threads of this host digest published bytes beside the copies; 0: what copies them does."""

    @property
    def generation(self) -> type[Generation]:
        """A version whose commit suits the device."""

    def pacer(self, model: nn.Module, staging: Staging, /) -> Pacer:
        """A pacer, which a staging calls between its pieces, beside the running `model`."""

    def staging(self) -> AbstractContextManager[Any]:
        """The context in which a staging goes on, on its thread."""

    def reading(self, reader: SlotReader, /) -> AbstractContextManager[Any]:
        """Within a staging: the context of copies out of this slot. No such copy is under way when the context ends."""

    def scratch(self) -> AbstractContextManager[Any]:
        """Within a staging: the context in which a version is built. Its memory is free again once that is done."""

    @property
    def copies(self) -> int | None:
        """How many versions lie on the device or have room there; None where a commit changes references."""

    def reserve(self, model: nn.Module, /) -> None:
        """Take device memory for versions of `model`, before the KV cache gets the rest."""

    def arranged(self, layout: Layout, running: Mapping[str, Sequence[torch.Tensor]], /) -> Layout:
        """`layout` with each tensor where a commit needs it; `running`: the live tensors that get it.

        Raises EngineError.
        """

    def acquire(self, directory: Path, layout: Layout, key: str, /) -> Memory:
        """Memory for the version `key`. Shared memory is in `directory`."""

    def prepare_swaps(self) -> None:
        """After the first version: get ready for others."""

    def copy(self, target: torch.Tensor, source: Words, /) -> None:
        """Queue a copy of words on the host onto a matrix of as many. The source may change once this returns, but for
        what lies in the slot that is `reading`."""

    def expected_flip_ms(self, memory: Memory, /) -> float | None:
        """How long a commit of what lies there will stall decoding; None where references change, or unknown."""

    def vacate(self) -> None:
        """Give back what a sleeping instance does not need. The next `acquire` takes it again."""


KV_SCALES = ("_k_scale_float", "_v_scale_float")  # of vLLM's attention: what a quantised KV cache was written with


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype is other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@dataclass
class Flips:
    """The work of a commit: (live tensor, staged tensor) pairs, no live tensor twice, and changes of attributes."""

    tensors: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)


@dataclass
class Generation:
    """The flips of one version, and the memory that must outlive them."""

    version: int
    digest: str
    flips: Flips
    slot: Memory | None = None
    sums: dict[str, list[list[int]]] = field(default_factory=dict)
    built: str = ""
    kv_scales: dict[str, Any] = field(init=False)
    waited_ms: float = field(init=False, default=0.0)  # of the last commit's time: for steps that the device had queued

    def __post_init__(self) -> None:
        self.kv_scales = {c.path: c.value for c in self.flips.changes if c.key in KV_SCALES}

    def commit(self) -> list[Any]:
        """Point the live model at this version. Runs between two batches; only references change.

        Returns what was replaced: freeing it can take tens of milliseconds, so the caller drops it elsewhere.
        """
        with torch._C.DisableTorchFunctionSubclass():  # else Python runs for each of vLLM's parameters
            replaced: list[Any] = [live.data for live, _ in self.flips.tensors]
            for live, staged in self.flips.tensors:
                live.data = staged
        return replaced + self._change()

    def _change(self) -> list[Any]:
        replaced = []
        for change in self.flips.changes:
            if change.value is GONE:
                replaced.append(change.holder.pop(change.key, None))
            else:
                replaced.append(change.holder.get(change.key))
                change.holder[change.key] = change.value
        return replaced

    def release(self) -> None:
        """Drop the memory; call it on a thread that decodes nothing, unmapping takes tens of milliseconds."""
        self.flips = Flips()
        if self.slot is not None:
            self.slot.release()
            self.slot = None


def running(pairs: list[Pair], layout: Layout) -> Iterator[tuple[str, torch.Tensor]]:
    """(source, live tensor) of what gets the contents of the layout's plain tensors."""
    plain = layout.plain
    for pair in pairs:
        if not pair.made and pair.role != "processed" and pair.source in plain:
            live = held(pair.live, pair.leaf)
            assert live is not None
            yield pair.source, live


def build_flips(pairs: list[Pair], layout: Layout, data: torch.Tensor, private: dict[str, LinearFn]) -> Flips:
    """Flips onto the tensors in `data` (the layout slot's bytes) and the `private` kernels.

    Raises EngineError where one running tensor would get two different ones.
    """
    plain, packed = layout.plain, layout.packed
    tensors: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # two modules may hold one tensor
    sources: dict[int, str] = {}
    changes: dict[str, Change] = {}
    for pair in pairs:
        path, state = f"{pair.module_name}.cpu_linear", pair.live.__dict__
        if pair.role == "linear" and layout.kernels[pair.name] == "packed":
            changes[path] = Change(path, state, "cpu_linear", packed_linear(packed[pair.source].view(data)))
        elif pair.role in ("linear", "table"):
            changes[path] = Change(path, state, "cpu_linear", private.get(pair.source, plain_linear))
        if pair.made:
            made = nn.Parameter(plain[pair.source].view(data), False) if pair.source in plain else None
            changes[pair.name] = Change(pair.name, pair.live._parameters, pair.leaf, made)
    for source, live in running(pairs, layout):
        staged = plain[source].view(data)
        first = sources.setdefault(id(live), source)
        if first != source and not _alike(tensors[id(live)][1], staged):
            raise unsupported_model(
                f"{first!r} and {source!r} are one tensor in the running model, and differ in this version: "
                "start an instance on it"
            )
        tensors[id(live)] = live, staged
    return Flips(list(tensors.values()), list(changes.values()))
