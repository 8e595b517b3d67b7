"""The blocking half of the SQLite store: one file in WAL mode, shared by several processes of one host.

    kv      what is true now             events  what changed, newest 20,000 or so, in order
    leases  when each ends, on the host's monotonic clock; `boot_id` tells the leases of a former boot apart
    meta    the revision counter, `boot_id`, and `store_id`, which tells this store from any other

A process keeps to the store it opened: another file in its place, or an older copy of it, is `store_lost`. Keys that
outlive their writer are on the disk when their transaction returns; leases and their keys end with the power anyway.

The first process after the end of a lease deletes its keys; a reader never sees them, because it looks first.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from weightsync.errors import Conflict, LeaseLost, StoreUnavailable, WatchCompacted
from weightsync.store.protocol import Event, KeyValue

FORMAT = 1
APPLICATION_ID = 0x686F7477  # "hotw"
EVENTS_KEPT = 20_000
PRUNE_EVERY = 256
LOCK_TIMEOUT_S = 5.0

SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS kv (
  key TEXT PRIMARY KEY, value BLOB NOT NULL, create_revision INTEGER NOT NULL, mod_revision INTEGER NOT NULL,
  lease INTEGER) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS kv_lease ON kv (lease) WHERE lease IS NOT NULL;
CREATE TABLE IF NOT EXISTS leases (id INTEGER PRIMARY KEY AUTOINCREMENT, ttl REAL NOT NULL, expires REAL NOT NULL);
CREATE TABLE IF NOT EXISTS events (
  seq INTEGER PRIMARY KEY AUTOINCREMENT, revision INTEGER NOT NULL, kind TEXT NOT NULL, key TEXT NOT NULL,
  value BLOB NOT NULL, create_revision INTEGER NOT NULL, lease INTEGER);
CREATE INDEX IF NOT EXISTS events_revision ON events (revision);
INSERT OR IGNORE INTO meta VALUES ('revision', 0), ('boot_id', ''), ('store_id', lower(hex(randomblob(16))));
"""


class Database:
    """Not thread-safe: the caller serialises. Every method raises StoreUnavailable when the file cannot be used."""

    def __init__(self, path: str, *, create: bool, store_id: str | None = None) -> None:
        """With a `store_id` only that store is opened. Raises StoreUnavailable for another one."""
        self.path, self.store_id = path, store_id
        self._seen = 0  # the newest revision
        with self._mapped():
            self._connection = self._open(create and store_id is None)
        self._inode = self._stat()

    def _open(self, create: bool) -> sqlite3.Connection:
        if create:
            Path(self.path).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            # Only a file that is new: closing any descriptor of one that is open elsewhere in this process would drop
            # SQLite's POSIX locks on it, and another process would then delete the write-ahead log under our feet.
            with contextlib.suppress(FileExistsError):
                os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        elif not os.path.exists(self.path):
            raise StoreUnavailable(self.path, "no such file", "Start `hotswap up` first, or check the --store URL")
        connection = sqlite3.connect(
            self.path, timeout=LOCK_TIMEOUT_S, isolation_level=None, check_same_thread=False, cached_statements=256
        )
        try:
            if self.store_id is not None:  # before anything is written to it
                self._identify(connection)
            self._prepare(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _identify(self, connection: sqlite3.Connection) -> None:
        """Raises StoreUnavailable unless it is the store that is meant, and as new as it was seen."""
        try:
            known = dict(connection.execute("SELECT name, value FROM meta WHERE name IN ('store_id', 'revision')"))
        except sqlite3.OperationalError as error:
            if "no such table" not in str(error):
                raise
            known = {}
        if known.get("store_id") == self.store_id and known.get("revision", -1) >= self._seen:
            return
        problem = "an older copy of it" if known.get("store_id") == self.store_id else "another store"
        advice = "Put the file back, or stop everything that uses this store and start `hotswap up` again"
        raise StoreUnavailable(self.path, f"{problem} is in its place", advice, code="store_lost")

    def _prepare(self, connection: sqlite3.Connection) -> None:
        connection.execute("PRAGMA journal_mode=WAL")
        found = connection.execute("PRAGMA user_version").fetchone()[0]
        if found not in (0, FORMAT):
            problem = f"has format {found}, this release reads {FORMAT}"
            raise StoreUnavailable(self.path, problem, "Run the same release everywhere, or start with a new store")
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        connection.execute("BEGIN IMMEDIATE")
        with connection:
            for statement in SCHEMA.split(";\n"):
                connection.execute(statement)
            connection.execute(f"PRAGMA application_id={APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version={FORMAT}")
            # The monotonic clock starts anew with the host: leases of a former boot have ended.
            changed = connection.execute(
                "UPDATE meta SET value = ? WHERE name = 'boot_id' AND value != ?", (boot_id, boot_id)
            )
            if changed.rowcount:
                connection.execute("UPDATE leases SET expires = 0")
            (self.store_id,) = connection.execute("SELECT value FROM meta WHERE name = 'store_id'").fetchone()

    def close(self) -> None:
        self._connection.close()

    # -- reading

    def get(self, key: str) -> KeyValue | None:
        with self._reading() as connection:
            row = connection.execute("SELECT * FROM kv WHERE key = ?", (key,)).fetchone()
            return KeyValue(*row) if row else None

    def list(self, prefix: str, first: str = "") -> tuple[list[KeyValue], int]:
        with self._reading() as connection:
            rows = connection.execute("SELECT * FROM kv WHERE key >= ? AND key < ? ORDER BY key", _range(prefix, first))
            return [KeyValue(*row) for row in rows], self._revision()

    def revision(self) -> int:
        with self._reading():
            return self._revision()

    def events(self, prefix: str, start: int, first: str = "") -> tuple[Sequence[Event], int]:
        """Events under `prefix`, of keys from `first` on, from revision `start` on, and the revision to ask from next.

        Raises WatchCompacted.
        """
        with self._reading() as connection:
            newest = self._revision()
            if start == newest + 1:
                return [], start
            oldest = connection.execute("SELECT min(revision) FROM events").fetchone()[0] or newest + 1
            if start > newest + 1 or (start < oldest and oldest > 1):
                raise WatchCompacted(start, oldest)
            rows = connection.execute(
                "SELECT kind, key, value, create_revision, revision, lease FROM events "
                "WHERE revision >= ? AND key >= ? AND key < ? ORDER BY revision, seq",  # by the index of the revision
                (start, *_range(prefix, first)),
            )
            return [Event(kind, KeyValue(*kv)) for kind, *kv in rows], newest + 1

    # -- writing

    def txn(
        self, compares: Mapping[str, int], puts: Mapping[str, bytes | None], leases: Mapping[str, int] | None = None
    ) -> tuple[int, bool]:
        """The revision afterwards, and whether anything changed. Raises Conflict, LeaseLost."""
        leases = leases or {}
        with self._writing(durable=any(key not in leases for key in puts)) as connection:
            for key, expected in compares.items():
                low, high = _range(key) if key.endswith("/") else (key, key + "\0")
                newest = "SELECT max(mod_revision) FROM kv WHERE key >= ? AND key < ?"
                found = connection.execute(newest, (low, high)).fetchone()[0] or 0
                if found > expected or (found != expected and not key.endswith("/")):
                    raise Conflict(key, expected, found)
            for lease in set(leases.values()):
                self._require_lease(lease)
            return self._apply(puts, leases)

    def grant_lease(self, ttl_s: float) -> int:
        with self._writing() as connection:
            cursor = connection.execute(
                "INSERT INTO leases (ttl, expires) VALUES (?, ?)", (ttl_s, time.monotonic() + ttl_s)
            )
            return int(cursor.lastrowid or 0)

    def keep_alive(self, lease: int) -> None:
        with self._writing() as connection:
            self._require_lease(lease)
            connection.execute("UPDATE leases SET expires = ttl + ? WHERE id = ?", (time.monotonic(), lease))

    def revoke(self, lease: int) -> bool:
        with self._writing():
            return self._end_leases([lease])

    def expire_leases(self) -> bool:
        """Delete the keys of leases that have ended; whether there were any."""
        with self._guarded() as connection:
            if not self._any_ended(connection):
                return False
        with self._writing(expire=False):
            return self._expire()

    # -- inside a transaction

    def _apply(self, puts: Mapping[str, bytes | None], leases: Mapping[str, int]) -> tuple[int, bool]:
        revision = self._revision() + 1
        changed = False
        for key, value in puts.items():
            changed |= (
                self._delete(key, revision) if value is None else self._put(key, value, leases.get(key), revision)
            )
        if not changed:
            return revision - 1, False
        self._connection.execute("UPDATE meta SET value = ? WHERE name = 'revision'", (revision,))
        if revision % PRUNE_EVERY == 0:
            self._connection.execute("DELETE FROM events WHERE revision <= ?", (revision - EVENTS_KEPT,))
        return revision, True

    def _put(self, key: str, value: bytes, lease: int | None, revision: int) -> bool:
        row = self._connection.execute(
            "INSERT INTO kv VALUES (?, ?, ?, ?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value, "
            "mod_revision = excluded.mod_revision, lease = excluded.lease RETURNING create_revision",
            (key, value, revision, revision, lease),
        ).fetchone()
        self._record("put", revision, key, value, row[0], lease)
        return True

    def _delete(self, key: str, revision: int) -> bool:
        row = self._connection.execute(
            "DELETE FROM kv WHERE key = ? RETURNING value, create_revision, lease", (key,)
        ).fetchone()
        if row is None:
            return False
        self._record("delete", revision, key, *row)
        return True

    def _record(self, kind: str, revision: int, key: str, value: bytes, created: int, lease: int | None) -> None:
        self._connection.execute(
            "INSERT INTO events (revision, kind, key, value, create_revision, lease) VALUES (?, ?, ?, ?, ?, ?)",
            (revision, kind, key, value, created, lease),
        )

    def _require_lease(self, lease: int) -> None:
        if self._connection.execute("SELECT 1 FROM leases WHERE id = ?", (lease,)).fetchone() is None:
            raise LeaseLost(lease)

    def _any_ended(self, connection: sqlite3.Connection) -> bool:
        row = connection.execute("SELECT 1 FROM leases WHERE expires <= ? LIMIT 1", (time.monotonic(),)).fetchone()
        return row is not None

    def _expire(self) -> bool:
        rows = self._connection.execute("SELECT id FROM leases WHERE expires <= ?", (time.monotonic(),)).fetchall()
        return self._end_leases([row[0] for row in rows])

    def _end_leases(self, leases: Sequence[int]) -> bool:
        keys: dict[str, bytes | None] = {}
        for lease in leases:
            rows = self._connection.execute("SELECT key FROM kv WHERE lease = ? ORDER BY key", (lease,))
            keys.update(dict.fromkeys((row[0] for row in rows), None))
            self._connection.execute("DELETE FROM leases WHERE id = ?", (lease,))
        return self._apply(keys, {})[1] if keys else False

    def _revision(self) -> int:
        """The store's revision now, which it must not fall behind."""
        self._seen = int(self._connection.execute("SELECT value FROM meta WHERE name = 'revision'").fetchone()[0])
        return self._seen

    # -- the file

    @contextlib.contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        """One consistent snapshot, in which no ended lease shows."""
        self.expire_leases()
        with self._guarded() as connection:
            connection.execute("BEGIN")
            try:
                yield connection
            finally:
                connection.execute("ROLLBACK")

    @contextlib.contextmanager
    def _writing(self, *, expire: bool = True, durable: bool = False) -> Iterator[sqlite3.Connection]:
        with self._guarded() as connection:
            connection.execute(f"PRAGMA synchronous={'FULL' if durable else 'NORMAL'}")
            connection.execute("BEGIN IMMEDIATE")
            with connection:  # commits, or rolls back on an exception
                if expire:
                    self._expire()
                yield connection
            self._revision()  # one that was rolled back was never seen

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[sqlite3.Connection]:
        with self._mapped():
            if self._stat() != self._inode:  # the open connection would write into a file that nobody sees
                moved = self._open(create=False)
                self._connection.close()
                self._connection, self._inode = moved, self._stat()
            yield self._connection

    def _stat(self) -> tuple[int, int]:
        try:
            found = os.stat(self.path)
        except OSError as error:
            raise StoreUnavailable(
                self.path, f"is not there any more ({error.strerror})", "Put the file back, or start `hotswap up` again"
            ) from error
        return found.st_dev, found.st_ino

    @contextlib.contextmanager
    def _mapped(self) -> Iterator[None]:
        """SQLite's and the file system's errors become StoreUnavailable, here and nowhere else."""
        try:
            yield
        except sqlite3.DatabaseError as error:
            raise StoreUnavailable(self.path, str(error), _advice(error)) from error
        except OSError as error:
            raise StoreUnavailable(
                self.path, error.strerror or str(error), "Choose a directory this user may write to"
            ) from error


def _advice(error: sqlite3.DatabaseError) -> str:
    text = str(error)
    if "locked" in text or "busy" in text:
        return f"Another process held it for more than {LOCK_TIMEOUT_S:g} s; look for one that hangs"
    if "readonly" in text or "unable to open" in text:
        return "Choose a file and directory this user may write to"
    if "full" in text:
        return "Free space on its file system"
    return "The file is damaged or not a store; move it away and start `hotswap up` again (versions are published anew)"


def _range(prefix: str, first: str = "") -> tuple[str, str]:
    """The half-open key range of a prefix, from `first` on; "" covers everything."""
    return max(prefix, first), prefix[:-1] + chr(ord(prefix[-1]) + 1) if prefix else chr(0x10FFFF)
