"""What `hotswap up` finds in its store, and puts in order before it starts anything."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

from weightsync import ensure_arena, open_store
from weightsync.parts import slots_of
from weightsync.records import ActiveRecord, InstanceRecord, Keys, VersionRecord
from weightsync.store import Store


@dataclass(frozen=True)
class Found:
    """`arena`: where the slots are. `has_version`: there is an active version, and its bytes are on this host."""

    arena: Path
    has_version: bool


async def prepare(url: str, arena: Path, model: str) -> Found:
    """Settles where the slots are (in `arena`, unless it is settled already). Raises StoreError, ArenaError."""
    store = open_store(url)
    try:
        directory = (await ensure_arena(store, arena)).directory
        await _forget_killed(store, Keys(model))
        slots = await _active_slots(store, Keys(model))
        return Found(directory, bool(slots) and all(Path(slot).exists() for slot in slots))  # noqa: ASYNC240
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


async def _active_slots(store: Store, keys: Keys) -> set[str]:
    active = await store.get(keys.active)
    if active is None:
        return set()
    version = await store.get(keys.version(ActiveRecord.from_json(active.value).version))
    return slots_of(VersionRecord.from_json(version.value)) if version is not None else set()
