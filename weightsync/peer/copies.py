"""What the store says of copies: which hosts have which slots, and where a version's slots are on this host."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from weightsync.hosts import local_path
from weightsync.parts import BASE, base_of
from weightsync.records import CopyRecord, Keys, PartRecord, VersionRecord
from weightsync.store.protocol import KeyValue, Store

DIGEST_LENGTH = 32
Copies = Mapping[str, CopyRecord]  # one host's, by manifest digest


def parse_key(keys: Keys, key: str) -> tuple[str, str] | None:
    """(manifest digest, host) of a copy's key; None for one of another model whose name begins with this one's."""
    digest, _, host = key.removeprefix(keys.copies).partition("/")
    return (digest, host) if len(digest) == DIGEST_LENGTH and host and "/" not in host else None


def parsed(keys: Keys, found: Iterable[KeyValue]) -> list[CopyRecord]:
    """The copies of a model. Raises RecordError."""
    return [CopyRecord.from_json(kv.value) for kv in found if parse_key(keys, kv.key) is not None]


async def ready_digests(store: Store, keys: Keys) -> set[str]:
    """The slots of which at least one host has a whole copy."""
    return {copy.digest for copy in parsed(keys, (await store.list(keys.copies))[0]) if copy.state == "ready"}


async def own_copies(store: Store, keys: Keys, host: str) -> dict[str, CopyRecord]:
    """The copies on `host` by manifest digest; without a name there are none, and the store is not asked."""
    if not host:
        return {}
    found = (await store.list(keys.copies))[0]
    mine = [kv for kv in found if (parse_key(keys, kv.key) or ("", ""))[1] == host]  # others' may be of another release
    return {copy.digest: copy for copy in parsed(keys, mine)}


def pieces(record: VersionRecord) -> list[PartRecord]:
    """Every slot of a ready version as a part, the base model first."""
    base = base_of(record)
    return [base, *record.parts] if base is not None else list(record.parts)


def place(part: PartRecord, host: str, own: Copies) -> Path | None:
    """Where a slot is on `host`, whose whole copies are in `own`; None if it is not there."""
    copy = own.get(part.manifest_digest)
    if copy is not None and copy.state == "ready":
        return local_path(copy.slot, host)
    return local_path(part.slot, host)


def placed(record: VersionRecord, where: Callable[[PartRecord], Path | None]) -> VersionRecord:
    """`record` with the paths of its slots instead of their names; those that are nowhere keep their names."""

    def at(part: PartRecord) -> PartRecord:
        path = where(part)
        return part if path is None else replace(part, slot=str(path))

    found = {part.name: at(part) for part in pieces(record)}
    return replace(record, slot=found[BASE].slot, parts=tuple(found[part.name] for part in record.parts))
