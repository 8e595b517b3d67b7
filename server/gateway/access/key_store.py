"""The key records in the store: followed by every gateway, changed through the admin port of any.

Every change is a compare-and-swap on one record, so two operators cannot undo each other's work unseen. While the store
is away the keys last read stay in use.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from server.errors import Conflict, NotFound
from server.gateway.access.keys import KeyRing
from server.gateway.access.records import KEYS_PREFIX, KeyLimits, KeyRecord, Scope, digest_of, new_id, new_key
from weightsync.errors import Conflict as StoreConflict
from weightsync.errors import RecordError, StoreError
from weightsync.store import MISSING, KeyValue, Store

log = logging.getLogger("hotswap.gateway")

RETRY_STORE_S = 0.5
ATTEMPTS = 8  # at a change, while others change the same record


@dataclass(frozen=True)
class NewKey:
    """What a key is made with. `expires_at` is unix seconds."""

    name: str
    scopes: tuple[Scope, ...]
    expires_at: float | None
    limits: KeyLimits


class KeyStore:
    """Reads and writes key records, and keeps `ring` as they are."""

    def __init__(self, store: Store, ring: KeyRing) -> None:
        self._store = store
        self._ring = ring
        self._records: dict[str, KeyRecord] = {}
        self._revisions: dict[str, int] = {}
        self._unread: set[str] = set()  # present, but not in a form known here

    # following

    async def run(self) -> None:
        """Follows the store for ever."""
        away = False
        while True:
            try:
                revision = await self.refresh()
                away = False
                async for event in self._store.watch(KEYS_PREFIX, revision + 1):
                    if event.kind == "put":
                        self._put(event.kv)
                    else:
                        self._gone(event.kv.key)
                    self._use()
            except StoreError as exc:
                if not away:
                    log.warning("the keys last read stay in use: %s", exc)
                away = True
                await asyncio.sleep(RETRY_STORE_S)

    async def refresh(self) -> int:
        """Reads all records; returns their revision. Raises StoreError."""
        items, revision = await self._store.list(KEYS_PREFIX)
        for gone in (self._records.keys() | self._unread) - {kv.key for kv in items}:
            self._gone(gone)
        for kv in items:
            self._put(kv)
        self._use()
        return revision

    def _use(self) -> None:
        self._ring.use_records(self._records.values(), unread=bool(self._unread))

    def _put(self, kv: KeyValue) -> None:
        """One that cannot be read keeps the form in which it was last read: no key gains or loses by a fault."""
        if kv.mod_revision < self._revisions.get(kv.key, 0):
            return  # a change made here was taken in before the watch came to it
        self._revisions[kv.key] = kv.mod_revision
        self._unread.add(kv.key)
        with _said(kv.key):
            self._records[kv.key] = _read(kv)
            self._unread.discard(kv.key)

    def _gone(self, key: str) -> None:
        self._records.pop(key, None)
        self._revisions.pop(key, None)
        self._unread.discard(key)

    # changing

    async def every(self) -> list[KeyRecord]:
        """All records, oldest first. Raises StoreError."""
        records = []
        for kv in (await self._store.list(KEYS_PREFIX))[0]:
            with _said(kv.key):
                records.append(_read(kv))
        return sorted(records, key=lambda record: (record.created_at, record.id))

    async def one(self, key_id: str) -> KeyRecord:
        """Raises NotFound, StoreError."""
        return (await self._found(key_id))[0]

    async def create(self, new: NewKey) -> tuple[KeyRecord, str]:
        """A record and its key, which is nowhere to be read again. Raises StoreError."""
        key_id = new_id()
        key = new_key(key_id)
        record = KeyRecord(
            key_id, new.name, digest_of(key), new.scopes, time.time(), expires_at=new.expires_at, limits=new.limits
        )
        await self._write(record, MISSING)
        log.info("key %s (%s) was made", key_id, new.name)
        return record, key

    async def change(self, key_id: str, change: Callable[[KeyRecord], KeyRecord]) -> KeyRecord:
        """Applies `change` to a record that is not revoked. Raises NotFound, Conflict, StoreError."""
        for _ in range(ATTEMPTS):
            record, revision = await self._found(key_id)
            if record.revoked_at is not None:
                raise Conflict(f"Key {key_id} was revoked, for good; make a new one.", code="key_revoked")
            changed = change(record)
            with contextlib.suppress(StoreConflict):
                await self._write(changed, revision)
                log.info("key %s (%s) was changed, it is %s", key_id, changed.name, changed.standing(time.time()))
                return changed
        raise Conflict(f"Key {key_id} is being changed by others; try again.", code="key_busy")

    async def forget(self, key_id: str) -> KeyRecord:
        """Removes the record of a revoked key. Raises NotFound, Conflict (it is not revoked), StoreError."""
        record, revision = await self._found(key_id)
        if record.revoked_at is None:
            raise Conflict(f"Key {key_id} works; revoke it before its record is removed.", code="key_not_revoked")
        await self._store.txn({KEYS_PREFIX + key_id: revision}, {KEYS_PREFIX + key_id: None})
        log.info("key %s (%s) was forgotten", key_id, record.name)
        return record

    async def _write(self, record: KeyRecord, expected: int) -> None:
        """In force in this gateway when it returns, in the others when they hear of it. Raises StoreConflict."""
        key = KEYS_PREFIX + record.id
        revision = await self._store.compare_and_swap(key, expected, record.to_json())
        if revision > self._revisions.get(key, 0):
            self._records[key], self._revisions[key] = record, revision
            self._unread.discard(key)
            self._use()

    async def _found(self, key_id: str) -> tuple[KeyRecord, int]:
        kv = await self._store.get(KEYS_PREFIX + key_id)
        if kv is None:
            raise NotFound(f"There is no key {key_id!r}; `hotswap keys list` shows all.", code="unknown_key")
        return _read(kv), kv.mod_revision


def _read(kv: KeyValue) -> KeyRecord:
    record = KeyRecord.from_json(kv.value)
    for digest in (record.digest, record.old_digest or record.digest):
        if len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
            raise RecordError("KeyRecord", "a digest is not SHA-256 in hexadecimal")
    return record


@contextlib.contextmanager
def _said(key: str) -> Iterator[None]:
    """A record that cannot be read is logged, not raised."""
    try:
        yield
    except RecordError as exc:
        log.error("ignoring %s: %s", key, exc)
