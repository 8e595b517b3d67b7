"""A version while it is written: visible to nobody until its commit, and gone if its publisher dies before."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

from weightsync.arena import SlotLock
from weightsync.errors import DraftClosed
from weightsync.hosts import slot_name
from weightsync.manifest import Layout, Manifest, Schema, TensorEntry
from weightsync.parts import BASE
from weightsync.records import PartRecord, VersionRecord
from weightsync.slot import clear_gaps, write_header
from weightsync.writer import SlotWriter, Ticket, assemble

if TYPE_CHECKING:
    from weightsync.publisher import Publisher


@dataclass(frozen=True)
class Claim:
    """A slot, the `publishing` record that names it, and the store revision of that record; which part goes there."""

    record: VersionRecord
    revision: int
    lock: SlotLock
    mapping: mmap.mmap
    part: str = BASE


class Draft:
    """One version being written by rank 0, and through its ticket by others. Commit it, or abort it.

    As a context manager it aborts itself unless it was committed.
    """

    def __init__(
        self, publisher: Publisher, claim: Claim, schema: Schema, layout: Layout, metadata: Mapping[str, str]
    ) -> None:
        self._publisher, self._claim, self._layout = publisher, claim, layout
        record = claim.record
        blank = {
            name: TensorEntry(spec.dtype, spec.shape, layout.offsets[name], spec.nbytes, "")
            for name, spec in schema.tensors.items()
        }
        self._manifest = Manifest(record.version, publisher.model, blank, record.base, record.step, dict(metadata))
        self._writer = SlotWriter(claim.lock, claim.mapping, schema, layout, rank=0)
        self._open = True

    @property
    def version(self) -> int:
        return self._claim.record.version

    @property
    def part(self) -> str:
        """ "" for the base model, "draft" or "lora/NAME"."""
        return self._claim.part

    @property
    def schema(self) -> Schema:
        return self._writer.schema

    @property
    def ticket(self) -> Ticket:
        """What the other ranks pass to `weightsync.join`: a small dict that can be sent as JSON."""
        self._require_open()
        write_header(self._claim.mapping, self._manifest, self._layout)
        return {"slot": str(self._claim.lock.path), "version": self.version, "draft": self._manifest.digest}

    def write(self, name: str, tensor: Any) -> str:
        """Copy a whole tensor to its place in the slot; returns its digest.

        Raises TensorMismatch, UnsupportedDtype, DraftClosed.
        """
        return self._writer.write(name, tensor)

    def write_slice(self, name: str, tensor: Any, start: int, dim: int = 0) -> None:
        """Copy a part of a tensor to its place; the other parts come from other ranks. Raises as `write`."""
        self._writer.write_slice(name, tensor, start, dim)

    def commit(
        self,
        parts: Iterable[Mapping[str, Any]] | Mapping[str, Any] = (),
        *,
        activate: bool = False,
        timeout_s: float = 60.0,
    ) -> int:
        """Make the version ready, all at once; `parts` is what the other ranks' `seal()` returned.

        With `activate` the same transaction asks for the swap, to be ready within `timeout_s`; `Publisher.wait_active`
        waits for it. Returns the version. Raises MissingTensor, PublishError, DraftLost, StalePublisher,
        StoreUnavailable; the draft is then gone.
        """
        others = [parts] if isinstance(parts, Mapping) else list(parts)
        return commit_all([self], others, within_s=timeout_s if activate else None)

    def _finish(self, others: list[Mapping[str, Any]]) -> PartRecord:
        """Write the slot's header; the slot as the version's record names it."""
        manifest = self._complete(others)
        clear_gaps(self._claim.mapping, manifest.schema, self._layout)
        write_header(self._claim.mapping, manifest, self._layout)
        slot = slot_name(self._claim.lock.path, self._publisher.host)
        return PartRecord(self.part, self.version, slot, manifest.digest, manifest.nbytes, manifest.fingerprint)

    def _complete(self, others: list[Mapping[str, Any]]) -> Manifest:
        mine = self._writer.part()
        with memoryview(self._claim.mapping) as slot:
            entries = assemble(self._manifest, self._layout, [mine, *others], slot)
        manifest = replace(self._manifest, tensors=entries)
        if len(manifest.to_json()) <= self._layout.room:
            return manifest
        return replace(manifest, tensors={name: replace(entry, slices=()) for name, entry in entries.items()})

    def abort(self) -> None:
        """Give the slot back; nobody has seen the version. Safe to call twice."""
        if not self._open:
            return
        try:
            self._publisher._forget(self._claim.record.version, self._claim.revision)
        finally:
            self._close()

    def _close(self) -> None:
        self._open = False
        self._writer.release()

    def _require_open(self) -> None:
        if not self._open:
            raise DraftClosed(f"version {self.version} was already committed or aborted: begin another")

    def __enter__(self) -> Draft:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()


def commit_all(drafts: Sequence[Draft], others: list[Mapping[str, Any]], *, within_s: float | None) -> int:
    """Make the version of `drafts` ready, all of its parts at once; `others`: other ranks' parts of the first.

    With `within_s` the swap is asked for in the same transaction. Returns the version. Raises as `Draft.commit`.
    """
    first = drafts[0]
    for draft in drafts:
        draft._require_open()
    try:
        published = [draft._finish(others if draft is first else []) for draft in drafts]
        claim, schemas = first._claim, {draft.part: draft.schema for draft in drafts}
        first._publisher._make_ready(claim.record, claim.revision, published, schemas, within_s)
    except BaseException:
        for draft in drafts:
            draft.abort()
        raise
    for draft in drafts:
        draft._close()
    return first.version
