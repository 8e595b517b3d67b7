"""Copies torch tensors into slots. The only module of the package that imports torch, and only once torch is there."""

from __future__ import annotations

import torch

from weightsync.errors import UnsupportedDtype
from weightsync.manifest import TensorSpec
from weightsync.sources import Sums, copy_sums_address, sums_of


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    """Raises UnsupportedDtype for tensors without plain bytes of their own (sparse, sharded, on `meta`, offloaded)."""
    if problem := _without_bytes(tensor):
        raise UnsupportedDtype(name, problem)
    return TensorSpec(dtype_name(tensor.dtype), tuple(tensor.shape))


def _without_bytes(tensor: torch.Tensor) -> str | None:
    """Why there is nothing to copy; reading such a tensor by its address would kill the process."""
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


def dtype_name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def copy_sums(target: memoryview, tensor: torch.Tensor, spec: TensorSpec) -> Sums:
    """Copy all of `tensor` to `target` (uint8 [nbytes], in a slot); returns the sums of what was written there."""
    source = tensor.detach()
    if source.device.type == "cpu" and source.is_contiguous() and not source.is_conj() and not source.is_neg():
        # By address: to share a storage with numpy would forbid the trainer to resize, and so to offload, it.
        return copy_sums_address(target, source.data_ptr(), spec)
    copy_strided(target, source, tuple(source.shape), 0, 0)
    return sums_of(target, spec)


def copy_strided(target: memoryview, tensor: torch.Tensor, shape: tuple[int, ...], dim: int, start: int) -> None:
    """Copy `tensor` to where it belongs in a tensor of `shape` that lies in `target`: from `start` on along `dim`."""
    if tensor.numel():
        whole = torch.frombuffer(target, dtype=tensor.dtype).view(shape)
        part = whole.narrow(dim, start, tensor.shape[dim]) if shape else whole
        part.copy_(tensor.detach())
