"""What can be published: torch tensors, numpy arrays and tensors in files, behind three functions.

A program that passes a torch tensor has loaded torch already, so only functions for such tensors import it.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import xxhash

from weightsync.digests.fingerprint import Running
from weightsync.dtypes import ITEMSIZE
from weightsync.errors import CheckpointError, UnsupportedDtype
from weightsync.manifest import TensorSpec

if TYPE_CHECKING:
    import torch

CHUNK = 512 << 10


class Sums(NamedTuple):
    """Of one tensor's bytes: xxh3_128 in hex, and the checksum that `weightsync.digests.fingerprint` is made of."""

    digest: str
    checksum: int


@dataclass(frozen=True)
class FileTensor:
    """A tensor in an open file, from byte `begin` on. Read, not mapped: a file cut short is an error, not a signal."""

    spec: TensorSpec
    fd: int
    begin: int
    path: str


@dataclass(frozen=True)
class FilledTensor:
    """A tensor made while it is written: `fill(target, start)` is asked for every `chunk` bytes of it, in order."""

    spec: TensorSpec
    fill: Callable[[memoryview, int], object]
    chunk: int = CHUNK


@dataclass(frozen=True)
class RawTensor:
    """A tensor whose bytes are `data` (uint8 [spec.nbytes], contiguous, writable)."""

    spec: TensorSpec
    data: memoryview


def spec_of(name: str, tensor: Any) -> TensorSpec:
    """Element type and shape of a torch tensor, numpy array or one of the classes above. Raises UnsupportedDtype."""
    if isinstance(tensor, (FileTensor, FilledTensor, RawTensor)):
        return tensor.spec
    if isinstance(tensor, (np.ndarray, np.generic)):
        dtype = str(tensor.dtype)
        if dtype not in ITEMSIZE or not tensor.dtype.isnative:
            raise UnsupportedDtype(name, dtype)
        return TensorSpec(dtype, tuple(tensor.shape))
    if _is_torch(tensor):
        return _torch_spec(name, tensor)
    raise UnsupportedDtype(name, f"a {type(tensor).__name__}, not a tensor")


def copy_sums(target: memoryview, tensor: Any, spec: TensorSpec) -> Sums:
    """Copy all of `tensor` to `target` (uint8 [nbytes]); returns the sums of the bytes as they now are there."""
    if _is_torch(tensor):
        return _copy_torch_sums(target, tensor, spec)
    if isinstance(tensor, FileTensor):
        return _sum_chunks(target, spec, lambda chunk, start: _read_into(chunk, tensor, start))
    if isinstance(tensor, FilledTensor):
        return _sum_chunks(target, spec, tensor.fill, tensor.chunk)
    if isinstance(tensor, RawTensor):
        return copy_sums_address(target, _address_of(tensor.data), spec)
    array = np.ascontiguousarray(tensor)
    return copy_sums_address(target, array.ctypes.data, spec)


def copy_sums_address(target: memoryview, source: int, spec: TensorSpec) -> Sums:
    """As `copy_sums`, from contiguous memory at the address `source`; releases the interpreter lock."""
    address = _address_of(target)
    return _sum_chunks(target, spec, lambda chunk, start: ctypes.memmove(address + start, source + start, len(chunk)))


def sums_of(data: memoryview, spec: TensorSpec) -> Sums:
    """The sums of a tensor that lies in `data` already."""
    return _sum_chunks(data, spec, lambda _chunk, _start: None)


def _sum_chunks(
    target: memoryview, spec: TensorSpec, fill: Callable[[memoryview, int], object], size: int = CHUNK
) -> Sums:
    """Have `target` filled piece by piece, and sum each piece while it is still in the second-level cache."""
    hasher, running = xxhash.xxh3_128(), Running(spec.dtype, spec.shape)
    for start in range(0, len(target), size):
        chunk = target[start : start + size]
        fill(chunk, start)
        hasher.update(chunk)
        running.update(chunk)
    return Sums(hasher.hexdigest(), running.sum)


def copy_slice(target: memoryview, tensor: Any, shape: tuple[int, ...], dim: int, start: int) -> None:
    """Copy `tensor` into its place in a tensor of `shape` that lies in `target`: from `start` on along `dim`."""
    if _is_torch(tensor):
        return _copy_torch_slice(target, tensor, shape, dim, start)
    if isinstance(tensor, RawTensor):
        return _copy_raw_slice(target, tensor, shape, dim, start)
    if tensor.size:
        whole = np.frombuffer(target, tensor.dtype).reshape(shape)
        np.copyto(whole[(slice(None),) * dim + (slice(start, start + tensor.shape[dim]),)], tensor)
    return None


def _copy_raw_slice(target: memoryview, raw: RawTensor, shape: tuple[int, ...], dim: int, start: int) -> None:
    row = TensorSpec(raw.spec.dtype, shape[dim + 1 :]).nbytes
    if raw.spec.nbytes:
        whole = np.frombuffer(target, np.uint8).reshape(-1, shape[dim] * row)
        part = np.frombuffer(raw.data, np.uint8).reshape(len(whole), -1)
        whole[:, start * row : start * row + part.shape[1]] = part


def _address_of(target: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(target)) if len(target) else 0


def _read_into(chunk: memoryview, stored: FileTensor, start: int) -> None:
    done = 0
    while done < len(chunk):
        count = os.preadv(stored.fd, [chunk[done:]], stored.begin + start + done)
        if count == 0:
            raise CheckpointError(stored.path, "was cut short while it was read: fetch the checkpoint again")
        done += count


def _is_torch(tensor: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(tensor, torch.Tensor)


# torch tensors


def _torch_spec(name: str, tensor: torch.Tensor) -> TensorSpec:
    """Raises UnsupportedDtype for tensors without plain bytes of their own (sparse, sharded, on `meta`, offloaded)."""
    if problem := _without_bytes(tensor):
        raise UnsupportedDtype(name, problem)
    return TensorSpec(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def _without_bytes(tensor: torch.Tensor) -> str | None:
    """Why there is nothing to copy; reading such a tensor by its address would kill the process."""
    import torch

    if hasattr(tensor, "full_tensor"):
        return "a DTensor (pass its full_tensor(), or write its local part as a slice)"
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        return f"{tensor.dtype} ({tensor.layout}, on {tensor.device})"
    last = (
        sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else -1
    )
    if tensor.untyped_storage().nbytes() < (tensor.storage_offset() + last + 1) * tensor.element_size():
        return "offloaded (its storage is empty; load it again first)"
    return None


def _copy_torch_sums(target: memoryview, tensor: torch.Tensor, spec: TensorSpec) -> Sums:
    """Copy all of `tensor` to `target` (uint8 [nbytes], in a slot); returns the sums of what was written there."""
    source = tensor.detach()
    if source.device.type == "cpu" and source.is_contiguous() and not source.is_conj() and not source.is_neg():
        # By address: to share a storage with numpy would forbid the trainer to resize, and so to offload, it.
        return copy_sums_address(target, source.data_ptr(), spec)
    _copy_torch_slice(target, source, tuple(source.shape), 0, 0)
    return sums_of(target, spec)


def _copy_torch_slice(target: memoryview, tensor: torch.Tensor, shape: tuple[int, ...], dim: int, start: int) -> None:
    """Copy `tensor` to where it belongs in a tensor of `shape` that lies in `target`: from `start` on along `dim`."""
    import torch

    if tensor.numel():
        whole = torch.frombuffer(target, dtype=tensor.dtype).view(shape)
        part = whole.narrow(dim, start, tensor.shape[dim]) if shape else whole
        part.copy_(tensor.detach())
