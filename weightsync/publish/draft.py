"""A version while it is written: no reader sees it before its commit, and it is gone if its publisher dies before."""

from __future__ import annotations

import functools
import mmap
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from weightsync.control.hosts import slot_name
from weightsync.control.parts import BASE
from weightsync.control.records import PartRecord, VersionRecord
from weightsync.errors import PublishError, publishing
from weightsync.format.manifest import (
    PREAMBLE,
    Layout,
    Manifest,
    Schema,
    clear_gaps,
    header_nbytes,
    write_header,
)
from weightsync.memory.arena import SlotLock
from weightsync.peer.chunks import Bitmap, Head
from weightsync.peer.shelf import leave
from weightsync.publish.writer import SlotWriter, Ticket, assemble, blank

if TYPE_CHECKING:
    from weightsync.publish.publisher import Publisher


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
        self,
        publisher: Publisher,
        claim: Claim,
        schema: Schema,
        layout: Layout,
        metadata: Mapping[str, str],
        config: str | None = None,
        without: Collection[str] = (),
    ) -> None:
        self._publisher, self._claim, self._layout, self._config = publisher, claim, layout, config
        self._without = without
        record = claim.record
        about: dict[str, Any] = {"base": record.base, "step": record.step, "metadata": dict(metadata)}
        self._manifest = blank(schema, layout, record.version, publisher.model, **about)
        self._writer = SlotWriter(claim.lock, claim.mapping, schema, layout, rank=0)
        self._open = True
        self._published: PartRecord | None = None  # what `spread` has made of it
        self.edition: tuple[float, int, float | None] | None = None  # percent, `keep`, `max_age_s`; None: of a version
        self.signature = ""  # of who made the tensors elsewhere; without one, the publisher's own key signs

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
    def lock(self) -> SlotLock:
        """On its slot."""
        return self._claim.lock

    @property
    def layout(self) -> Layout:
        """Of its slot."""
        return self._layout

    @property
    def ticket(self) -> Ticket:
        """The ticket that the other ranks pass to `weightsync.join`: a small dict that can be sent as JSON."""
        self._require_open()
        write_header(self._claim.mapping, self._manifest, self._layout)
        return {"slot": str(self._claim.lock.path), "version": self.version, "draft": self._manifest.digest}

    def write(self, name: str, tensor: Any) -> str:
        """Copy a whole tensor to its place in the slot; returns its digest.

        Raises TensorError, PublishError.
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
        waits for it. Returns the version. Raises PublishError as
        `Publisher.publish`; the draft is then gone.
        """
        others = [parts] if isinstance(parts, Mapping) else list(parts)
        return commit_all([self], others, within_s=timeout_s if activate else None)

    def commit_edition(self) -> int:
        """Make the adapter of `Publisher.begin_edition` an edition; returns its number. Raises as `commit`."""
        self._require_open()
        if self.edition is None:
            raise PublishError("this draft is of a version: call `commit`")
        try:
            claim, part = self._claim, self._finish([])
            self._publisher._make_edition(claim.record, claim.revision, part, *self.edition)
        except BaseException:
            self.abort()
            raise
        self._close()
        return self.version

    def spread(self, parts: Iterable[Mapping[str, Any]], shares: Mapping[str, Mapping[str, Any]]) -> bytes:
        """End the writing of a version that other hosts have shares of; then `commit` has no more to do but tell.

        `parts` is what ranks on this host have sealed, `shares` by host what `HostShare.settle` returned there, and
        what does not stay there has been gathered (`weightsync.publish.spread`). Returns the manifest, which each of
        these hosts must accept before the commit. Raises as `commit`; the draft is then gone.
        """
        self._require_open()
        try:
            everywhere = [*parts, *shares.values()]
            stay = {host: int(share["stay"], 16) for host, share in shares.items()}
            self._published = self._finish(everywhere, {host: bits for host, bits in stay.items() if bits})
            with memoryview(self._claim.mapping) as slot:
                return bytes(slot[PREAMBLE : header_nbytes(slot[:PREAMBLE])])
        except BaseException:
            self.abort()
            raise

    def _finish(self, others: list[Mapping[str, Any]], elsewhere: Mapping[str, int] | None = None) -> PartRecord:
        """Write the slot's header; the slot as the version's record names it. `elsewhere`: bits of chunks, by the host
        that has them instead."""
        if self._published is not None:
            return self._published
        manifest = self._complete(others)
        slot, signature = slot_name(self._claim.lock.path, self._publisher.host), ""
        if elsewhere:
            self._leave(manifest, elsewhere)
        else:
            clear_gaps(self._claim.mapping, manifest.schema, self._layout)
            write_header(self._claim.mapping, manifest, self._layout)
            signature = self.signature or self._publisher._sign(self.part, manifest, self._claim.mapping, self._config)
        digest, nbytes, shares = manifest.digest, manifest.nbytes, tuple(sorted(elsewhere or ()))
        return PartRecord(self.part, self.version, slot, digest, nbytes, manifest.fingerprint, signature, shares)

    def _leave(self, manifest: Manifest, elsewhere: Mapping[str, int]) -> None:
        """Leave all other chunks to the peer of this host."""
        head = Head.parse(manifest.to_json(), manifest.digest, self._layout.total_nbytes)
        if head.shape is None:
            raise PublishError("the metadata leaves no room for the digests of chunks: use less of it")
        if self.part != BASE or self.signature or self._publisher._signer is not None:
            raise PublishError("only a base model that is not signed here can have shares on other hosts")
        lacks = functools.reduce(operator.or_, elsewhere.values())
        done = Bitmap(head.shape.chunks, Bitmap.full(head.shape.chunks).bits & ~lacks)
        with memoryview(self._claim.mapping) as slot:
            leave(self._claim.lock, slot, head, self._publisher.model, self.part, done)

    def _complete(self, others: list[Mapping[str, Any]]) -> Manifest:
        mine = self._writer.part()
        with memoryview(self._claim.mapping) as slot:
            manifest = assemble(self._manifest, self._layout, [mine, *others], slot)
        whole = replace(manifest, tensors={name: replace(e, slices=()) for name, e in manifest.tensors.items()})
        bare = replace(whole, metadata=self._manifest.metadata)
        if self.signature:  # of the metadata as they came
            return bare
        return next((found for found in (manifest, whole) if len(found.to_json()) <= self._layout.room), bare)

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
            raise PublishError(
                f"version {self.version} was already committed or aborted: begin another", code="draft_closed"
            )

    def __enter__(self) -> Draft:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()


@publishing
def commit_all(drafts: Sequence[Draft], others: list[Mapping[str, Any]], *, within_s: float | None) -> int:
    """Make the version of `drafts` ready, all of its parts at once; `others`: other ranks' parts of the first.

    With `within_s` the swap is asked for in the same transaction. Returns the version. Raises as `Draft.commit`.
    """
    first = drafts[0]
    for draft in drafts:
        draft._require_open()
    if any(draft.edition is not None for draft in drafts):
        raise PublishError("this draft is of an edition: call `commit_edition`")
    try:
        published = [draft._finish(others if draft is first else []) for draft in drafts]
        claim, schemas = first._claim, {draft.part: draft.schema for draft in drafts}
        about = within_s, first._config, first._without
        first._publisher._make_ready(claim.record, claim.revision, published, schemas, *about)
    except BaseException:
        for draft in drafts:
            draft.abort()
        raise
    for draft in drafts:
        draft._close()
    return first.version
