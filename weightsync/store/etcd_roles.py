"""Roles in etcd: one for each kind of process, with no more rights to keys than its work needs.

    gateway     coordinates swaps, publishes what is uploaded, keeps API keys; writes no instance's record. Restoring
                versions from disk needs this role, too
    instance    writes what it says of itself; reads the model's records and no key of a client
    trainer     publishes versions and asks for them; makes none active
    peer        says which copies a host holds in memory and on disk, and where its slots are

A process with a role's credentials can do what that kind of process does, and no more. All may read the records of the
model, which hold no secrets.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from weightsync.control.records import ARENA_KEY, Keys

NAMES = ("gateway", "instance", "trainer", "peer")
ARENAS = "arenas/"
SLICES = "slices/"  # weightsync/peer/slices.py
LEDGER = "ledger/"  # weightsync/control/chain.py
GATEWAYS = "gateway/"  # API keys, their use, and the secret of cache scopes (server/gateway/access)


@dataclass(frozen=True)
class Role:
    """The rights of one kind of process: keys, and prefixes that end in "/". A key that may be written may be read."""

    name: str
    reads: frozenset[str]
    writes: frozenset[str]


def roles(models: Iterable[str]) -> tuple[Role, ...]:
    """The roles of the processes of these models."""
    reads: dict[str, set[str]] = {name: {ARENA_KEY, ARENAS} for name in NAMES}
    writes: dict[str, set[str]] = {name: set() for name in NAMES}
    for keys in map(Keys, models):
        publishing = {keys.versions, keys.counter, keys.schema, keys.target, ARENA_KEY, ARENAS, LEDGER}
        publishing |= {keys.forms, f"{keys.root}schemas/", f"{keys.root}publishers/"}
        leading = {keys.active, keys.swap, keys.leader, keys.history, keys.pauses}
        ordering = {f"{keys.root}drains/", f"{keys.root}sleeps/", keys.training, keys.disks, GATEWAYS}
        writes["gateway"] |= publishing | leading | ordering
        writes["instance"] |= {keys.instances, keys.starts, keys.config}
        writes["instance"] |= {f"{keys.root}sleepers/", f"{SLICES}{keys.model}/"}
        writes["trainer"] |= publishing
        writes["peer"] |= {keys.copies, keys.disks, ARENA_KEY, ARENAS}
        reads["trainer"].add(keys.history)  # what became of a swap that it has asked for
        for read in reads.values():
            read |= {keys.root, keys.copies, f"{SLICES}{keys.model}/"}
    return tuple(Role(name, frozenset(reads[name] - writes[name]), frozenset(writes[name])) for name in NAMES)
