"""Where each kernel tensor of a version lies in a layout slot.

The offsets follow from the model, the kernels and the rank. `Layout.fingerprint` is of these and of what fills the
slot: the releases of our format, of vLLM's loaders and of torch, and the CPU. So those who share a
slot agree on its bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Container, Mapping
from dataclasses import astuple, dataclass, replace
from types import MappingProxyType

import torch

from weightsync.vllm_engine.model.linear import WORD, Kernel, choose_kernel, is_small, lanes
from weightsync.vllm_engine.model.placement import Pair
from weightsync.vllm_engine.releases import PACKAGES, installed

ALIGN = 64
FORMAT = 3  # of the files in the pool


@dataclass(frozen=True)
class Entry:
    """One tensor in the slot. `source`: the parameter it is made of.

    `lanes`: rows in a block of a packed one, or 0; `word`: the bytes of a row that stay together there.
    """

    source: str
    lanes: int
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    word: int = WORD

    @property
    def packed(self) -> bool:
        return self.lanes > 0

    def view(self, data: torch.Tensor) -> torch.Tensor:
        """This tensor in `data`, the slot's bytes as uint8."""
        flat = data[self.offset : self.offset + self.nbytes]
        return flat.view(getattr(torch, self.dtype)).view(self.shape)


@dataclass(frozen=True)
class View:
    """A tensor in the slot that vLLM's processing made: `offset` in bytes; views of one storage overlap here too."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def end(self) -> int:
        last = sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))
        return self.offset + (last + 1) * getattr(torch, self.dtype).itemsize

    def of(self, data: torch.Tensor) -> torch.Tensor:
        """This tensor in `data`, the slot's bytes as uint8."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        begin = (data.storage_offset() + self.offset) // dtype.itemsize
        return torch.empty(0, dtype=dtype, device=data.device).set_(
            data.untyped_storage(), begin, self.shape, self.stride
        )


@dataclass(frozen=True)
class Layout:
    """All entries of one model on one rank. `plain[name]`, `packed[name]` by parameter name; `views` by path."""

    entries: tuple[Entry, ...]
    kernels: dict[str, Kernel]
    views: dict[str, View]
    nbytes: int
    fingerprint: str

    @property
    def plain(self) -> dict[str, Entry]:
        return {e.source: e for e in self.entries if not e.packed}

    @property
    def packed(self) -> dict[str, Entry]:
        return {e.source: e for e in self.entries if e.packed}


def plan_layout(
    pairs: list[Pair],
    device: torch.device,
    rank: int,
    world: int,
    *,
    filled: Container[str] = frozenset(),
    views: Mapping[str, View] = MappingProxyType({}),
) -> Layout:
    """Give every parameter its place; a weight may need two (a tied embedding: a table to look up, a GEMM to run).

    `filled` are the sources of buffers that the loader fills; the others stay as the model made them. `views` are
    the tensors of processed layers, with offsets from where theirs begin.
    """
    kernels = {s.name: _kernel(s, device) for s in pairs}
    widened = {s.module_name for s in pairs if kernels[s.name] in ("packed", "private") and is_small(*_matrix(s))}
    wanted: dict[tuple[str, int], tuple[Pair, torch.dtype]] = {}
    for pair in pairs:
        if pair.role in ("processed", "shared") or not (pair.required or pair.source in filled):
            continue
        dtype = pair.parameter.dtype
        if pair.leaf == "bias" and pair.module_name in widened:
            dtype = torch.float32
        if kernels[pair.name] == "packed":
            wanted.setdefault((pair.source, lanes(*_matrix(pair))), (pair, dtype))
        if kernels[pair.name] == "plain" or hasattr(pair.live, "org_vocab_size"):
            wanted.setdefault((pair.source, 0), (pair, dtype))
    entries, end = _place(wanted)
    nbytes = max([end, *(end + view.end for view in views.values())])
    views = {path: replace(view, offset=end + view.offset) for path, view in views.items()}
    shapes = [[e.source, e.lanes, e.dtype, e.shape] for e in entries]
    key = json.dumps([_origin(), shapes, {path: astuple(view) for path, view in views.items()}, rank, world])
    return Layout(entries, kernels, dict(views), nbytes, hashlib.sha256(key.encode()).hexdigest()[:12])


def place_views(made: Mapping[str, torch.Tensor], end: int) -> tuple[dict[str, View], int]:
    """Place tensors from `end` on, those of one storage as they lie in it; returns their views and the new end."""
    spans: dict[int, list[int]] = {}
    for tensor in made.values():
        begin, stop = extent(tensor)
        span = spans.setdefault(tensor.untyped_storage()._cdata, [begin, stop])
        span[:] = min(span[0], begin), max(span[1], stop)
    offsets: dict[int, int] = {}
    for storage, (begin, stop) in spans.items():
        begin -= begin % ALIGN
        offsets[storage] = end - begin
        end += -(-(stop - begin) // ALIGN) * ALIGN
    views = {}
    for path, tensor in made.items():
        offset = offsets[tensor.untyped_storage()._cdata] + extent(tensor)[0]
        dtype = str(tensor.dtype).removeprefix("torch.")
        views[path] = View(dtype, tuple(tensor.shape), tuple(tensor.stride()), offset)
    return views, end


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The bytes of its storage from its first element to the end of its last one."""
    begin = tensor.storage_offset() * tensor.element_size()
    if not tensor.numel():
        return begin, begin
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * tensor.element_size()


def words_of(matrix: torch.Tensor) -> torch.Tensor:
    """A matrix as 16-bit words, or as bytes for types of 1 byte; in place."""
    return matrix.view(torch.uint8 if matrix.dtype.itemsize == 1 else torch.int16)


def _origin() -> list[object]:
    """The origin of slots here. During a rolling upgrade two releases share an arena: they keep slots apart."""
    cpu = sorted(name for name, value in torch.cpu.get_capabilities().items() if value is True)
    packages = [installed(name) for name in PACKAGES]
    return [FORMAT, packages, torch.__version__, torch.backends.cpu.get_cpu_capability(), cpu]


def _matrix(pair: Pair) -> tuple[int, int, torch.dtype]:
    out, inner = pair.parameter.shape
    return out, inner, pair.parameter.dtype


def _place(wanted: dict[tuple[str, int], tuple[Pair, torch.dtype]]) -> tuple[tuple[Entry, ...], int]:
    entries: list[Entry] = []
    end = 0
    for (source, rows), (pair, dtype) in wanted.items():
        nbytes = pair.parameter.numel() * dtype.itemsize
        entries.append(Entry(source, rows, str(dtype).removeprefix("torch."), tuple(pair.parameter.shape), end, nbytes))
        end += -(-nbytes // ALIGN) * ALIGN
    return tuple(entries), end


def _kernel(pair: Pair, device: torch.device) -> Kernel:
    if pair.role != "linear":
        return "plain"
    return choose_kernel(tuple(pair.parameter.shape), pair.parameter.dtype, device)
