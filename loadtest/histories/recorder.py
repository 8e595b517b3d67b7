"""A history: a file of JSON lines, in the order in which its writers heard of things. Times are unix seconds.

    {"kind": "found", "at", "model", "revision", "records": {key: value}}   all records, when the recorder begins, and
                                                                            after an outage of the store
    {"kind": "write", "at", "model", "revision", "key", "value"}            a change; null: deleted
    {"kind": "rest", "at", "model"}                                         nothing fails any more: all must be at rest
    {"kind": "request", "at", "began", "asked", "outcome", "choices", ...}  requests.py
    {"kind": "excuse", "at", "began", "ended", "server"}                    meanwhile its connections may break

Changes of one revision are one transaction. Values that are large (forms, schemas) and secret (keys of instances) are
left out.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import orjson

from loadtest.histories.rules import Rules
from weightsync.control.records import Keys
from weightsync.errors import StoreError
from weightsync.store import SyncStore
from weightsync.store.protocol import KeyValue

MOST = 256 << 20  # bytes of a file; what comes later is not recorded
RETRY_S, LOOK_S, LAST_S = 0.2, 0.1, 10.0


class Log:
    """Appends lines to a file; several threads and processes may have one each of the same file."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self._size, self._lock = path, 0, threading.Lock()
        self._file: int | None = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def write(self, kind: str, **fields: Any) -> None:
        line = orjson.dumps({"kind": kind, "at": time.time(), **fields}) + b"\n"
        with self._lock:
            self._size += len(line)
            if self._size <= MOST and self._file is not None:
                os.write(self._file, line)

    def close(self) -> None:
        """Later lines are discarded: a client may live longer than the run."""
        with self._lock:
            if self._file is not None:
                os.close(self._file)
            self._file = None


class Recorder:
    """Follows the records of `models` in the store at `url`, from now until `close`. Raises StoreUnavailable."""

    def __init__(self, log: Log, url: str, models: Iterable[str]) -> None:
        self._log, self._url = log, url
        self._seen = {Keys(model): 0 for model in models}  # the last revision that was recorded
        self._held: dict[Keys, dict[str, int]] = {keys: {} for keys in self._seen}  # the revisions of records by then
        self._start()

    def rest(self, seconds: float) -> None:
        """From here on nothing fails: waits until all has come to rest, for so long, and notes that it must have."""
        deadline = time.monotonic() + seconds
        for keys in self._seen:
            while time.monotonic() < deadline and self._unrest(keys):
                time.sleep(LOOK_S)
        self._catch_up()
        for keys in self._seen:
            self._log.write("rest", model=keys.model)

    def start_again(self) -> None:
        """The store was restored: goes on with what is in it now. Raises StoreUnavailable."""
        self._stop()
        self._start()

    def close(self) -> None:
        """Records what is written already, if the store answers, and ends."""
        self._catch_up()
        self._stop()

    def _start(self) -> None:
        self._store = SyncStore(self._url, create=False)
        self._following: list[Future[None]] = [
            asyncio.run_coroutine_threadsafe(self._follow(keys), self._store.loop) for keys in self._seen
        ]

    def _stop(self) -> None:
        for following in self._following:
            following.cancel()
        self._store.close()

    async def _follow(self, keys: Keys) -> None:
        """A watch outlives short outages of the store. After a long one all is read again."""
        store = self._store.store
        while True:
            with contextlib.suppress(StoreError):
                found, self._seen[keys] = await store.list(keys.root)
                records = {kv.key: _shown(keys, kv) for kv in found}
                held = self._held[keys] = _revisions(found)
                self._log.write("found", model=keys.model, revision=self._seen[keys], records=records)
                async with contextlib.aclosing(store.watch(keys.root, self._seen[keys] + 1)) as events:
                    async for event in events:
                        kv = event.kv
                        value = _shown(keys, kv) if event.kind == "put" else None
                        self._log.write("write", model=keys.model, revision=kv.mod_revision, key=kv.key, value=value)
                        held.pop(kv.key, None)
                        if event.kind == "put":
                            held[kv.key] = kv.mod_revision
                        self._seen[keys] = kv.mod_revision
            await asyncio.sleep(RETRY_S)

    def _catch_up(self) -> None:
        deadline = time.monotonic() + LAST_S
        with contextlib.suppress(StoreError):
            for keys, (found, revision) in [(keys, self._store.list(keys.root)) for keys in self._seen]:
                wanted = _revisions(found)  # without what was deleted; other models' writes make `revision` newer
                while self._seen[keys] < revision and self._held[keys] != wanted and time.monotonic() < deadline:
                    time.sleep(LOOK_S / 10)

    def _unrest(self, keys: Keys) -> str | None:
        with contextlib.suppress(StoreError):
            return Rules(keys, {kv.key: kv.value for kv in self._store.list(keys.root)[0]}).unrest()
        return "the store does not answer"


def _revisions(found: list[KeyValue]) -> dict[str, int]:
    return {kv.key: kv.mod_revision for kv in found}


def _shown(keys: Keys, kv: KeyValue) -> Any:
    if kv.key.startswith((keys.forms, keys.schema)):
        return {}
    value = orjson.loads(kv.value)
    if kv.key.startswith(keys.instances):
        value.pop("key", None)
    return value
