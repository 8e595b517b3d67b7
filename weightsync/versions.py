"""Finds a version and opens what it is made of, on the host its slots are on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from weightsync.errors import UnknownVersion
from weightsync.parts import BASE
from weightsync.receiver import SlotReader
from weightsync.records import ActiveRecord, InstanceRecord, Keys, VersionRecord
from weightsync.store.sync import SyncStore


@dataclass(frozen=True)
class Records:
    """Everything the store says of one model, read at once."""

    active: ActiveRecord | None
    versions: dict[int, VersionRecord]
    instances: dict[str, InstanceRecord]

    @classmethod
    def read(cls, store_url: str, model: str) -> Records:
        """Raises StoreUnavailable, RecordError."""
        keys = Keys(model)
        with contextlib.closing(SyncStore(store_url, create=False)) as store:
            items, _ = store.list(keys.root)
        active = next((ActiveRecord.from_json(kv.value) for kv in items if kv.key == keys.active), None)
        versions = [VersionRecord.from_json(kv.value) for kv in items if kv.key.startswith(keys.versions)]
        instances = [InstanceRecord.from_json(kv.value) for kv in items if kv.key.startswith(keys.instances)]
        return cls(active, {v.version: v for v in versions}, {i.id: i for i in instances})

    def ready(self, version: int | None) -> VersionRecord:
        """A version that is still held; without a number the active one, or the newest. Raises UnknownVersion."""
        if version is None:
            held = [v.version for v in self.versions.values() if v.state == "ready"]
            version = self.active.version if self.active is not None else max(held, default=0)
        found = self.versions.get(version)
        if found is None or found.state != "ready":
            raise UnknownVersion(version, found.state if found is not None else None)
        return found


@contextlib.contextmanager
def opened(record: VersionRecord) -> Iterator[dict[str, SlotReader]]:
    """The slots of a version by part (BASE, "draft", "lora/NAME"), held against reuse meanwhile.

    Raises ManifestError, SlotBusy.
    """
    places = {BASE: (record.slot, record.manifest_digest)}
    places |= {part.name: (part.slot, part.manifest_digest) for part in record.parts}
    with contextlib.ExitStack() as stack:
        yield {
            part: stack.enter_context(SlotReader.open(slot, manifest_digest=digest, populate=False))
            for part, (slot, digest) in places.items()
        }


def label(part: str, name: str) -> str:
    """How a tensor is named to people: its own name, with the part's before it unless it is the base model's."""
    return f"{part}:{name}" if part else name
