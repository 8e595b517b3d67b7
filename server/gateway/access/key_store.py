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
from server.gateway.access.records import (
    DOOR,
    INFER,
    KEYS_PREFIX,
    DoorRecord,
    KeyLimits,
    KeyRecord,
    Scope,
    digest_of,
    new_id,
    new_key,
)
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
        self._door: DoorRecord | None = None
        self._revisions: dict[str, int] = {}  # of the newest change of each that was taken in, its end included
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
                        self._gone(event.kv.key, event.kv.mod_revision)
                    self._use()
            except StoreError as exc:
                if not away:
                    log.warning("the keys last read stay in use: %s", exc)
                away = True
                await asyncio.sleep(RETRY_STORE_S)

    async def refresh(self) -> int:
        """Reads all records; returns their revision. Raises StoreError."""
        items, revision = await self._store.list(KEYS_PREFIX)
        known = self._records.keys() | self._unread | ({DOOR} if self._door is not None else set())
        for gone in known - {kv.key for kv in items}:
            self._gone(gone, revision)
        for kv in items:
            self._put(kv)
        self._use()
        return revision

    def _use(self) -> None:
        self._ring.use_records(self._records.values(), unread=bool(self._unread), door=self._door)

    def _put(self, kv: KeyValue) -> None:
        """One that cannot be read keeps the form in which it was last read: no key gains or loses by a fault."""
        if kv.mod_revision < self._revisions.get(kv.key, 0):
            return  # a change made here was taken in before the watch came to it
        self._revisions[kv.key] = kv.mod_revision
        self._unread.add(kv.key)
        with _said(kv.key):
            if kv.key == DOOR:
                self._door = DoorRecord.from_json(kv.value)
            else:
                self._records[kv.key] = _read(kv)
            self._unread.discard(kv.key)

    def _gone(self, key: str, revision: int) -> None:
        if revision < self._revisions.get(key, 0):
            return
        if key == DOOR:
            self._door = None
        self._records.pop(key, None)
        self._unread.discard(key)
        self._revisions[key] = revision

    # changing

    async def every(self) -> list[KeyRecord]:
        """All records, oldest first. Raises StoreError."""
        records = []
        for kv in (await self._store.list(KEYS_PREFIX))[0]:
            if kv.key != DOOR:
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
        key = KEYS_PREFIX + key_id
        await self._store.txn({key: revision}, {key: None, **_closing(record)})
        log.info("key %s (%s) was forgotten", key_id, record.name)
        return record

    async def open(self) -> None:
        """From now on inference asks for no key, until one is made. Raises Conflict, StoreError.

        Only where no key works: else limits and owners would be gone in silence.
        """
        if self._ring.required:
            advice = "start it without --require-key and --api-key-file first."
            raise Conflict(f"This gateway asks for a key in any case; {advice}", code="key_required")
        for _ in range(ATTEMPTS):
            found = await self._store.get(DOOR)
            expected = found.mod_revision if found is not None else MISSING
            records = await self.every()  # a key that is made after the look at the door closes it anew: a conflict
            left = [record for record in records if INFER in record.scopes and record.revoked_at is None]
            if left:
                named = ", ".join(f"{record.id} ({record.name})" for record in left[:3])
                which = f"{len(left)} for inference: {named}{', ...' if len(left) > 3 else ''}"
                raise Conflict(f"There are keys, {which}; revoke them first.", code="keys_in_use")
            with contextlib.suppress(StoreConflict):
                door = DoorRecord(open=True, since=time.time())
                self._took(await self._store.txn({DOOR: expected}, {DOOR: door.to_json()}), door)
                log.warning("inference was opened: it asks for no key until one is made")
                return
        raise Conflict("Keys are being made at the same time; try again.", code="key_busy")

    async def _write(self, record: KeyRecord, expected: int) -> None:
        """In force in this gateway when it returns, in the others when they hear of it. Raises StoreConflict."""
        key = KEYS_PREFIX + record.id
        closing = _closing(record)
        self._took(
            await self._store.txn({key: expected}, {key: record.to_json(), **closing}),
            record,
            *(DoorRecord.from_json(door) for door in closing.values()),
        )

    def _took(self, revision: int, *written: KeyRecord | DoorRecord) -> None:
        """Take in what was written here at `revision`, unless something newer was seen since."""
        for record in written:
            key = DOOR if isinstance(record, DoorRecord) else KEYS_PREFIX + record.id
            if revision <= self._revisions.get(key, 0):
                continue
            self._revisions[key] = revision
            self._unread.discard(key)
            if isinstance(record, DoorRecord):
                self._door = record
            else:
                self._records[key] = record
        self._use()

    async def _found(self, key_id: str) -> tuple[KeyRecord, int]:
        kv = await self._store.get(KEYS_PREFIX + key_id)
        if kv is None:
            raise NotFound(f"There is no key {key_id!r}; `hotswap keys list` shows all.", code="unknown_key")
        return _read(kv), kv.mod_revision


def _closing(record: KeyRecord) -> dict[str, bytes]:
    """What is written with a record: a key for inference closes it for those who have none, for good."""
    return {DOOR: DoorRecord(open=False, since=time.time()).to_json()} if INFER in record.scopes else {}


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
