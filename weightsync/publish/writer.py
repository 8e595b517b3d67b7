"""Writes tensors into a claimed slot: what every trainer rank does with its share of a version.

A tensor can be a torch tensor, a numpy array or a tensor in a file. Three functions hide which: `spec_of`, `copy_sums`
and `copy_slice`. A program that passes a torch tensor has loaded torch already, so only their torch branches import it.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import xxhash

from weightsync.errors import (
    CheckpointError,
    ManifestError,
    PublishError,
    missing_tensor,
    shape_mismatch,
    unexpected_tensor,
    unsupported_dtype,
)
from weightsync.format.dtypes import ITEMSIZE
from weightsync.format.fingerprint import Running
from weightsync.format.manifest import (
    CUTS,
    Cuts,
    Layout,
    Manifest,
    Schema,
    TensorEntry,
    TensorSpec,
    check_spec,
    cut_ends,
    is_derived,
    read_header,
)
from weightsync.format.naming import advice
from weightsync.memory.arena import MAPPINGS, SlotLock

if TYPE_CHECKING:
    import torch


CHUNK = 512 << 10


class Sums(NamedTuple):
    """The digests of one tensor's bytes: xxh3_128 in hex, the checksum that `weightsync.format.fingerprint` is made of,
    and xxh3_128 of each of its parts, if it is cut."""

    digest: str
    checksum: int
    parts: tuple[str, ...] = ()


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
    """Element type and shape of a torch tensor, numpy array or one of the classes above. Raises TensorError."""
    if isinstance(tensor, (FileTensor, FilledTensor, RawTensor)):
        return tensor.spec
    if isinstance(tensor, (np.ndarray, np.generic)):
        dtype = str(tensor.dtype)
        if dtype not in ITEMSIZE or not tensor.dtype.isnative:
            raise unsupported_dtype(name, dtype)
        return TensorSpec(dtype, tuple(tensor.shape))
    if is_torch(tensor):
        return _torch_spec(name, tensor)
    raise unsupported_dtype(name, f"a {type(tensor).__name__}, not a tensor")


def copy_sums(target: memoryview, tensor: Any, spec: TensorSpec, ends: Sequence[int] = ()) -> Sums:
    """Copy all of `tensor` to `target` (uint8 [nbytes]); returns the sums of the bytes as they now are there.

    `ends`: where each part of it that has a digest of its own ends (`manifest.cut_ends`).
    """
    if is_torch(tensor):
        return _copy_torch_sums(target, tensor, spec, ends)
    if isinstance(tensor, FileTensor):
        return _sum_chunks(target, spec, lambda chunk, start: read_into(chunk, tensor, start), ends)
    if isinstance(tensor, FilledTensor):
        return _sum_chunks(target, spec, tensor.fill, ends, tensor.chunk)
    if isinstance(tensor, RawTensor):
        return copy_sums_address(target, _address_of(tensor.data), spec, ends)
    array = np.ascontiguousarray(tensor)
    return copy_sums_address(target, array.ctypes.data, spec, ends)


def copy_sums_address(target: memoryview, source: int, spec: TensorSpec, ends: Sequence[int] = ()) -> Sums:
    """As `copy_sums`, from contiguous memory at the address `source`; releases the interpreter lock."""
    address = _address_of(target)
    return _sum_chunks(
        target, spec, lambda chunk, start: ctypes.memmove(address + start, source + start, len(chunk)), ends
    )


def sums_of(data: memoryview, spec: TensorSpec, ends: Sequence[int] = ()) -> Sums:
    """The sums of a tensor that lies in `data` already."""
    return _sum_chunks(data, spec, lambda _chunk, _start: None, ends)


def _sum_chunks(
    target: memoryview,
    spec: TensorSpec,
    fill: Callable[[memoryview, int], object],
    ends: Sequence[int] = (),
    size: int = CHUNK,
) -> Sums:
    """Have `target` filled piece by piece, and sum each piece while it is still in the second-level cache."""
    hasher, running, parts = xxhash.xxh3_128(), Running(spec.dtype, spec.shape), _Parts(ends)
    for start in range(0, len(target), size):
        chunk = target[start : start + size]
        fill(chunk, start)
        hasher.update(chunk)
        running.update(chunk)
        parts.update(chunk, start)
    return Sums(hasher.hexdigest(), running.sum, tuple(parts.digests))


class _Parts:
    """The digests of parts that end at `ends`; without any it does nothing."""

    def __init__(self, ends: Sequence[int]) -> None:
        self._ends, self._hasher = deque(ends), xxhash.xxh3_128()
        self.digests: list[str] = []

    def update(self, chunk: memoryview, start: int) -> None:
        while self._ends and chunk:
            left = self._ends[0] - start
            self._hasher.update(chunk[:left])
            if left > len(chunk):
                return
            self.digests.append(self._hasher.hexdigest())
            self._hasher.reset()
            self._ends.popleft()
            chunk, start = chunk[left:], start + left


def copy_slice(target: memoryview, tensor: Any, shape: tuple[int, ...], dim: int, start: int) -> None:
    """Copy `tensor` into its place in a tensor of `shape` that lies in `target`: from `start` on along `dim`."""
    if is_torch(tensor):
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


def read_into(chunk: memoryview, stored: FileTensor, start: int) -> None:
    """The bytes of the tensor from `start` on. Raises CheckpointError."""
    done = 0
    while done < len(chunk):
        count = os.preadv(stored.fd, [chunk[done:]], stored.begin + start + done)
        if count == 0:
            raise CheckpointError(stored.path, "was cut short while it was read: fetch the checkpoint again")
        done += count


def is_torch(tensor: Any) -> bool:
    """Whether it is a tensor of torch's, which may not be loaded."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(tensor, torch.Tensor)


# torch tensors


def _torch_spec(name: str, tensor: torch.Tensor) -> TensorSpec:
    """Raises TensorError for tensors without plain bytes of their own (sparse, sharded, on `meta`, offloaded)."""
    if problem := _without_bytes(tensor):
        raise unsupported_dtype(name, problem)
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


def _copy_torch_sums(target: memoryview, tensor: torch.Tensor, spec: TensorSpec, ends: Sequence[int]) -> Sums:
    """Copy all of `tensor` to `target` (uint8 [nbytes], in a slot); returns the sums of what was written there."""
    source = tensor.detach()
    if source.device.type == "cpu" and source.is_contiguous() and not source.is_conj() and not source.is_neg():
        # By address: to share a storage with numpy would forbid the trainer to resize, and so to offload, it.
        return copy_sums_address(target, source.data_ptr(), spec, ends)
    _copy_torch_slice(target, source, tuple(source.shape), 0, 0)
    return sums_of(target, spec, ends)


def _copy_torch_slice(target: memoryview, tensor: torch.Tensor, shape: tuple[int, ...], dim: int, start: int) -> None:
    """Copy `tensor` to where it belongs in a tensor of `shape` that lies in `target`: from `start` on along `dim`."""
    import torch

    if tensor.numel():
        whole = torch.frombuffer(target, dtype=tensor.dtype).view(shape)
        part = whole.narrow(dim, start, tensor.shape[dim]) if shape else whole
        part.copy_(tensor.detach())


Ticket = dict[str, Any]
SealedPart = dict[str, Any]


class SlotWriter:
    """One rank's hand on a slot. The slot cannot be reused while any rank holds it, dead trainers' records or not."""

    def __init__(self, lock: SlotLock, mapping: mmap.mmap, schema: Schema, layout: Layout, rank: int) -> None:
        self.schema, self.layout, self.rank = schema, layout, rank
        self.lock = lock
        self._grows = lock.is_sparse
        self._view = memoryview(mapping)
        self._sums: dict[str, Sums] = {}
        self._slices: dict[str, list[tuple[int, int, int]]] = {}
        self._strips: dict[str, list[tuple[int, int, int, int]]] = {}
        self._sealed = False

    def write(self, name: str, tensor: Any) -> str:
        """Copy a whole tensor (torch, on any device, any strides; numpy; FileTensor) to its place; returns its digest.

        A name that the model lacks is left out if its bytes are those of a matrix written before: state dicts list
        tied weights under each of their names. So is a derived tensor (`is_derived`), whose digest is "".

        Raises TensorError, PublishError without memory for it (`MemorySlot`).
        """
        if name not in self._unsealed().tensors:
            if is_derived(name, spec_of(name, tensor).shape):
                return ""
            if (tied := self._tied(name, tensor)) is not None:
                return tied
        spec = check_whole(self._unsealed(), name, tensor)
        ends = cut_ends(self.layout.offsets[name], spec.nbytes, self.layout.chunk_nbytes)
        self._sums[name] = sums = copy_sums(self._target(name, spec), tensor, spec, ends)
        return sums.digest

    def write_slice(self, name: str, tensor: Any, start: int, dim: int = 0) -> None:
        """Copy this rank's part of a tensor to its place: `tensor.shape[dim]` rows from `start` on along `dim`.

        The parts of all ranks must cover the tensor exactly once; `Draft.commit` checks that. Raises as `write`.
        """
        part = check_slice(self._unsealed(), name, tensor, start, dim)
        spec = self.schema.tensors[name]
        copy_slice(self._target(name, spec), tensor, spec.shape, dim, start)
        stride = TensorSpec(spec.dtype, spec.shape[dim + 1 :]).nbytes
        first = self.layout.offsets[name] + start * stride
        self._slices.setdefault(name, []).append((self.rank, first, part.nbytes))
        run = part.shape[dim] * stride
        strip = (first, run, spec.shape[dim] * stride, part.nbytes // run if run else 0)
        self._strips.setdefault(name, []).append(strip)

    def seal(self) -> SealedPart:
        """Finish this rank's share: a small JSON-able dict that goes to `Draft.commit`. Lets go of the slot."""
        part = self.part()
        self.release()
        return part

    def part(self) -> SealedPart:
        """This rank's writes so far: the sums of whole tensors, and where its slices lie.

        `slices` has (rank, first byte, bytes) as manifests do; `strips` says where the bytes of each are: the first
        one, how many lie in a row, from one row to the next, and how many rows.
        """
        sums = {name: [*sums] for name, sums in self._sums.items()}
        return {"rank": self.rank, "sums": sums, "slices": self._slices, "strips": self._strips}

    def release(self) -> None:
        self._sealed = True
        self._view.release()
        self.lock.release()

    def _tied(self, name: str, tensor: Any) -> str | None:
        """The digest of `tensor`, if a matrix of these bytes was written. Vectors may be equal by chance."""
        spec = spec_of(name, tensor)
        alike = {sums.digest for other, sums in self._sums.items() if self.schema.tensors[other] == spec}
        if not alike or len(spec.shape) < 2:
            return None
        digest = copy_sums(np.empty(spec.nbytes, np.uint8).data, tensor, spec).digest
        return digest if digest in alike else None

    def _unsealed(self) -> Schema:
        if self._sealed:
            raise PublishError(
                "this part of the version is sealed: begin another version to write more", code="draft_closed"
            )
        return self.schema

    def _target(self, name: str, spec: TensorSpec) -> memoryview:
        """Raises PublishError: the kernel gives out more memory than it has, and ends processes when that comes to
        light."""
        if self._grows:
            import psutil  # readers of checkpoints import this module where it is missing

            if spec.nbytes > (free := psutil.virtual_memory().available):
                advice = "put fewer ranks on a host"
                raise PublishError(
                    f"tensor {name!r} needs {spec.nbytes:,} bytes of memory, {free:,} are free: {advice}"
                )
        offset = self.layout.offsets[name]
        return self._view[offset : offset + spec.nbytes]


def join(ticket: Ticket, rank: int) -> SlotWriter:
    """Open the draft that rank 0 began, in another process of the same host; `ticket` is its `Draft.ticket`.

    Raises SlotBusy or ManifestError when that draft is gone.
    """
    lock = SlotLock.shared(Path(ticket["slot"]))
    try:
        mapping = MAPPINGS.get(lock.path, lock.fd)
        with memoryview(mapping) as view:
            manifest, digest = read_header(view, ticket["slot"])
        if digest != ticket["draft"]:
            raise ManifestError(f"{ticket['slot']} is not version {ticket['version']}'s any more: begin it again")
        return SlotWriter(lock, mapping, manifest.schema, Layout.of(manifest.schema), rank)
    except BaseException:
        lock.release()
        raise


def blank(schema: Schema, layout: Layout, version: int, model: str, **about: Any) -> Manifest:
    """The manifest of a version of which nothing is written yet; `about`: base, step and metadata."""
    tensors = {
        name: TensorEntry(spec.dtype, spec.shape, layout.offsets[name], spec.nbytes, "")
        for name, spec in schema.tensors.items()
    }
    return Manifest(version, model, tensors, **about)


Slices = dict[str, list[tuple[int, int, int]]]


def digested(
    schema: Schema, layout: Layout, parts: Iterable[Mapping[str, Any]], slot: memoryview
) -> tuple[dict[str, Sums], Slices]:
    """The sums of every tensor of which the ranks that sealed `parts` wrote all, and the slices that they wrote.

    Tensors that they wrote in slices are summed here. Raises PublishError when two ranks wrote different bytes.
    """
    known: dict[str, Sums] = {}
    slices: Slices = {}
    for part in parts:
        for name, (digest, checksum, pieces) in part["sums"].items():
            if known.setdefault(name, Sums(digest, checksum, tuple(pieces))).digest != digest:
                raise PublishError(f"two ranks wrote different bytes of tensor {name!r}: let one rank write it")
        for name, found in part["slices"].items():
            slices.setdefault(name, []).extend(tuple(piece) for piece in found)
    for name, written in slices.items():
        spec, offset = schema.tensors[name], layout.offsets[name]
        written.sort(key=lambda piece: piece[1])
        if name not in known and _cover([piece for piece in written if piece[2]], spec, offset):
            ends = cut_ends(offset, spec.nbytes, layout.chunk_nbytes)
            known[name] = sums_of(slot[offset : offset + spec.nbytes], spec, ends)
    return known, slices


def assemble(manifest: Manifest, layout: Layout, parts: Iterable[Mapping[str, Any]], slot: memoryview) -> Manifest:
    """The manifest of a version from what the ranks sealed; tensors written in slices are digested here.

    Raises TensorError for one that nobody wrote, or not wholly; PublishError when two ranks wrote different bytes.
    """
    known, slices = digested(manifest.schema, layout, parts, slot)
    digests: list[str] = []
    entries = {}
    for name, spec in manifest.schema.tensors.items():
        if (sums := known.get(name)) is None:
            raise missing_tensor(name, spec)
        pieces = tuple(piece for piece in slices.get(name, ()) if piece[2])
        offset = layout.offsets[name]
        entries[name] = TensorEntry(spec.dtype, spec.shape, offset, spec.nbytes, sums.digest, sums.checksum, pieces)
        digests += sums.parts
    cuts = Cuts(layout.chunk_nbytes, tuple(digests)).to_text()
    return replace(manifest, tensors=entries, metadata={**manifest.metadata, CUTS: cuts})


def _cover(pieces: Sequence[tuple[int, int, int]], spec: TensorSpec, offset: int) -> bool:
    """Whether pieces, in the order of their first bytes, are the whole tensor once, all cut along one dimension.

    The dimension need not be known: several pieces that leave a gap along it leave one along any other, too.
    """
    return any(_in_a_row(pieces, spec, offset, math.prod(spec.shape[:dim])) for dim in range(len(spec.shape)))


def _in_a_row(pieces: Sequence[tuple[int, int, int]], spec: TensorSpec, offset: int, blocks: int) -> bool:
    """Whether each begins where the one before it ends; `blocks`: how often what they cut is repeated in the tensor."""
    reached = 0
    for _, first, nbytes in pieces:
        if (first - offset) * blocks != reached:
            return False
        reached += nbytes
    return reached == spec.nbytes


def check_whole(schema: Schema, name: str, tensor: Any) -> TensorSpec:
    """The spec of a tensor that is all of `name`. Raises TensorError."""
    spec = _expected(schema, name)
    if mismatch := check_spec(name, spec, spec_of(name, tensor)):
        raise mismatch
    return spec


def check_slice(schema: Schema, name: str, tensor: Any, start: int, dim: int) -> TensorSpec:
    """The spec of a tensor that is the part of `name` from `start` on along `dim`. Raises as `check_whole`."""
    spec, part = _expected(schema, name), spec_of(name, tensor)
    alike = 0 <= dim < len(spec.shape) == len(part.shape)
    if (
        not alike
        or not 0 <= start <= spec.shape[dim] - part.shape[dim]
        or _without(part.shape, dim) != _without(spec.shape, dim)
    ):
        raise shape_mismatch(name, spec.shape, part.shape)
    if mismatch := check_spec(name, TensorSpec(spec.dtype, part.shape), part):
        raise mismatch
    return part


def _expected(schema: Schema, name: str) -> TensorSpec:
    if (spec := schema.tensors.get(name)) is None:
        raise unexpected_tensor(name, advice=advice([name], schema.tensors))
    return spec


def _without(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return shape[:dim] + shape[dim + 1 :]
