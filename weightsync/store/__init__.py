"""Where records live: one protocol, chosen by URL.

sqlite:///absolute/path.db[?id=HEX]                  one host, nothing to install; with an id this very store
etcd://host:port[,host2:port2][/namespace][?ca=...]   several hosts (etcd_url.py has the options)
"""

from __future__ import annotations

import os

from weightsync.errors import StoreUnavailable
from weightsync.store.protocol import MISSING, Event, KeyValue, Store

__all__ = ["MISSING", "Event", "KeyValue", "Store", "SyncStore", "open_store"]


def open_store(url: str, *, create: bool = True) -> Store:
    """Open the store at `url`; a SQLite file that does not exist is made if `create` and the URL has no id.

    An etcd is never made. Raises StoreUnavailable: not a URL of a store, no such file, nobody listens there; StoreLost.
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


def __getattr__(name: str) -> object:
    if name == "SyncStore":
        from weightsync.store.sync import SyncStore

        return SyncStore
    raise AttributeError(name)
