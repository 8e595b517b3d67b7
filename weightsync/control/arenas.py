"""The arena of a host: the directory of the slots of one store, which the store names for all processes of the host."""

from __future__ import annotations

import contextlib
from pathlib import Path

from weightsync.control.hosts import arena_key, this_host
from weightsync.control.records import ArenaRecord
from weightsync.errors import Conflict
from weightsync.memory.arena import Arena, default_directory
from weightsync.store.protocol import MISSING, Store


async def ensure_arena(store: Store, directory: Path | str | None = None, *, host: str | None = None) -> Arena:
    """The arena of a store on `host` (default: this one); the first to ask decides where it is.

    Raises ArenaError, PeerError.
    """
    host = this_host() if host is None else host
    key = arena_key(host)
    found = await store.get(key)
    if found is None:
        chosen = Arena(directory or default_directory(store.url, host))
        with contextlib.suppress(Conflict):
            await store.compare_and_swap(key, MISSING, ArenaRecord(str(chosen.directory)).to_json())
            return chosen
        found = await store.get(key)
        assert found is not None
    return Arena(ArenaRecord.from_json(found.value).directory)
