"""Where a version is on every host that has workers of this instance."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from server.errors import ConfigError
from weightsync.hosts import HOST_ENV
from weightsync.peer.copies import wait_for_slots
from weightsync.records import Keys, VersionRecord
from weightsync.store import Store

Places = Mapping[str, VersionRecord]  # by host: the version with the paths of its slots there


def check_hosts(hosts: Sequence[str], nodes: int) -> None:
    """`hosts`: what each rank calls its host. `nodes`: how many vLLM was told of (1 with Ray). Raises ConfigError."""
    names = set(hosts)
    if (nodes > 1 and len(names) != nodes) or (len(names) > 1 and "" in names):
        said = ", ".join(f"rank {rank}: {host or '(no name)'}" for rank, host in enumerate(hosts))
        raise ConfigError(
            f"the hosts of this instance cannot be told apart ({said}): set {HOST_ENV} on each host, to the name "
            "that its `hotswap peer` has, before vLLM's workers start there (docs/multinode.md)."
        )


async def located(store: Store, keys: Keys, version: VersionRecord, hosts: Iterable[str], timeout_s: float) -> Places:
    """`version` as each of `hosts` has it, once all do: their peers fetch it as for an instance of their own.

    Raises CopyUnavailable, which names the host, when the first of them cannot have it; StoreUnavailable.
    """
    tasks = {h: asyncio.create_task(wait_for_slots(store, keys, version, h, timeout_s)) for h in sorted(set(hosts))}
    try:
        found = await asyncio.gather(*tasks.values())
    finally:
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
    return dict(zip(tasks, found, strict=True))


def placed(order: dict[str, Any], places: Places) -> dict[str, Any]:
    """`order` (backend.UpdateInfo) with the paths on all hosts, for workers that look for their own."""
    parts = {host: {part.name: part.slot for part in record.parts} for host, record in places.items()}
    return {
        **order,
        "places": {host: record.slot for host, record in places.items()},
        "parts": [
            {**part, "places": {host: slots[part["name"]] for host, slots in parts.items()}} for part in order["parts"]
        ],
    }
