"""The store, and the clocks of those who share it."""

from __future__ import annotations

import asyncio
import email.utils
import http.client
import os
import ssl
import statistics
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from server.doctor.registry import Finding, check, fail, ok, skip, warn
from server.doctor.world import World, file_system
from weightsync import open_store
from weightsync.errors import StoreError, StoreRefused, StoreUnavailable
from weightsync.store.etcd_url import EtcdUrl
from weightsync.store.sqlite import parse
from weightsync.tls import is_loopback

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


NARROW_S = 0.1
SAMPLING_S = 1.5
EVERY_S = 0.03
TIMEOUT_S = 2.0
WARN_S, FAIL_S = 1.0, 10.0
MEND = "Run chrony or systemd-timesyncd on both hosts: certificates and the times in records go by the clock"


@dataclass(frozen=True, slots=True)
class Sample:
    """Unix seconds: our clock before asking and after the answer, and what the answer was dated."""

    sent: float
    received: float
    date: float


@check("clock", "this host's clock against those of etcd's members")
def clock(world: World) -> Iterator[Finding]:
    if world.store is None or not world.store.startswith("etcd://"):
        yield skip("no etcd is named by --store: there is no other clock to compare with")
        return
    try:
        url = EtcdUrl.parse(world.store)
        context = _context(url)
    except (StoreError, OSError) as error:
        yield skip(f"{error} (see `store`)")
        return
    for host, port in url.endpoints:
        yield _compare(host, port, context)


def _compare(host: str, port: int, context: ssl.SSLContext | None) -> Finding:
    try:
        low, high = bounds(_samples(host.strip("[]"), port, context))
    except (OSError, http.client.HTTPException) as error:
        return skip(f"{host}:{port} tells no time over HTTP: {error} (see `store`)")
    return judge_clock(f"{host}:{port}", low, high)


def judge_clock(who: str, low: float, high: float) -> Finding:
    """`low`, `high`: bounds of the other clock less ours, seconds."""
    if low > high:
        return warn(f"{who}: one of the two clocks was set while they were compared", MEND)
    least = max(low, -high, 0.0)  # how far apart they are for certain
    text = f"{who} is {(low + high) / 2:+.2f} s from this host, to {(high - low) / 2:.2f} s"
    return fail(text, MEND) if least > FAIL_S else warn(text, MEND) if least > WARN_S else ok(text)


def bounds(samples: Iterable[Sample]) -> tuple[float, float]:
    """The bounds of the other clock less ours, by one sample or more; read until the bounds are narrow."""
    low, high = float("-inf"), float("inf")
    for sample in samples:
        low, high = max(low, sample.date - sample.received), min(high, sample.date + 1 - sample.sent)
        if high - low < NARROW_S:
            break
    return low, high


def _samples(host: str, port: int, context: ssl.SSLContext | None) -> Iterator[Sample]:
    """For a second and a half, so that a tick is among them."""
    connection = (
        http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
        if context is None
        else http.client.HTTPSConnection(host, port, timeout=TIMEOUT_S, context=context)
    )
    try:
        connection.connect()
        until = time.monotonic() + SAMPLING_S
        while time.monotonic() < until:
            yield _sample(connection, time.time)
            time.sleep(EVERY_S)
    finally:
        connection.close()


def _sample(connection: http.client.HTTPConnection, now: Callable[[], float]) -> Sample:
    sent = now()
    connection.request("GET", "/version")
    answer = connection.getresponse()
    received = now()
    answer.read()
    try:
        dated = email.utils.parsedate_to_datetime(answer.headers["date"] or "")
    except (TypeError, ValueError) as error:
        raise http.client.HTTPException("its answers have no date") from error
    return Sample(sent, received, dated.timestamp())


def _context(url: EtcdUrl) -> ssl.SSLContext | None:
    if "ca" not in url.options:
        return None
    context = ssl.create_default_context(cafile=url.options["ca"])
    if "cert" in url.options:
        context.load_cert_chain(url.options["cert"], url.options["key"])
    return context
