"""The store of records: one protocol, chosen by URL.

sqlite:///absolute/path.db[?id=HEX]                  one host, nothing to install; with an id this very store
etcd://host:port[,host2:port2][/namespace][?ca=...]   several hosts (etcd_url.py has the options)
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

from weightsync.errors import StoreUnavailable, store_closed
from weightsync.store.protocol import MISSING, Event, KeyValue, Store

__all__ = ["MISSING", "Event", "KeyValue", "Store", "SyncStore", "open_store"]

T = TypeVar("T")


def open_store(url: str, *, create: bool = True) -> Store:
    """Open the store at `url`; a SQLite file that does not exist is made if `create` and the URL has no id.

    An etcd is never made. Raises StoreUnavailable: not a URL of a store, no such file, nobody listens there,
    or another store than that of the id (`store_lost`).
    """
    scheme, separator, rest = url.partition("://")
    if scheme == "sqlite" and rest.startswith("/"):
        from weightsync.store.sqlite import SqliteStore, parse

        path, store_id = parse(url)
        return SqliteStore("/" + path.lstrip("/"), create=create, store_id=store_id)
    if scheme == "etcd":
        # gRPC's fork handlers now and then crash the child that is about to become another program (a publication that
        # the gateway starts), and the store refuses to work in any other child.
        os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
        from weightsync.store.etcd import EtcdStore

        return EtcdStore(url)
    problem = (
        "not an absolute path" if scheme == "sqlite" else f"unknown scheme {scheme!r}" if separator else "not a URL"
    )
    raise StoreUnavailable(url, problem, "Write it as sqlite:///absolute/path.db or etcd://host:port/namespace")


class SyncStore:
    """A `Store` for code without an event loop: the same calls, blocking, on the event loop of a private thread.

    It may be called from any thread, not from a forked child.
    """

    def __init__(self, url: str, *, create: bool = True, owner: str = "store") -> None:
        """`owner`: what is closed with it. Raises StoreUnavailable."""
        self._owner = owner
        self.store: Store = open_store(url, create=create)
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="store-loop", daemon=True)
        self._thread.start()

    @property
    def closed(self) -> bool:
        return self.loop.is_closed()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the private loop and wait for it. Raises StoreError."""
        if self.closed:
            work.close()
            raise store_closed(self._owner)
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result()
        except BaseException:  # a KeyboardInterrupt here must not leave it running there
            future.cancel()
            raise

    def get(self, key: str) -> KeyValue | None:
        return self.run(self.store.get(key))

    def list(self, prefix: str) -> tuple[list[KeyValue], int]:
        return self.run(self.store.list(prefix))

    def put(self, key: str, value: bytes, lease: int | None = None) -> int:
        return self.run(self.store.put(key, value, lease))

    def delete(self, key: str) -> bool:
        return self.run(self.store.delete(key))

    def compare_and_swap(self, key: str, expected_mod_revision: int, value: bytes, lease: int | None = None) -> int:
        return self.run(self.store.compare_and_swap(key, expected_mod_revision, value, lease))

    def txn(
        self, compares: Mapping[str, int], puts: Mapping[str, bytes | None], leases: Mapping[str, int] | None = None
    ) -> int:
        return self.run(self.store.txn(compares, puts, leases))

    def grant_lease(self, ttl_s: float) -> int:
        return self.run(self.store.grant_lease(ttl_s))

    def keep_alive(self, lease: int) -> None:
        self.run(self.store.keep_alive(lease))

    def revoke(self, lease: int) -> None:
        self.run(self.store.revoke(lease))

    def close(self) -> None:
        """Close the store and end the thread; safe to call twice."""
        if self.closed:
            return
        self.run(self.store.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()
