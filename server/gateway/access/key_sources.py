"""The sources of keys: files, which are read again when they change, and records in the store.

**Files** hold inference keys one a line, and the admin key. They are read without a restart. A file that cannot be used
when it changes leaves the keys as they were, which the log says: an editor that empties a file before it writes it
locks nobody out.

**Records** are followed by every gateway and changed through the admin port of any. Every change is a compare-and-swap
on one record, so two operators cannot undo each other's work unseen. While the store is away the keys last read stay in
use.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from server.errors import ConfigError, HttpError
from server.files import write_new_file
from server.gateway.access.keys import KeyRing, Principal
from server.gateway.access.records import (
    ADMIN,
    DOOR,
    INFER,
    KEYS_PREFIX,
    By,
    DoorRecord,
    KeyRecord,
    Scope,
    digest_of,
    granted,
    new_id,
    new_key,
)
from server.gateway.config import GatewayConfig
from server.key_limits import KeyLimits
from weightsync.control.chain import Action, LedgerEntry, append
from weightsync.errors import Conflict as StoreConflict
from weightsync.errors import RecordError, StoreError
from weightsync.store import MISSING, KeyValue, Store
from weightsync.tls import Stamp, stamp

log = logging.getLogger("hotswap.gateway")

MIN_KEY_LENGTH = 16
COLLECT = " --collect"
_HASHED = re.compile(r"sha256:([0-9a-f]{64})")


def load_keys(config: GatewayConfig) -> KeyRing:
    """The keys of `config`; writes a new admin key to `config.key_path` (0600) if there is none. Raises ConfigError."""
    return KeyRing(read_keys(config), required=config.require_key or config.api_key_file is not None)


def read_keys(config: GatewayConfig) -> dict[bytes, Principal]:
    """Digest -> principal, of every file. Raises ConfigError."""
    keys = _read_keys(config.api_key_file) if config.api_key_file is not None else {}
    digest = _admin_digest(config)
    keys[digest] = Principal("admin", granted((ADMIN, INFER)), digest, who="admin key")
    return keys


def read_admin_key(path: Path) -> str:
    """The key in `path`. Raises ConfigError if it is unreadable, too short or readable by others."""
    key = read_private(path).strip()
    if len(key) < MIN_KEY_LENGTH:
        raise ConfigError(f"The key in {path} has under {MIN_KEY_LENGTH} characters; delete the file for a new one.")
    return key


class KeyFiles:
    """Looks whether the files have changed, and gives their keys to the ring."""

    def __init__(self, config: GatewayConfig, ring: KeyRing) -> None:
        self._config = config
        self._ring = ring
        self._paths = [config.api_key_file] if config.api_key_file is not None else []
        self._paths += [config.key_path] if config.admin_key is None else []
        self._seen = self._stamps()

    def reload(self) -> None:
        """To be called now and then; a few microseconds while nothing has changed."""
        stamps = self._stamps()
        if stamps == self._seen:
            return
        self._seen = stamps
        try:
            if None in stamps:
                raise ConfigError("A key file is gone.")
            self._ring.use_files(read_keys(self._config))
        except ConfigError as exc:
            log.error("the keys of before stay in use: %s", exc)
        else:
            log.info("key files were read again")

    def _stamps(self) -> list[Stamp]:
        return [stamp(path) for path in self._paths]


def read_private(path: Path) -> str:
    """The text of a file that nobody else may read. Raises ConfigError."""
    try:
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            raise ConfigError(
                f"Others can read {path}. Run `chmod 600 {path}`, and change its keys if others had them."
            )
        return path.read_text()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"The key file {path} cannot be read: {exc}.") from exc


def _admin_digest(config: GatewayConfig) -> bytes:
    key = config.admin_key
    if key is None:
        key = _generated(config.key_path, keep=not config.check)
    hashed = _HASHED.fullmatch(key)
    if hashed is not None:
        return bytes.fromhex(hashed[1])
    if len(key) < MIN_KEY_LENGTH:
        raise ConfigError(f"HOTSWAP_ADMIN_KEY: use {MIN_KEY_LENGTH} characters or more, or unset it to have one made.")
    return hashlib.sha256(key.encode()).digest()


def _generated(path: Path, *, keep: bool) -> str:
    """The key in `path`, written first if it is not there and is to be kept; another gateway may be doing the same."""
    if path.exists():
        return read_admin_key(path)
    key = "hs-admin-" + secrets.token_urlsafe(32)
    if not keep:
        return key
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_new_file(path, key + "\n")
    except FileExistsError:
        return read_admin_key(path)
    except OSError as exc:
        raise ConfigError(f"No admin key could be written to {path} ({exc.strerror}); set --admin-key-file.") from exc
    log.info("wrote a new admin key to %s", path)
    return key


def _read_keys(path: Path) -> dict[bytes, Principal]:
    """One key a line, `sha256:HEX NAME` or the key itself; `#` begins a comment. A ` --collect` at its end opts in to
    the capture of answers, as `hotswap keys create --collect` does."""
    keys: dict[bytes, Principal] = {}
    for number, line in enumerate(read_private(path).splitlines(), 1):
        line, collect = line.strip(), False
        if line.endswith(COLLECT):
            line, collect = line.removesuffix(COLLECT).rstrip(), True
        key, _, name = line.partition(" ")
        if not key or key.startswith("#"):
            continue
        hashed = _HASHED.fullmatch(key)
        if hashed is None and len(key) < MIN_KEY_LENGTH:
            raise ConfigError(f"{path}, line {number}: use {MIN_KEY_LENGTH} characters or more, or `sha256:HEX`.")
        digest = bytes.fromhex(hashed[1]) if hashed else hashlib.sha256(key.encode()).digest()
        keys[digest] = Principal(name.strip() or f"key-{number}", frozenset({INFER}), digest, collect=collect)
    if not keys:
        raise ConfigError(f"{path} holds no key, so nobody could ask anything; add one a line.")
    return keys


RETRY_STORE_S = 0.5
ATTEMPTS = 8  # at a change, while others change the same record


@dataclass(frozen=True)
class NewKey:
    """The properties of a new key. `expires_at` is unix seconds."""

    name: str
    scopes: tuple[Scope, ...]
    expires_at: float | None
    limits: KeyLimits
    collect: bool = False
    models: tuple[str, ...] = ()


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
        """Raises HttpError (404), StoreError."""
        return (await self._found(key_id))[0]

    async def create(self, new: NewKey, by: By) -> tuple[KeyRecord, str]:
        """A record and its key, which is nowhere to be read again. Raises StoreError."""
        key_id = new_id()
        key = new_key(key_id)
        record = KeyRecord(
            key_id, new.name, digest_of(key), new.scopes, time.time(), expires_at=new.expires_at, limits=new.limits,
            collect=new.collect, models=new.models,
        )  # fmt: skip
        await self._write(record, MISSING, _told("key_create", record, by))
        log.info("key %s (%s) was made", key_id, new.name)
        return record, key

    async def change(
        self, key_id: str, change: Callable[[KeyRecord], KeyRecord], by: By, action: Action = "key_change"
    ) -> KeyRecord:
        """Applies `change` to a record that is not revoked. Raises HttpError (404, 409), StoreError."""
        for _ in range(ATTEMPTS):
            record, revision = await self._found(key_id)
            if record.revoked_at is not None:
                raise HttpError(409, f"Key {key_id} was revoked, for good; make a new one.", code="key_revoked")
            changed = change(record)
            with contextlib.suppress(StoreConflict):
                await self._write(changed, revision, _told(action, changed, by, record))
                log.info("key %s (%s) was changed, it is %s", key_id, changed.name, changed.standing(time.time()))
                return changed
        raise HttpError(409, f"Key {key_id} is being changed by others; try again.", code="key_busy")

    async def forget(self, key_id: str, by: By) -> KeyRecord:
        """Removes the record of a revoked key. Raises HttpError (404; 409 when it is not revoked), StoreError."""
        record, revision = await self._found(key_id)
        if record.revoked_at is None:
            raise HttpError(409, f"Key {key_id} works; revoke it before its record is removed.", code="key_not_revoked")
        key = KEYS_PREFIX + key_id
        entry = _told("key_forget", record, by)
        await append(self._store, {key: revision}, {key: None, **_closing(record)}, entry)
        log.info("key %s (%s) was forgotten", key_id, record.name)
        return record

    async def open(self, by: By) -> None:
        """From now on inference asks for no key, until one is made. Raises HttpError (409), StoreError.

        Only where no key works: else limits and owners would be gone in silence.
        """
        if self._ring.required:
            advice = "start it without --require-key and --api-key-file first."
            raise HttpError(409, f"This gateway asks for a key in any case; {advice}", code="key_required")
        for _ in range(ATTEMPTS):
            found = await self._store.get(DOOR)
            expected = found.mod_revision if found is not None else MISSING
            records = await self.every()  # a key that is made after the look at the door closes it anew: a conflict
            left = [record for record in records if INFER in record.scopes and record.revoked_at is None]
            if left:
                named = ", ".join(f"{record.id} ({record.name})" for record in left[:3])
                which = f"{len(left)} for inference: {named}{', ...' if len(left) > 3 else ''}"
                raise HttpError(409, f"There are keys, {which}; revoke them first.", code="keys_in_use")
            with contextlib.suppress(StoreConflict):
                door = DoorRecord(open=True, since=time.time())
                entry = LedgerEntry("inference_open", by.who, reason=by.reason)
                self._took(await append(self._store, {DOOR: expected}, {DOOR: door.to_json()}, entry), door)
                log.warning("inference was opened: it asks for no key until one is made")
                return
        raise HttpError(409, "Keys are being made at the same time; try again.", code="key_busy")

    async def _write(self, record: KeyRecord, expected: int, entry: LedgerEntry) -> None:
        """In force in this gateway when it returns, in the others when they hear of it. Raises StoreConflict."""
        key = KEYS_PREFIX + record.id
        closing = _closing(record)
        self._took(
            await append(self._store, {key: expected}, {key: record.to_json(), **closing}, entry),
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
            raise HttpError(404, f"There is no key {key_id!r}; `hotswap keys list` shows all.", code="unknown_key")
        return _read(kv), kv.mod_revision


def _told(action: Action, record: KeyRecord, by: By, before: KeyRecord | None = None) -> LedgerEntry:
    """The entry of the ledger: whose key, and what is different; no digest of it."""
    known = ("name", "scopes", "expires_at", "disabled", "limits", "collect", "models")
    changed = [n for n in known if before is not None and getattr(before, n) != getattr(record, n)]
    told = [f"{n}: {getattr(record, n)}" for n in (changed if before is not None else ("scopes",))]
    subject = f"key {record.name} ({record.id})"
    return LedgerEntry(action, by.who, subject=subject, reason=by.reason, outcome="; ".join(told))


def _closing(record: KeyRecord) -> dict[str, bytes]:
    """The values written with a record: a key for inference closes inference to clients without one, for good."""
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
