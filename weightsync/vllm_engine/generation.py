"""One version, ready to run: what a commit flips the live model to, and what a rollback flips it back to.

A flip has two parts. `tensors`: a live tensor and the staged one whose contents it gets; every holder of the live
tensor follows. `changes`: attributes of live objects that are replaced as a whole, kernels above all.

On a CPU a live tensor is pointed at the memory of the staged one. On an accelerator captured graphs hold the addresses
of the live weights, so the staged bytes are copied into them, on the device, between two batches. The staged buffer
itself never changes: a rollback copies the buffer of the version before, and so does a flip that failed halfway.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from weightsync.vllm_engine.layout import Layout
from weightsync.vllm_engine.linear import LinearFn, packed_linear, plain_linear
from weightsync.vllm_engine.placement import Pair, held
from weightsync.vllm_engine.pool import Notes
from weightsync.vllm_engine.processing import GONE, Change


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
        """Nobody runs on it any more."""


KV_SCALES = ("_k_scale_float", "_v_scale_float")  # of vLLM's attention: what a quantised KV cache was written with


@dataclass
class Flips:
    """What a commit does: (live tensor, staged tensor) pairs, no live tensor twice, and changes of attributes."""

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
    kv_scales: dict[str, Any] = field(init=False)

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

    def displaced(self, live: Generation | None) -> Generation | None:
        """What a rollback of this generation's commit flips to, given what was live before it."""
        return live

    def release(self) -> None:
        """Drop the memory; call it on a thread that decodes nothing, unmapping takes tens of milliseconds."""
        self.flips = Flips()
        if self.slot is not None:
            self.slot.release()
            self.slot = None


class CopyGeneration(Generation):
    """A generation whose commit copies its contents into the live tensors, whose addresses stay."""

    def commit(self) -> list[Any]:
        if self.flips.tensors:
            lives, staged = zip(*self.flips.tensors, strict=True)
            with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
                torch._foreach_copy_([live.data for live in lives], list(staged))
            if self.slot is not None and self.slot.data.is_cuda:
                # Built on the stager's stream, read on this one: the buffer is not reused before the copy is done.
                self.slot.data.record_stream(torch.cuda.current_stream(self.slot.data.device))
        return self._change()


def build_flips(pairs: list[Pair], layout: Layout, data: torch.Tensor, private: dict[str, LinearFn]) -> Flips:
    """Flips onto the tensors in `data` (the layout slot's bytes) and the `private` kernels."""
    plain, packed = layout.plain, layout.packed
    tensors: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # two modules may hold one tensor
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
        elif pair.role != "processed" and pair.source in plain:
            live = held(pair.live, pair.leaf)
            assert live is not None
            tensors[id(live)] = live, plain[pair.source].view(data)
    return Flips(list(tensors.values()), list(changes.values()))


@dataclass
class DeviceBuffer:
    """Stands in for a layout slot: uint8 [nbytes] on the device, owned by one worker."""

    data: torch.Tensor
    built: bool = False
    notes: Notes = field(default_factory=Notes)

    def seal(self, _key: str, _notes: Notes) -> None:
        """The staging thread queued the copies on its stream; the commit, on another one, must find them done."""
        if self.data.is_cuda:
            torch.cuda.current_stream(self.data.device).synchronize()
        self.built = True

    def release(self) -> None:
        self.data = self.data.new_empty(0)


class DevicePool:
    """Hands out one buffer per staging; the allocator reuses what is released."""

    def __init__(self, fingerprint: str, nbytes: int, device: torch.device) -> None:
        self.fingerprint, self._nbytes, self._device = fingerprint, nbytes, device

    def acquire(self, _key: str) -> DeviceBuffer:
        return DeviceBuffer(torch.empty(self._nbytes, dtype=torch.uint8, device=self._device))
