"""The store: there, letting us in, taking writes, and how long that takes."""

from __future__ import annotations

import asyncio
import os
import statistics
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from server.doctor.finding import Finding, fail, ok, skip, warn
from server.doctor.mounts import file_system
from server.doctor.network import is_loopback
from server.doctor.registry import check
from server.doctor.world import World
from weightsync import open_store
from weightsync.errors import StoreError, StoreRefused, StoreUnavailable
from weightsync.store.etcd_url import EtcdUrl
from weightsync.store.sqlite import parse

REMOTE = ("nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "fuse", "glusterfs", "lustre")
LEASE_S = 10.0
READS = 5
SLOW_MS = 50.0


@check("store", "the store of `--store`: reachable, each member of it, writable; TLS and users")
def store(world: World) -> Iterator[Finding]:
    if world.store is None:
        yield skip("no store is named: pass --store URL, or set HOTSWAP_STORE")
    elif world.store.startswith("etcd://"):
        yield from _etcd(world.store)
    elif world.store.startswith("sqlite://"):
        yield _sqlite(world, Path(parse(world.store)[0]))
    else:
        yield _told(
            StoreUnavailable(world.store, "not the URL of a store", "Write sqlite:///path.db or etcd://host:port")
        )


def _sqlite(world: World, path: Path) -> Finding:
    place = next(found for found in (path, *path.parents) if found.exists())
    kind = file_system(world, place)
    if kind in REMOTE:
        mend = "Put it on a local disk; for several hosts use etcd://"
        return fail(f"{path} is on {kind}, where SQLite's locks do not hold", mend)
    if place != path:
        if os.access(place, os.W_OK | os.X_OK):
            return ok(f"{path} is made when it is needed")
        return fail(f"{path} cannot be made: {place} may not be written to", "Choose another file or user")
    return _write(f"sqlite://{path}")


def _etcd(url: str) -> Iterator[Finding]:
    try:
        parsed = EtcdUrl.parse(url)
        parsed.tls_files()
    except StoreError as error:
        yield _told(error)
        return
    members = [_member(one) for one in single_urls(parsed)]
    lost = sum(finding.status == "fail" for finding in members)
    for finding in members:
        tolerated = finding.status == "fail" and 2 * lost < len(members)
        yield warn(finding.found, finding.mend) if tolerated else finding
    yield _write(url)
    yield from _safety(parsed)


def single_urls(url: EtcdUrl) -> list[str]:
    """One URL for each member, with the same namespace and options."""
    _, question, query = url.text.partition("?")
    return [f"etcd://{host}:{port}/{url.namespace.rstrip('/')}{question}{query}" for host, port in url.endpoints]


def _member(url: str) -> Finding:
    """A read needs the member, its way to a majority, and credentials."""
    where = url.removeprefix("etcd://").partition("/")[0]
    try:
        took = asyncio.run(_reads(url))
    except StoreError as error:
        return _told(error)
    text = f"{where} answers, {took:.1f} ms a read"
    return warn(text, "Look at the network to it, and at its disk") if took > SLOW_MS else ok(text)


async def _reads(url: str) -> float:
    """Milliseconds of a read, the median of some after the first, which connects."""
    store = open_store(url, create=False)
    try:
        took = []
        for _ in range(READS + 1):
            began = time.perf_counter()
            await store.get("doctor")
            took.append((time.perf_counter() - began) * 1e3)
        return statistics.median(took[1:])
    finally:
        await store.close()


def _write(url: str) -> Finding:
    try:
        took = asyncio.run(_written(url))
    except StoreError as error:
        return _told(error)
    text = f"takes writes and leases, {took:.1f} ms a write"
    mend = "etcd waits for the disks of a majority: give its data directory a fast one"
    return warn(text, mend) if took > SLOW_MS else ok(text)


async def _written(url: str) -> float:
    """Milliseconds of a write. The key is nobody's, and goes with its lease."""
    store = open_store(url, create=False)
    try:
        lease = await store.grant_lease(LEASE_S)
        try:
            began = time.perf_counter()
            await store.put(f"doctor/{uuid.uuid4().hex}", b"", lease)
            return (time.perf_counter() - began) * 1e3
        finally:
            await store.revoke(lease)
    finally:
        await store.close()


def _safety(url: EtcdUrl) -> Iterator[Finding]:
    if all(is_loopback(host) for host, _ in url.endpoints):
        return
    if "ca" not in url.options:
        yield warn("etcd is spoken to without TLS, beyond this host", "Give it certificates, and the URL ?ca=/path")
    if url.user is None and "cert" not in url.options:
        mend = "Turn on etcd's users (&user=NAME&password_file=/path), or client certificates (&cert=/path&key=/path)"
        yield warn("etcd lets in whoever reaches it", mend)


def _told(error: StoreError) -> Finding:
    """The store's errors say themselves what to do."""
    if isinstance(error, StoreUnavailable):
        refused = "refuses: " if isinstance(error, StoreRefused) else ""
        return fail(f"{error.path.partition('?')[0]}: {refused}{error.reason}", error.advice)
    return fail(str(error), "See docs/store.md")
