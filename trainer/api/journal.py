"""The journal: one SQLite file, which survives a crash of the server. Each transaction is on disk when it returns.

A request to a training client is written down before the server acknowledges it, and its answer with everything that it
changed in one transaction. So after a restart

    * a request that has an answer is not executed again, and answers the same,
    * a request without one is executed, since nothing that it had begun counts,
    * gradients since the last step are computed anew, from the batches that are kept until the step.

Weights and Adam's moments are in files beside it (tenants.py). A transaction names the file that counts from then on.
"""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

JSON: Final = "application/json"
KEEP_S: Final = 24 * 3600.0
"""Answers stay that long; the SDK asks for them within minutes."""
_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS records (
    kind TEXT NOT NULL, id TEXT NOT NULL, owner TEXT NOT NULL, parent TEXT NOT NULL, made REAL NOT NULL,
    about TEXT NOT NULL, PRIMARY KEY (kind, id));
CREATE INDEX IF NOT EXISTS records_by_parent ON records (kind, parent);
CREATE TABLE IF NOT EXISTS requests (
    model TEXT NOT NULL, seq INTEGER NOT NULL, owner TEXT NOT NULL, kind TEXT NOT NULL, digest TEXT NOT NULL,
    body BLOB, answer BLOB, type TEXT, failed INTEGER, done REAL, PRIMARY KEY (model, seq));
CREATE INDEX IF NOT EXISTS requests_open ON requests (done) WHERE done IS NULL;
"""


@dataclass(frozen=True)
class Record:
    """Of a `kind`: a session, model, checkpoint or sampler, or what finetuning/ keeps. `owner` is the key's digest,
    `parent` what it belongs to."""

    kind: str
    id: str
    owner: str
    parent: str = ""
    about: Mapping[str, Any] = field(default_factory=dict)
    made: float = field(default_factory=time.time)


@dataclass(frozen=True)
class Answer:
    """The body of a result. `failed`: an error instead, which the client is told as such."""

    content: bytes
    type: str = JSON
    failed: bool = False

    @classmethod
    def json(cls, value: Mapping[str, Any], *, failed: bool = False) -> Answer:
        return cls(json.dumps(value).encode(), failed=failed)


@dataclass(frozen=True)
class Request:
    """One of the numbered requests of a model. `body` is kept for as long as it may have to be executed again."""

    model: str
    seq: int
    owner: str
    kind: str
    body: bytes
    digest: str

    @property
    def id(self) -> str:
        return f"{self.model}:{self.seq}"


@dataclass(frozen=True)
class Done:
    """The outcome of a request: its answer, and the records that it makes or replaces. `keep`: its body is needed
    again after a crash, until a request is `settled`: no body up to that request's is needed any more then."""

    answer: Answer
    records: tuple[Record, ...] = ()
    keep: bool = False
    settled: bool = False


class Journal:
    """Safe to call from several threads."""

    def __init__(self, path: Path) -> None:
        self._lock, self._reading = threading.Lock(), threading.Lock()
        self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")
        self._db.executescript(_SCHEMA)
        self._reader = sqlite3.connect(path, check_same_thread=False)  # does not wait for a transaction's disk

    def close(self) -> None:
        with self._lock, self._reading:
            self._reader.close()
            self._db.close()

    def put(self, *records: Record) -> None:
        """Make or replace records, all or none."""
        with self._transaction() as db:
            _put(db, records)

    def remove(self, kind: str, identity: str) -> None:
        with self._transaction() as db:
            db.execute("DELETE FROM records WHERE kind = ? AND id = ?", (kind, identity))

    def get(self, kind: str, identity: str) -> Record | None:
        return next(self._records("kind = ? AND id = ?", kind, identity), None)

    def below(self, kind: str, parent: str) -> list[Record]:
        """The records of `kind` that belong to `parent`, oldest first."""
        return list(self._records("kind = ? AND parent = ?", kind, parent))

    def of_owner(self, kind: str, owner: str) -> list[Record]:
        """Oldest first."""
        return list(self._records("kind = ? AND owner = ?", kind, owner))

    def all(self, kind: str) -> list[Record]:
        """Of all owners, oldest first."""
        return list(self._records("kind = ?", kind))

    def page(
        self, kind: str, *, owner: str | None = None, parent: str | None = None, after: str = "", limit: int, asc: bool
    ) -> list[Record]:
        """At most `limit` records of an owner or a parent that come `after` the one with that id: in the order in
        which they were made (`asc`), or the newest first."""
        where = "kind = ? AND owner = ?" if parent is None else "kind = ? AND parent = ?"
        values = [kind, owner if parent is None else parent]
        if after:
            where += " AND rowid > " if asc else " AND rowid < "
            where += "(SELECT rowid FROM records WHERE kind = ? AND id = ?)"
            values += [kind, after]
        return list(self._records(where, *values, limit, order=f"rowid {'ASC' if asc else 'DESC'} LIMIT ?"))

    def accept(self, request: Request) -> str | None:
        """Write down a new request. The digest of the one that has its number already, if there is one: nothing is
        written then."""
        with self._transaction() as db:
            found = db.execute(
                "SELECT digest FROM requests WHERE model = ? AND seq = ?", (request.model, request.seq)
            ).fetchone()
            if found is not None:
                return str(found[0])
            values = (request.model, request.seq, request.owner, request.kind, request.digest, request.body)
            db.execute("INSERT INTO requests (model, seq, owner, kind, digest, body) VALUES (?, ?, ?, ?, ?, ?)", values)
            return None

    def digest(self, model: str, seq: int) -> str | None:
        """Of a request that was accepted, and is still known."""
        found = self._select("SELECT digest FROM requests WHERE model = ? AND seq = ?", model, seq)
        return str(found[0][0]) if found else None

    def owner(self, model: str) -> str | None:
        """Of the first request of a model that is still known: also before the model is there."""
        found = self._select("SELECT owner FROM requests WHERE model = ? LIMIT 1", model)
        return str(found[0][0]) if found else None

    def forget(self, model: str) -> None:
        """Everything about a model."""
        with self._transaction() as db:
            db.execute("DELETE FROM requests WHERE model = ?", (model,))
            db.execute("DELETE FROM records WHERE parent = ? OR id = ?", (model, model))

    def finish(self, request: Request, done: Done) -> None:
        """The answer and what changed with it, in one transaction."""
        answer, now = done.answer, time.time()
        with self._transaction() as db:
            _put(db, done.records)
            db.execute(
                "UPDATE requests SET answer = ?, type = ?, failed = ?, done = ?, body = CASE WHEN ? THEN body END "
                "WHERE model = ? AND seq = ?",
                (answer.content, answer.type, answer.failed, now, done.keep, request.model, request.seq),
            )
            if done.settled:
                db.execute("UPDATE requests SET body = NULL WHERE model = ? AND seq <= ?", (request.model, request.seq))
                db.execute(
                    "DELETE FROM requests WHERE model = ? AND seq < ? AND done < ?",
                    (request.model, request.seq, now - KEEP_S),
                )

    def answer(self, model: str, seq: int) -> Answer | None:
        """None while there is none. Raises KeyError for a request that is not known, or no longer."""
        found = self._select("SELECT answer, type, failed, done FROM requests WHERE model = ? AND seq = ?", model, seq)
        if not found:
            raise KeyError(f"{model}:{seq}")
        content, kind, failed, done = found[0]
        return None if done is None else Answer(content, kind, bool(failed))

    def next(self, model: str) -> int:
        """The number of the first request that has no answer."""
        ((last,),) = self._select("SELECT MAX(seq) FROM requests WHERE model = ? AND done IS NOT NULL", model)
        return 0 if last is None else last + 1

    def open(self) -> list[Request]:
        """The requests without an answer, those of a model in order."""
        return self._requests("done IS NULL")

    def replayed(self, model: str, after: int) -> list[Request]:
        """The answered requests later than `after` whose bodies are kept, in order."""
        return self._requests("model = ? AND seq > ? AND done IS NOT NULL AND body IS NOT NULL", model, after)

    def _requests(self, where: str, *values: Any) -> list[Request]:
        select = "SELECT model, seq, owner, kind, body, digest FROM requests"
        return [Request(*row) for row in self._select(f"{select} WHERE {where} ORDER BY model, seq", *values)]

    def _records(self, where: str, *values: Any, order: str = "made, rowid") -> Iterator[Record]:
        select = "SELECT kind, id, owner, parent, about, made FROM records"
        rows = self._select(f"{select} WHERE {where} ORDER BY {order}", *values)
        for kind, identity, owner, parent, about, made in rows:
            yield Record(kind, identity, owner, parent, json.loads(about), made)

    def _select(self, statement: str, *values: Any) -> list[Any]:
        with self._reading:
            return self._reader.execute(statement, values).fetchall()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")


def _put(db: sqlite3.Connection, records: Iterable[Record]) -> None:
    for record in records:
        db.execute(
            "INSERT INTO records (kind, id, owner, parent, made, about) VALUES (?, ?, ?, ?, ?, ?) "
            "ON CONFLICT (kind, id) DO UPDATE SET about = excluded.about, made = excluded.made",
            (record.kind, record.id, record.owner, record.parent, record.made, json.dumps(dict(record.about))),
        )
