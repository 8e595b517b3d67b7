"""Publishes versions of a model from any program that has new weights: blocking, and a few milliseconds for small ones.

    pub = weightsync.Publisher("sqlite:///run/store.db", model="demo")
    version = pub.publish(model.named_parameters(), step=10)

One publisher holds a lineage at a time: opening a second one fences the first off (StalePublisher). Everything a
publisher has in the store before a commit hangs on its lease, so a killed trainer leaves nothing behind.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any

from weightsync import activation
from weightsync.arena import MAPPINGS
from weightsync.draft import Claim, Draft
from weightsync.errors import StoreUnavailable
from weightsync.ledger import Ledger, ensure_arena
from weightsync.manifest import Layout, Schema, TensorSpec, require_same_schema
from weightsync.records import ActiveRecord, Keys, TargetRecord, VersionRecord
from weightsync.sources import spec_of
from weightsync.store.sync import SyncStore

STORE_ENV = "HOTSWAP_STORE"
NamedTensors = Mapping[str, Any] | Iterable[tuple[str, Any]]
SchemaLike = Schema | Iterable[tuple[str, Any, Iterable[int]]]


class Publisher:
    """The one publisher of `lineage` for `model`. Ready versions that nobody has asked for are retired but for `keep`.

    Threads and the store connection do not survive a fork: make the publisher in the process that publishes.
    """

    def __init__(
        self, store: str | None = None, *, model: str, lineage: str = "trainer", lease_ttl_s: float = 5.0, keep: int = 2
    ) -> None:
        """`store` is a URL; without it HOTSWAP_STORE is read. Raises StoreUnavailable, ArenaUnavailable."""
        url = store or os.environ.get(STORE_ENV)
        if not url:
            raise StoreUnavailable("(none)", "no store was named", f"Pass its URL, or set {STORE_ENV}")
        self.model, self.lineage = model, lineage
        self._keys = Keys(model)
        self._asked: dict[int, tuple[TargetRecord, int]] = {}
        self._layout: tuple[Schema, Layout] | None = None
        self._store = SyncStore(url, create=False)
        self._ledger = Ledger(self._store.store, self._keys, lineage, lease_ttl_s, keep)
        try:
            self.arena = self._store.run(ensure_arena(self._store.store))
            self._store.run(self._ledger.take())
        except BaseException:
            self._store.close()
            raise

    def publish(
        self,
        named_tensors: NamedTensors,
        *,
        step: int | None = None,
        activate: bool = True,
        wait: bool = True,
        timeout_s: float = 60.0,
        metadata: Mapping[str, str] | None = None,
        source: str = "",
    ) -> int:
        """Write all tensors as a new version, make it ready, with `activate` have it swapped in; returns its number.

        `named_tensors` are (Hugging Face name, torch.Tensor | numpy array). A generator is consumed one tensor at a
        time, except for the first version of a model, which defines the schema. With `wait`, returns when the version
        is active. Raises TensorError (nothing was published), ArenaFull, StalePublisher, DraftLost, StoreUnavailable,
        and once the version is ready SwapAborted or SwapTimeout.
        """
        items = named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors
        schema = self._store.run(self._ledger.schema())
        if schema is None or isinstance(items, (list, tuple)):
            items = list(items)
            schema = Schema({name: spec_of(name, tensor) for name, tensor in items})
        with self.begin(schema, step=step, metadata=metadata, source=source) as draft:
            for name, tensor in items:
                draft.write(name, tensor)
            version = draft.commit(activate=activate, timeout_s=timeout_s)
        if activate and wait:
            self.wait_active(version, timeout_s)
        return version

    def begin(
        self,
        schema: SchemaLike,
        *,
        step: int | None = None,
        base: int | None = None,
        metadata: Mapping[str, str] | None = None,
        source: str = "",
    ) -> Draft:
        """Claim a slot for a new version; `schema` lists (name, dtype, shape) of every tensor.

        Raises TensorMismatch against the model's reference schema, ArenaFull, StalePublisher, StoreUnavailable.
        """
        schema = as_schema(schema)
        if (reference := self._store.run(self._ledger.schema())) is not None:
            require_same_schema(reference, schema)
        layout = self._layout_of(schema)
        blank = VersionRecord(
            version=0,
            state="publishing",
            slot="",
            nbytes=sum(spec.nbytes for spec in schema.tensors.values()),
            manifest_digest="",
            base=base,
            step=step,
            publisher=self.lineage,
            token=0,
            created_at=time.time(),
            source=source,
            tensors=len(schema.tensors),
        )
        record, revision, lock = self._store.run(self._ledger.claim(self.arena, blank, layout.total_nbytes))
        try:
            return Draft(self, Claim(record, revision, lock, MAPPINGS.get(lock)), schema, layout, metadata or {})
        except BaseException:
            lock.release()
            self._forget(record.version, revision)
            raise

    def activate(self, version: int, *, wait: bool = True, timeout_s: float = 60.0) -> None:
        """Have a ready version swapped in. Raises UnknownVersion, SwapAborted, SwapTimeout."""
        target = activation.new_target(version, self._name, timeout_s)
        revision = self._store.run(activation.request(self._store.store, self._keys, target))
        self._asked = {version: (target, revision)}
        if wait:
            self.wait_active(version, timeout_s)

    def rollback(self, *, wait: bool = True, timeout_s: float = 60.0) -> int:
        """Have the previous version swapped in again; returns it. Raises SwapAborted when there is none."""
        version = self._store.run(activation.previous_version(self._store.store, self._keys))
        self.activate(version, wait=wait, timeout_s=timeout_s)
        return version

    def wait_active(self, version: int, timeout_s: float = 60.0) -> None:
        """Return when `version` is the active one. Raises SwapAborted (refused, superseded) or SwapTimeout."""
        store, asked = self._store.store, self._asked.get(version)
        if asked is not None:
            return self._store.run(activation.outcome(store, self._keys, *asked, timeout_s))
        return self._store.run(activation.become_active(store, self._keys, version, timeout_s))

    def active(self) -> ActiveRecord | None:
        """The commit record as it stands."""
        found = self._store.get(self._keys.active)
        return ActiveRecord.from_json(found.value) if found else None

    def versions(self) -> list[VersionRecord]:
        """Every version the store knows of, oldest first."""
        return self._store.run(self._ledger.versions())

    def close(self) -> None:
        """End the lease, and with it any open draft; safe to call twice."""
        if not self._store.closed:
            self._store.run(self._ledger.close())
            self._store.close()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _make_ready(
        self, record: VersionRecord, revision: int, schema: Schema, activate_within_s: float | None
    ) -> None:
        """Commit a draft; with a deadline, ask for the swap in the same transaction."""
        target = None
        if activate_within_s is not None:
            target = activation.new_target(record.version, self._name, activate_within_s)
        done = self._store.run(self._ledger.make_ready(record, revision, schema, target))
        if target is not None:
            self._asked = {record.version: (target, done)}

    def _forget(self, version: int, revision: int) -> None:
        self._store.run(self._ledger.forget(version, revision))

    def _layout_of(self, schema: Schema) -> Layout:
        """The layout depends on the schema alone, which hardly ever changes."""
        if self._layout is None or self._layout[0] != schema:
            self._layout = (schema, Layout.of(schema))
        return self._layout[1]

    @property
    def _name(self) -> str:
        return f"{self.lineage}@{socket.gethostname()}:{os.getpid()}"


def as_schema(schema: SchemaLike) -> Schema:
    """Accepts dtypes as torch has them, or by name. Raises UnsupportedDtype."""
    if isinstance(schema, Schema):
        return schema
    return Schema({name: TensorSpec(str(dtype).removeprefix("torch."), tuple(shape)) for name, dtype, shape in schema})
