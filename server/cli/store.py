"""What `hotswap up` finds in its store, and puts in order before it starts anything."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

from weightsync import ensure_arena, open_store
from weightsync.hosts import this_host
from weightsync.peer.copies import own_copies, pieces, place, ready_digests
from weightsync.records import ActiveRecord, InstanceRecord, Keys, PartRecord, VersionRecord
from weightsync.store import Store


@dataclass(frozen=True)
class Found:
    """`arena`: where the slots are. `has_version`: there is an active version, and this host has it or can get it."""

    arena: Path
    has_version: bool


async def prepare(url: str, arena: Path, model: str) -> Found:
    """Settles where the slots are (in `arena`, unless it is settled already). Raises StoreError, ArenaError."""
    store = open_store(url)
    try:
        directory = (await ensure_arena(store, arena)).directory
        await _forget_killed(store, Keys(model))
        return Found(directory, await _has_active(store, Keys(model)))
    finally:
        await store.close()


def process_lives(pid: int) -> bool:
    """Whether there is such a process on this host."""
    return Path(f"/proc/{pid}").exists()


async def _forget_killed(store: Store, keys: Keys) -> None:
    """Ends the records of instances killed on this host: the first swap would wait for them until their lease ends."""
    found, _ = await store.list(f"{keys.instances}{socket.gethostname()}-")
    for kv in found:
        if not process_lives(InstanceRecord.from_json(kv.value).pid):
            await store.delete(kv.key)


async def _has_active(store: Store, keys: Keys) -> bool:
    """Whether all of the active version is on this host, or, with peers, on any."""
    active = await store.get(keys.active)
    found = await store.get(keys.version(ActiveRecord.from_json(active.value).version)) if active is not None else None
    if found is None:
        return False
    host = this_host()
    copied = await ready_digests(store, keys) if host else set()
    own = await own_copies(store, keys, host)

    def is_held(part: PartRecord) -> bool:
        path = place(part, host, own)
        return part.manifest_digest in copied or (path is not None and path.exists())

    return all(is_held(part) for part in pieces(VersionRecord.from_json(found.value)))
