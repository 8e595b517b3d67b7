"""Where records live: one protocol, chosen by URL.

sqlite:///absolute/path.db    one host, nothing to install
"""

from __future__ import annotations

from weightsync.errors import StoreUnavailable
from weightsync.store.protocol import MISSING, Event, KeyValue, Store

__all__ = ["MISSING", "Event", "KeyValue", "Store", "SyncStore", "open_store"]


def open_store(url: str, *, create: bool = True) -> Store:
    """Open the store at `url`; a SQLite file that does not exist is made if `create`.

    Raises StoreUnavailable, also for a URL this build has no implementation for.
    """
    scheme, separator, rest = url.partition("://")
    if scheme == "sqlite" and rest.startswith("/"):
        from weightsync.store.sqlite import SqliteStore

        return SqliteStore("/" + rest.lstrip("/"), create=create)
    if scheme == "etcd":
        raise StoreUnavailable(url, "this build has no etcd client yet", "Use sqlite:///absolute/path.db")
    problem = (
        "not an absolute path" if scheme == "sqlite" else f"unknown scheme {scheme!r}" if separator else "not a URL"
    )
    raise StoreUnavailable(url, problem, "Write it as sqlite:///absolute/path.db")


def __getattr__(name: str) -> object:
    if name == "SyncStore":
        from weightsync.store.sync import SyncStore

        return SyncStore
    raise AttributeError(name)
