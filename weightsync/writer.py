"""Writes tensors into a claimed slot: what every trainer rank does with its share of a version."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from weightsync.arena import MAPPINGS, SlotLock
from weightsync.errors import DraftClosed, ManifestError, MissingTensor, PublishError, ShapeMismatch, UnexpectedTensor
from weightsync.manifest import Layout, Manifest, Schema, TensorEntry, TensorSpec, check_spec
from weightsync.slot import read_header
from weightsync.sources import Sums, copy_slice, copy_sums, spec_of, sums_of

Ticket = dict[str, Any]
SealedPart = dict[str, Any]


class SlotWriter:
    """One rank's hand on a slot. The slot cannot be reused while any rank holds it, dead trainers' records or not."""

    def __init__(self, lock: SlotLock, mapping: mmap.mmap, schema: Schema, layout: Layout, rank: int) -> None:
        self.schema, self.layout, self.rank = schema, layout, rank
        self._lock = lock
        self._view = memoryview(mapping)
        self._sums: dict[str, Sums] = {}
        self._slices: dict[str, list[tuple[int, int, int]]] = {}
        self._sealed = False

    def write(self, name: str, tensor: Any) -> str:
        """Copy a whole tensor (torch, on any device, any strides; numpy; FileTensor) to its place; returns its digest.

        Raises UnexpectedTensor, ShapeMismatch, DtypeMismatch, UnsupportedDtype, DraftClosed.
        """
        spec = check_whole(self._unsealed(), name, tensor)
        self._sums[name] = sums = copy_sums(self._target(name, spec), tensor, spec)
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

    def seal(self) -> SealedPart:
        """Finish this rank's share: a small JSON-able dict that goes to `Draft.commit`. Lets go of the slot."""
        part = self.part()
        self.release()
        return part

    def part(self) -> SealedPart:
        """What this rank wrote so far: the sums of whole tensors, and where its slices lie."""
        return {"rank": self.rank, "sums": {name: [*sums] for name, sums in self._sums.items()}, "slices": self._slices}

    def release(self) -> None:
        self._sealed = True
        self._view.release()
        self._lock.release()

    def _unsealed(self) -> Schema:
        if self._sealed:
            raise DraftClosed("this part of the version is sealed: begin another version to write more")
        return self.schema

    def _target(self, name: str, spec: TensorSpec) -> memoryview:
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


def assemble(
    manifest: Manifest, layout: Layout, parts: Iterable[Mapping[str, Any]], slot: memoryview
) -> Mapping[str, TensorEntry]:
    """The entries of a version from what the ranks sealed; tensors written in slices are digested here.

    Raises MissingTensor for one that nobody wrote, or not wholly; PublishError when two ranks wrote different bytes.
    """
    known: dict[str, Sums] = {}
    slices: dict[str, list[tuple[int, int, int]]] = {}
    for part in parts:
        for name, (digest, checksum) in part["sums"].items():
            if known.setdefault(name, Sums(digest, checksum)).digest != digest:
                raise PublishError(f"two ranks wrote different bytes of tensor {name!r}: let one rank write it")
        for name, found in part["slices"].items():
            slices.setdefault(name, []).extend(tuple(piece) for piece in found)
    return {name: _entry(name, spec, layout, known, slices, slot) for name, spec in manifest.schema.tensors.items()}


def _entry(
    name: str,
    spec: TensorSpec,
    layout: Layout,
    known: Mapping[str, Sums],
    slices: Mapping[str, list[tuple[int, int, int]]],
    slot: memoryview,
) -> TensorEntry:
    offset, written = layout.offsets[name], slices.get(name)
    pieces = sorted((piece for piece in written or () if piece[2]), key=lambda piece: piece[1])
    sums = known.get(name)
    if sums is None:
        if written is None or not _cover(pieces, spec, offset):
            raise MissingTensor(name, spec)
        sums = sums_of(slot[offset : offset + spec.nbytes], spec)
    return TensorEntry(spec.dtype, spec.shape, offset, spec.nbytes, *sums, tuple(pieces))


def _cover(pieces: Sequence[tuple[int, int, int]], spec: TensorSpec, offset: int) -> bool:
    """Whether pieces, in the order of their first bytes, are the whole tensor once, all cut along one dimension.

    Which one it was need not be known: several pieces that leave a gap along it leave one along any other, too.
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
    """The spec of a tensor that is all of `name`. Raises TensorMismatch, UnsupportedDtype."""
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
        raise ShapeMismatch(name, spec.shape, part.shape)
    if mismatch := check_spec(name, TensorSpec(spec.dtype, part.shape), part):
        raise mismatch
    return part


def _expected(schema: Schema, name: str) -> TensorSpec:
    if (spec := schema.tensors.get(name)) is None:
        raise UnexpectedTensor(name)
    return spec


def _without(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return shape[:dim] + shape[dim + 1 :]
