"""Which kernel runs a linear layer on this machine, and the weight layout that kernel wants.

`packed`: vLLM's VNNI-packed GEMM. Its weight is a plain tensor, so it can lie in shared memory and be swapped by
          changing a pointer. Needs AVX512-BF16 and bf16 weights.
`onednn`: vLLM's default on CPU. The packed bytes are private to C++, so each instance builds its own.
`plain`:  the checkpoint's own layout, as accelerators and unpackable layers want it, and CPUs for whose instructions
          oneDNN has no kernel of the weight's type (bf16 without AVX-512, say); vLLM then uses torch, too.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Literal

import torch

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
