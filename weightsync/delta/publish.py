"""Makes a version out of a delta that was sent here: finds its base, applies it, and answers twice-sent ones once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from weightsync.delta.encode import DeltaReader, apply_delta
from weightsync.delta.format import DeltaHeader
from weightsync.errors import DeltaBaseMismatch, DeltaError, ManifestError, SlotBusy
from weightsync.parts import base_of
from weightsync.peer.copies import local_slot
from weightsync.publisher import Publisher
from weightsync.receiver import SlotReader
from weightsync.records import VersionRecord


@dataclass(frozen=True)
class Applied:
    """A version made of a delta. `received` counts the bytes of the delta, 0 when the version was here already."""

    record: VersionRecord
    received: int
    duplicate: bool = False


def publish_delta(stream: BinaryIO, publisher: Publisher, *, upload_id: str) -> Applied:
    """Make the version that `stream` holds ready, under the next number; the same `upload_id` again gives the same one.

    The publisher holds its lineage, so of two processes that were given one upload only the later can commit, and it
    looks here first. Raises DeltaError, DeltaBaseMismatch, DigestMismatch, and what `Publisher.begin` raises.
    """
    reader = DeltaReader(stream)
    header = reader.header
    if header.model != publisher.model:
        raise DeltaError(f"it is for model {header.model!r}, this server has {publisher.model!r}")
    if (made := _made_before(publisher, upload_id)) is not None:
        return Applied(made, 0, duplicate=True)
    base = header.base.version if header.base is not None else None
    source = f"{_mark(upload_id)}{header.source}"
    with (
        _base_slot(publisher, header) as slot,
        publisher.begin(header.schema, step=header.step, base=base, metadata=header.metadata, source=source) as draft,
    ):
        apply_delta(reader, slot, draft)
        version = draft.commit()
    record = next(v for v in publisher.versions() if v.version == version)
    return Applied(record, reader.nbytes)


@contextlib.contextmanager
def _base_slot(publisher: Publisher, header: DeltaHeader) -> Iterator[SlotReader | None]:
    """The slot of the base, held against reuse for as long as it is read. Raises DeltaBaseMismatch."""
    wanted = header.base
    if wanted is None:
        yield None
        return
    ready = [v for v in publisher.versions() if v.state == "ready"]
    same = [
        b for v in ready if (b := base_of(v)) and b.manifest_digest == wanted.manifest_digest
    ]  # whichever version carries it on
    if not same:
        found = next((v.manifest_digest for v in ready if v.version == wanted.version), None)
        raise DeltaBaseMismatch(wanted.version, wanted.manifest_digest, found)
    path = local_slot(same[0], publisher.host, publisher.copies())
    if path is None:  # on other hosts only
        raise DeltaBaseMismatch(wanted.version, wanted.manifest_digest, None)
    try:
        slot = SlotReader.open(path, manifest_digest=wanted.manifest_digest, populate=False)
    except (ManifestError, SlotBusy) as error:  # retired and reused since it was looked up
        raise DeltaBaseMismatch(wanted.version, wanted.manifest_digest, None) from error
    with slot:
        yield slot


def _made_before(publisher: Publisher, upload_id: str) -> VersionRecord | None:
    made = [v for v in publisher.versions() if v.state != "publishing" and v.source.startswith(_mark(upload_id))]
    return made[0] if made else None


def _mark(upload_id: str) -> str:
    return f"upload {upload_id} "
