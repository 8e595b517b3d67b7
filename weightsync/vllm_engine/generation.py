"""One version, ready to run: what a commit flips the live model to, and what a rollback flips it back to.

On an accelerator captured graphs hold the addresses of the live weights, so their contents change: a version is staged
into a buffer on the device; a commit exchanges it with the live tensors, on the device, between two batches. What the
buffer holds afterwards is the version before, so a rollback is the same exchange again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from weightsync.vllm_engine.layout import Layout, LinearFn, packed_linear, plain_linear
from weightsync.vllm_engine.placement import Pair


class Memory(Protocol):
    """The memory of a generation's tensors: a layout slot in shared memory, or a buffer on the device."""

    data: torch.Tensor
    built: bool

    @property
    def sums(self) -> dict[str, list[list[int]]]:
        """Those that `seal` was given, by whoever built it."""

    def seal(self, key: str, sums: dict[str, list[list[int]]], /) -> None:
        """The version `key` is complete; `sums` are those of its parts."""

    def release(self) -> None:
        """Nobody runs on it any more."""


@dataclass(frozen=True)
class Flip:
    """New state of one live module: the parameters to place and the kernel that runs it (None: leave as it is)."""

    module: nn.Module
    parameters: dict[str, nn.Parameter]
    linear: LinearFn | None


@dataclass
class Generation:
    """Every flip of one version, and the memory that must outlive them."""

    version: int
    digest: str
    flips: list[Flip]
    slot: Memory | None = None
    private: dict[str, LinearFn] = field(default_factory=dict)
    sums: dict[str, list[list[int]]] = field(default_factory=dict)

    def commit(self) -> list[Any]:
        """Point the live model at this version. Runs between two batches; only references change.

        Returns what was replaced: freeing it can take tens of milliseconds, so the caller drops it elsewhere.
        """
        replaced: list[Any] = []
        for flip in self.flips:
            state = flip.module.__dict__
            replaced += [state["_parameters"].get(name) for name in flip.parameters]
            state["_parameters"].update(flip.parameters)
            if flip.linear is not None:
                replaced.append(state.get("cpu_linear"))
                state["cpu_linear"] = flip.linear
        return replaced

    def displaced(self, live: Generation | None) -> Generation | None:
        """What a rollback of this generation's commit flips to, given what was live before it."""
        return live

    def release(self) -> None:
        """Drop the memory; call it on a thread that decodes nothing, unmapping takes tens of milliseconds."""
        self.flips.clear()
        self.private.clear()
        if self.slot is not None:
            self.slot.release()
            self.slot = None


def build_flips(pairs: list[Pair], layout: Layout, data: torch.Tensor, private: dict[str, LinearFn]) -> list[Flip]:
    """Flips onto the tensors in `data` (the layout slot's bytes) and the `private` kernels (oneDNN), by module."""
    plain, packed = layout.plain, layout.packed
    parameters: dict[str, dict[str, nn.Parameter]] = {}
    linears: dict[str, LinearFn] = {}
    modules = {pair.module_name: pair.live for pair in pairs}
    for pair in pairs:
        if pair.role == "linear" and layout.kernels[pair.name] == "packed":
            linears[pair.module_name] = packed_linear(packed[pair.source].view(data))
        elif pair.role != "plain":
            linears[pair.module_name] = private.get(pair.source, plain_linear)
        if pair.source in plain:
            tensor = plain[pair.source].view(data)
            parameters.setdefault(pair.module_name, {})[pair.leaf] = _like(tensor, pair.live._parameters[pair.leaf])
    return [Flip(modules[n], parameters.get(n, {}), linears.get(n)) for n in modules]


def _like(tensor: torch.Tensor, old: nn.Parameter | None) -> nn.Parameter:
    """`tensor` as a parameter of `old`'s class, keeping the attributes vLLM's loaders hung on it."""
    if old is None:
        return nn.Parameter(tensor, requires_grad=False)
    new: nn.Parameter = torch.Tensor._make_subclass(type(old), tensor, False)  # type: ignore[assignment]
    new.__dict__.update(old.__dict__)
    return new


@dataclass
class DeviceBuffer:
    """Stands in for a layout slot: uint8 [nbytes] on the device, owned by one worker."""

    data: torch.Tensor
    built: bool = False
    sums: dict[str, list[list[int]]] = field(default_factory=dict)

    def seal(self, _key: str, _sums: dict[str, list[list[int]]]) -> None:
        """The copies were queued by the staging thread; the commit must find them done."""
        if self.data.is_cuda:
            torch.cuda.synchronize(self.data.device)
        self.built = True

    def release(self) -> None:
        self.data = self.data.new_empty(0)


class DevicePool:
    """Hands out one buffer per staging; the allocator reuses what is released."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._nbytes, self._device = nbytes, device

    def acquire(self, _key: str) -> DeviceBuffer:
        return DeviceBuffer(torch.empty(self._nbytes, dtype=torch.uint8, device=self._device))


@dataclass
class ExchangeGeneration(Generation):
    """A generation whose commit exchanges contents; the object then holds the weights it displaced."""

    def commit(self) -> list[Any]:
        with torch.no_grad():
            for flip in self.flips:
                for name, staged in flip.parameters.items():
                    live = flip.module._parameters[name]
                    assert live is not None
                    before = live.data.clone()
                    live.data.copy_(staged.data)
                    staged.data.copy_(before)
        return []

    def displaced(self, live: Generation | None) -> Generation | None:
        if live is None:
            self.release()  # the weights the model was started with are nobody's version
            return None
        return ExchangeGeneration(live.version, live.digest, self.flips, self.slot, self.private, live.sums)
