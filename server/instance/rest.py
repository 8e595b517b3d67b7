"""Sleep of one instance process: how it gives its memory back, and how it waits to be woken.

Without sleep mode in the engine (CPU; or level 2) the process replaces itself: the engine ends in order, then exec
starts the same command line again under the same process id, so whoever supervises it sees nothing. The new program
finds its order and waits, before it has imported torch or vLLM; all it had is back with the kernel. When the order is
gone it starts as an instance does, with dummy weights, and catches up with the active version from its slot.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import socket
import sys
import time
from collections.abc import Mapping
from typing import NoReturn

from server.orders import SleeperRecord, SleepOrder, orders, stay_asleep
from weightsync.control.records import Keys
from weightsync.errors import RecordError, StoreError
from weightsync.store import Store, open_store

from .config import InstanceConfig
from .fork_server import import_engine

log = logging.getLogger("hotswap.instance")


async def rest(config: InstanceConfig) -> None:
    """Return when this instance is not, or no longer, ordered to sleep. Does not wait for a store that is away."""
    try:
        store = open_store(config.store)
        try:
            await _rest(config, store)
        finally:
            await store.close()
    except (StoreError, RecordError) as error:
        log.warning("starting without looking for an order to sleep: %s", error)


async def _rest(config: InstanceConfig, store: Store) -> None:
    """Level 1 uses the time to import what an engine needs: it wakes sooner and holds a few hundred MB more."""
    keys = Keys(config.model)
    found = await store.get(orders(keys) + config.instance_id)
    if found is None:
        return
    order = SleepOrder.from_json(found.value)
    preparing = asyncio.create_task(asyncio.to_thread(import_engine)) if order.level == 1 else None
    await stay_asleep(store, keys, sleeper(config, order))
    if preparing is not None:
        await preparing


def sleeper(config: InstanceConfig, order: SleepOrder, *, in_place: bool = False) -> SleeperRecord:
    """The record of this process while it sleeps."""
    return SleeperRecord(config.instance_id, order.level, os.getpid(), socket.gethostname(), time.time(), in_place)


def start_over(environment: Mapping[str, str]) -> NoReturn:
    """Become the same command anew, with the environment it was started with. Open files are closed by exec."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], dict(environment))  # noqa: S606 - our own argv
