"""Finds a version and opens what it is made of, on the host its slots are on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from weightsync.errors import ManifestError, UnknownVersion
from weightsync.hosts import host_of, local_path, this_host
from weightsync.parts import BASE
from weightsync.peer.copies import Copies, local_slot, own_copies, with_local_slots
from weightsync.receiver import SlotReader
from weightsync.records import ActiveRecord, InstanceRecord, Keys, VersionRecord
from weightsync.store import SyncStore


@dataclass(frozen=True)
class Records:
    """Everything the store says of one model, read at once; of copies, those on this host."""

    active: ActiveRecord | None
    versions: dict[int, VersionRecord]
    instances: dict[str, InstanceRecord]
    host: str = ""
    copies: Copies = field(default_factory=dict)

    @classmethod
    def read(cls, store_url: str, model: str) -> Records:
        """Raises StoreUnavailable, RecordError, HostNameError."""
        keys, host = Keys(model), this_host()
        with contextlib.closing(SyncStore(store_url, create=False)) as store:
            items, _ = store.list(keys.root)
            copies = store.run(own_copies(store.store, keys, host))
        active = next((ActiveRecord.from_json(kv.value) for kv in items if kv.key == keys.active), None)
        versions = [VersionRecord.from_json(kv.value) for kv in items if kv.key.startswith(keys.versions)]
        instances = [InstanceRecord.from_json(kv.value) for kv in items if kv.key.startswith(keys.instances)]
        return cls(active, {v.version: v for v in versions}, {i.id: i for i in instances}, host, copies)

    def ready(self, version: int | None) -> VersionRecord:
        """A version that is still held, with the paths of its slots where they are on this host.

        Without a number the active one, or the newest. Raises UnknownVersion.
        """
        if version is None:
            held = [v.version for v in self.versions.values() if v.state == "ready"]
            version = self.active.version if self.active is not None else max(held, default=0)
        found = self.versions.get(version)
        if found is None or found.state != "ready":
            raise UnknownVersion(version, found.state if found is not None else None)
        return with_local_slots(found, lambda part: local_slot(part, self.host, self.copies))


@contextlib.contextmanager
def opened(record: VersionRecord) -> Iterator[dict[str, SlotReader]]:
    """The slots of a version with local paths, by part (BASE, "draft", "lora/NAME"), held against reuse meanwhile.

    Raises ManifestError, SlotBusy.
    """
    places = {BASE: (record.slot, record.manifest_digest)}
    places |= {part.name: (part.slot, part.manifest_digest) for part in record.parts}
    with contextlib.ExitStack() as stack:
        yield {
            part: stack.enter_context(SlotReader.open(_path(record, slot), manifest_digest=digest, populate=False))
            for part, (slot, digest) in places.items()
        }


def _path(record: VersionRecord, slot: str) -> Path:
    """Raises ManifestError."""
    path = local_path(slot, "")
    if path is None:
        raise ManifestError(
            f"version {record.version} is on host {host_of(slot)}: ask there (HOTSWAP_HOST={host_of(slot)}), or on a "
            "host whose peer has a copy"
        )
    return path


def label(part: str, name: str) -> str:
    """How a tensor is named to people: its own name, with the part's before it unless it is the base model's."""
    return f"{part}:{name}" if part else name
