"""Where the slots are, or would be."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

from server.doctor.world import World
from weightsync import open_store
from weightsync.control.hosts import HOST_ENV, arena_key
from weightsync.control.records import ArenaRecord
from weightsync.errors import StoreError
from weightsync.memory.arena import default_directory

UNTOLD = "hotswap"  # no store is named: only where it would be matters


def arena_directory(world: World) -> Path:
    """As asked, as $HOTSWAP_ARENA says, as the store says, or where the default is: in that order."""
    configured = world.arena or world.environ.get("HOTSWAP_ARENA")
    if configured:
        return Path(configured)
    if world.store is None:
        return world.shm / UNTOLD
    with contextlib.suppress(StoreError):  # the check `store` says what is wrong with it
        recorded = asyncio.run(_recorded(world.store, world.environ.get(HOST_ENV, "")))
        if recorded is not None:
            return recorded
    return (
        world.shm
        / default_directory(world.store.partition("?")[0] if world.store.startswith("sqlite:") else world.store).name
    )


async def _recorded(url: str, host: str) -> Path | None:
    store = open_store(url, create=False)
    try:
        found = await store.get(arena_key(host))
        return Path(ArenaRecord.from_json(found.value).directory) if found is not None else None
    finally:
        await store.close()


def held_nbytes(arena: Path) -> int:
    """What the slots and layouts in an arena take."""
    with contextlib.suppress(OSError):
        return sum(path.stat().st_blocks * 512 for path in arena.iterdir() if path.is_file())
    return 0
