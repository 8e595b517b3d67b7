"""Copies torch tensors into slots. The only module of the package that imports torch, and only once torch is there."""

from __future__ import annotations

import torch
import xxhash

from weightsync.errors import UnsupportedDtype
from weightsync.manifest import TensorSpec

CHUNK = 1 << 20  # copied, then digested while still in the second-level cache


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    """Raises UnsupportedDtype for tensors without plain storage (sparse, quantized, on `meta`)."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        raise UnsupportedDtype(name, f"{tensor.dtype} ({tensor.layout}, on {tensor.device})")
    return TensorSpec(dtype_name(tensor.dtype), tuple(tensor.shape))


def dtype_name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def copy_digest(target: memoryview, tensor: torch.Tensor) -> str:
    """Copy all of `tensor` to `target` (uint8 [nbytes], in a slot); returns the xxh3_128 of what was written there."""
    hasher = xxhash.xxh3_128()
    source = tensor.detach()
    if source.device.type != "cpu" or not source.is_contiguous():
        copy_strided(target, source, tuple(source.shape), 0, 0)
        hasher.update(target)
    elif len(target):
        flat = source.reshape(-1).view(torch.uint8)
        slot = torch.frombuffer(target, dtype=torch.uint8)
        for start in range(0, len(target), CHUNK):
            end = min(start + CHUNK, len(target))
            slot[start:end].copy_(flat[start:end])
            hasher.update(target[start:end])
    digest: str = hasher.hexdigest()
    return digest


def copy_strided(target: memoryview, tensor: torch.Tensor, shape: tuple[int, ...], dim: int, start: int) -> None:
    """Copy `tensor` to where it belongs in a tensor of `shape` that lies in `target`: from `start` on along `dim`."""
    if tensor.numel():
        whole = torch.frombuffer(target, dtype=tensor.dtype).view(shape)
        part = whole.narrow(dim, start, tensor.shape[dim]) if shape else whole
        part.copy_(tensor.detach())
