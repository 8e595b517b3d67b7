"""What can be published: torch tensors, numpy arrays and raw bytes, behind two functions.

Torch is never imported from here: who passes a torch tensor has it loaded already.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from weightsync.dtypes import ITEMSIZE
from weightsync.errors import UnsupportedDtype
from weightsync.manifest import TensorSpec

CHUNK = 1 << 20  # copied, then digested while still in the second-level cache


@dataclass(frozen=True)
class RawTensor:
    """A tensor as bytes: uint8 [nbytes] in `data`, what they mean in `spec`."""

    spec: TensorSpec
    data: memoryview


def spec_of(name: str, tensor: Any) -> TensorSpec:
    """Element type and shape of a torch tensor, numpy array or RawTensor. Raises UnsupportedDtype."""
    if isinstance(tensor, RawTensor):
        return tensor.spec
    if isinstance(tensor, (np.ndarray, np.generic)):
        dtype = str(tensor.dtype)
        if dtype not in ITEMSIZE or not tensor.dtype.isnative:
            raise UnsupportedDtype(name, dtype)
        return TensorSpec(dtype, tuple(tensor.shape))
    if _is_torch(tensor):
        from weightsync import tensors

        return tensors.spec_of(name, tensor)
    raise UnsupportedDtype(name, f"a {type(tensor).__name__}, not a tensor")


def copy_digest(target: memoryview, tensor: Any) -> str:
    """Copy all of `tensor` to `target` (uint8 [nbytes]); returns the xxh3_128 of the bytes as they now are there."""
    if _is_torch(tensor):
        from weightsync import tensors

        return tensors.copy_digest(target, tensor)
    source = np.frombuffer(tensor.data, np.uint8) if isinstance(tensor, RawTensor) else _flat_bytes(tensor)
    slot = np.frombuffer(target, np.uint8)
    hasher = xxhash.xxh3_128()
    for start in range(0, len(target), CHUNK):
        end = min(start + CHUNK, len(target))
        np.copyto(slot[start:end], source[start:end])
        hasher.update(target[start:end])
    digest: str = hasher.hexdigest()
    return digest


def copy_slice(target: memoryview, tensor: Any, shape: tuple[int, ...], dim: int, start: int) -> None:
    """Copy `tensor` into its place in a tensor of `shape` that lies in `target`: from `start` on along `dim`."""
    if _is_torch(tensor):
        from weightsync import tensors

        return tensors.copy_strided(target, tensor, shape, dim, start)
    if tensor.size:
        whole = np.frombuffer(target, tensor.dtype).reshape(shape)
        np.copyto(whole[(slice(None),) * dim + (slice(start, start + tensor.shape[dim]),)], tensor)
    return None


def _flat_bytes(array: Any) -> Any:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _is_torch(tensor: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(tensor, torch.Tensor)
