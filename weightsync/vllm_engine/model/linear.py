"""The kernel that multiplies by an unquantised matrix on a CPU: always the one that stock vLLM would take.

`packed`: the weight lies in the layout slot in the order that the kernel reads: blocks of rows, and in a block the
          4-byte words of its rows side by side. Instances share it, and a commit changes a pointer. oneDNN reads this
          order, through torch, as one of its own; vLLM's kernel for small weights reads it, too.
`private`: the kernel keeps a copy in an order of its own, and each instance builds one. oneDNN takes that path for
          shapes that it pads, and for bf16 on a CPU that multiplies bf16 by way of fp32.
`plain`:  the checkpoint's own order, as accelerators want it, and CPUs for whose instructions oneDNN has no kernel of
          the weight's type (bf16 without AVX-512, say); vLLM then uses torch, too.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch

Kernel = Literal["packed", "private", "plain"]
LinearFn = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
KERNEL_ENV = "HOTSWAP_LINEAR_KERNEL"
SMALL_LANES = 32  # rows in a block of vLLM's kernel for small weights
ONEDNN_LANES = (32, 64, 16, 48)
WORD = 4  # bytes
PACK_BYTES = 1 << 20


def choose_kernel(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Kernel:
    """The kernel for a weight of `shape` (out, in). HOTSWAP_LINEAR_KERNEL=private|plain rules out those before it."""
    if device.type != "cpu" or len(shape) != 2:
        return "plain"
    limit = os.environ.get(KERNEL_ENV, "packed")
    if limit == "packed" and lanes(shape[0], shape[1], dtype):
        return "packed"
    return "private" if limit != "plain" and onednn_takes(dtype) else "plain"


def lanes(out: int, inner: int, dtype: torch.dtype) -> int:
    """Rows in a block of the packed order of such a weight; 0 where its kernel reads no packed order."""
    if inner * dtype.itemsize % (16 * WORD):
        return 0
    if is_small(out, inner, dtype):
        return SMALL_LANES if dtype is torch.bfloat16 and out % 16 == 0 else 0
    found = onednn_order(out, inner, dtype)
    return found[0] if found is not None else 0


def is_small(out: int, inner: int, dtype: torch.dtype) -> bool:
    """Whether vLLM has a kernel of its own for this weight, because it is small. That kernel adds its bias in fp32."""
    from vllm.model_executor.layers.utils import check_cpu_sgl_kernel

    return bool(check_cpu_sgl_kernel(out, inner, dtype))


@functools.cache
def onednn_takes(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies by weights of this type on this CPU. It says so only when it is asked for a kernel."""
    from vllm import _custom_ops as ops

    try:
        ops.create_onednn_mm(torch.zeros(SMALL_LANES, SMALL_LANES, dtype=dtype).t(), 32)
    except RuntimeError:
        return False
    return True


def pack_into(target: torch.Tensor, weight: torch.Tensor, rows: int, word: int = WORD) -> None:
    """Write `weight` (out, in) into `target` in blocks of `rows` rows: same shape and type, another order.

    `word`: the bytes of a row that stay together. It goes a cache-sized piece at a time.
    """
    out, inner = weight.shape
    kind = torch.int32 if word == WORD else torch.int16
    words = inner * weight.element_size() // word
    whole = out // rows * rows
    step = max(rows, PACK_BYTES // (words * word) // rows * rows)
    for start in [*range(0, whole, step), *([whole] if whole < out else [])]:
        end = min(start + step, whole) if start < whole else out
        width = rows if start < whole else out - start
        source = weight[start:end].contiguous().view(kind).view(-1, width, words)
        target[start:end].view(kind).view(-1, words, width).copy_(source.transpose(1, 2))


def packed_linear(packed: torch.Tensor) -> LinearFn:
    """y = x W^T + b on a packed weight (out, in), which it reads in place."""
    from vllm import _custom_ops as ops

    out, inner = packed.shape
    if is_small(out, inner, packed.dtype):
        return lambda x, _weight, bias: ops.weight_packed_linear_cpu(x, packed, out, bias)
    multiply, weight = torch.ops.mkldnn._linear_pointwise.default, _as_onednn(packed)
    held = weight, packed  # oneDNN's tensor does not own its memory
    return lambda x, _weight, bias: multiply(x, held[0], bias, "none", [], "")


def private_linear(weight: torch.Tensor) -> LinearFn:
    """y = x W^T + b; the kernel copies `weight` (out, in) into an order of its own."""
    from vllm import _custom_ops as ops

    out, inner = weight.shape
    if is_small(out, inner, weight.dtype):
        packed = torch.ops._C.convert_weight_packed(weight)
        return lambda x, _weight, bias: ops.weight_packed_linear_cpu(x, packed, out, bias)
    handler = ops.create_onednn_mm(weight.t(), 32)
    return lambda x, _weight, bias: ops.onednn_mm(handler, x, bias)


def plain_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """y = x W^T + b on the weight the layer itself holds."""
    return torch.nn.functional.linear(x, weight, bias)


# oneDNN's order ------------------------------------------------------------------------------------------------------


@functools.cache
def onednn_order(out: int, inner: int, dtype: torch.dtype) -> tuple[int, bytes] | None:
    """(rows in a block, oneDNN's descriptor) of the order in which it keeps such a weight; None if it is another one.

    A pattern is packed by oneDNN and by `pack_into`, and the bytes are compared. Large weights are tried with fewer
    rows, which must be described alike.
    """
    few = out if out < 384 else 192 + out % 192
    pattern = (torch.arange(few * inner * dtype.itemsize // 2) % 0x7F00).to(torch.int16).view(dtype).view(few, inner)
    try:
        tried, described = _packed_by_onednn(pattern)
        _, whole = _packed_by_onednn(torch.zeros(out, inner, dtype=dtype)) if few != out else (tried, described)
    except RuntimeError:  # it has no kernel for this type on this CPU
        return None
    differ = whole != described
    if tried.numel() != pattern.nbytes or (whole[differ] != out).any() or (described[differ] != few).any():
        return None
    for rows in ONEDNN_LANES:
        if out % rows == 0:
            packed = torch.empty_like(pattern)
            pack_into(packed, pattern, rows)
            if torch.equal(packed.view(torch.uint8).flatten(), tried):
                return rows, whole.numpy().tobytes()
    return None


def _packed_by_onednn(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(its bytes, its descriptor as int32)."""
    onednn = torch.ops.mkldnn
    packed = onednn._reorder_linear_weight(weight, None)
    size, address = onednn._nbytes(packed), onednn.data_ptr(packed)
    memory = (ctypes.c_uint8 * size).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8).clone(), onednn._get_mkldnn_serialized_md(packed).view(
        torch.int32
    ).clone()


def _as_onednn(packed: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor of oneDNN's. The caller keeps `packed`."""
    out, inner = packed.shape
    found = onednn_order(out, inner, packed.dtype)
    assert found is not None
    library, (_, descriptor) = _library(), found
    kind = getattr(library, f"aoti_torch_dtype_{str(packed.dtype).removeprefix('torch.')}")()
    handle = ctypes.c_void_p()
    failed = library.aoti_torch_create_tensor_from_blob_v2(
        ctypes.c_void_p(packed.data_ptr()),
        ctypes.c_int64(2),
        (ctypes.c_int64 * 2)(out, inner),
        (ctypes.c_int64 * 2)(inner, 1),
        ctypes.c_int64(0),
        ctypes.c_int32(kind),
        ctypes.c_int32(library.aoti_torch_device_type_cpu()),
        ctypes.c_int32(0),
        ctypes.byref(handle),
        ctypes.c_int32(library.aoti_torch_layout__mkldnn()),
        (ctypes.c_uint8 * len(descriptor)).from_buffer_copy(descriptor),
        ctypes.c_int64(len(descriptor)),
    )
    assert not failed, "torch makes no oneDNN tensor of a packed weight"
    return torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr(_capsule(handle, None, None))


@functools.cache
def _library() -> Any:
    """torch's stable C interface: its Python one makes no such tensor from memory that is there."""
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))


_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype, _capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
