"""Every swap of the run, read from the store: the instance writes into its record how long staging and commit took."""

from __future__ import annotations

import contextlib

from loadtest.demo.scene import Swap, SwapStats
from weightsync import open_store
from weightsync.control.records import InstanceRecord, Keys, SwapRecord
from weightsync.store import KeyValue


async def follow_swaps(store_url: str, model: str, stats: SwapStats) -> None:
    """Append to `stats` until cancelled; the store's watch has no gaps, so no swap is missed."""
    store, keys = open_store(store_url, create=False), Keys(model)
    try:
        found, revision = await store.list(keys.root)
        for kv in found:
            _read(kv, keys, stats)
        async with contextlib.aclosing(store.watch(keys.root, revision + 1)) as events:
            async for event in events:
                if event.kind == "put":
                    _read(event.kv, keys, stats)
    finally:
        await store.close()


def _read(kv: KeyValue, keys: Keys, stats: SwapStats) -> None:
    if kv.key.startswith(keys.instances):
        record = InstanceRecord.from_json(kv.value)
        known = stats.last.epoch if stats.last else 0
        if record.state == "SERVING" and record.active_version is not None and record.active_epoch > known:
            times = (record.stage_ms or 0.0, record.commit_ms or 0.0)
            stats.done.append(Swap(record.active_version, record.active_epoch, *times))
    elif kv.key == keys.swap:
        swap = SwapRecord.from_json(kv.value)
        if swap.phase == "aborted":
            stats.aborted.append(f"version {swap.target}: {swap.reason}")
