"""The tensors of each version that an instance needs on each of its hosts, in the store, so that peers fetch no more.

An instance on one host needs everything there. Where its ranks are on several hosts, the workers say what they read,
before the first version if the tensors are known by then, and the union of each host's ranks goes into its record.
Tensors that no rank reads count for the host of rank 0, which sums them for the fingerprint.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weightsync.control.lease import LeaseKeeper
from weightsync.control.records import Keys
from weightsync.errors import StoreUnavailable, WeightSyncError
from weightsync.format.manifest import schema_of
from weightsync.format.slices import Slices
from weightsync.peer.slices import SlicesRecord, slices_prefix
from weightsync.store import Store

log = logging.getLogger("hotswap.instance")

LEASE_TTL_S = 30.0  # a record that outlives its instance for a while does no harm; one that goes while it is busy does
RETRY_S = 1.0


@dataclass(frozen=True)
class Reads:
    """The tensors of one schema's versions that an instance's ranks read, by host, and those that none reads."""

    slices: Mapping[str, Slices]
    unread: tuple[str, ...]


def joined_reads(
    schema: Sequence[Sequence[Any]], hosts: Sequence[str], answers: Sequence[Sequence[str] | None]
) -> Reads | None:
    """From what each rank answers (`hotswap_reads`), in the order of `hosts`; None: one of them cannot say."""
    said = [answer for answer in answers if answer is not None]
    if len(said) < len(hosts):
        return None
    names = sorted(name for name, _, _ in schema)
    idle = functools.reduce(int.__and__, (int(unread, 16) for _, unread in said))
    unread = tuple(name for n, name in enumerate(names) if idle >> n & 1)
    shapes = schema_of((name, dtype, shape) for name, dtype, shape in schema)
    found = {hosts[0]: Slices.of(shapes, [(name, 0, shapes.tensors[name].nbytes) for name in unread])}
    for host, (text, _) in zip(hosts, said, strict=True):
        slices = Slices.from_text(text)
        found[host] = found[host].joined(slices) if host in found else slices
    return Reads(found, unread)


class Saying:
    """The records of one instance, under a lease of their own: they are there before it takes part in swaps."""

    def __init__(self, keys: Keys, instance: str) -> None:
        self._keys, self._instance = keys, instance
        self._hosts: tuple[str, ...] = ()
        self._reads: Reads | None = None
        self._changed = asyncio.Event()

    def say(self, hosts: Sequence[str], reads: Reads | None, everything: str | None = None) -> None:
        """`reads`, or everything on all `hosts` (None). `everything`: a host that needs all the same. Hosts without a
        name have no peer."""
        self._hosts = tuple(sorted({host for host in hosts if host}))
        if reads is not None:
            reads = Reads({h: s for h, s in reads.slices.items() if h != everything}, reads.unread)
        self._reads = reads if len(self._hosts) > 1 else None
        self._changed.set()

    @property
    def digests(self) -> Mapping[str, str]:
        """By host, of what is needed there; none where that is everything."""
        return {host: slices.digest for host, slices in self._reads.slices.items()} if self._reads is not None else {}

    @property
    def unread(self) -> tuple[str, ...]:
        """The tensors that no rank reads."""
        return self._reads.unread if self._reads is not None else ()

    async def run(self, store: Store) -> None:
        """Keep the records in the store, for ever. Cancelled, it takes them away."""
        told = ""
        while True:
            try:
                await self._session(store)
            except WeightSyncError as error:  # also where the role in etcd is of a release that has no such records
                if told != (told := str(error)):
                    log.warning("peers are not told what this instance needs, and fetch everything: %s", error)
            await asyncio.sleep(RETRY_S)

    async def _session(self, store: Store) -> None:
        lease = await LeaseKeeper.grant(store, LEASE_TTL_S)
        try:
            while not lease.lost.is_set():
                self._changed.clear()
                for host in self._hosts:
                    slices = self._reads.slices.get(host) if self._reads is not None else None
                    text = slices.to_text() if slices is not None else ""
                    record = SlicesRecord(host, self._instance, text)
                    key = slices_prefix(self._keys, host) + self._instance
                    await store.put(key, record.to_json(), lease.id)
                await _either(self._changed, lease.lost)
        finally:
            try:
                await lease.end()
            except StoreUnavailable as error:
                log.debug("the records go with their lease: %s", error)


async def _either(*events: asyncio.Event) -> None:
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
