"""Which versions may go: all that nobody serves, holds, goes back to or has asked for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import replace

from weightsync.errors import Conflict
from weightsync.records import ActiveRecord, InstanceRecord, Keys, SwapRecord, TargetRecord, VersionRecord
from weightsync.store.protocol import MISSING, Store
from weightsync.swap.state import in_flight

TOMBSTONES_KEPT = 64  # retired records, for whoever wants to see what became of a version


def needed_versions(
    active: ActiveRecord | None,
    swap: SwapRecord | None,
    target: TargetRecord | None,
    instances: Iterable[InstanceRecord],
) -> set[int]:
    """Versions that must stay: active and previous, in flight or asked for, and what instances run or have staged."""
    needed: set[int | None] = set()
    if active is not None:
        needed |= {active.version, active.previous}
    if swap is not None and in_flight(swap):
        needed.add(swap.target)
    if target is not None and (swap is None or swap.id != target.id):
        needed.add(target.version)
    for instance in instances:
        needed |= {instance.active_version, instance.staged_version}
    return {version for version in needed if version is not None}


def superseded(
    versions: Iterable[VersionRecord], needed: set[int], *, spare: int, below: int | None = None
) -> list[VersionRecord]:
    """Ready versions that are not needed, but for the newest `spare`; with `below`, only older ones than that."""
    candidates = sorted(
        (v for v in versions if v.state == "ready" and v.version not in needed), key=lambda v: v.version, reverse=True
    )
    return [v for v in candidates[spare:] if below is None or v.version < below]


async def retire(store: Store, keys: Keys, *, spare: int, below: int | None = None) -> list[int]:
    """Retire superseded versions and drop old tombstones; returns what was retired.

    One transaction that fails whole, and is then left for the next time, if anything it was decided on has changed.
    """
    single = {key: await store.get(key) for key in (keys.active, keys.swap, keys.target)}
    instances = [InstanceRecord.from_json(kv.value) for kv in (await store.list(keys.instances))[0]]
    found = {kv.key: kv for kv in (await store.list(keys.versions))[0]}
    versions = [VersionRecord.from_json(kv.value) for kv in found.values()]
    active, swap, target = single[keys.active], single[keys.swap], single[keys.target]
    needed = needed_versions(
        ActiveRecord.from_json(active.value) if active else None,
        SwapRecord.from_json(swap.value) if swap else None,
        TargetRecord.from_json(target.value) if target else None,
        instances,
    )
    puts = retirement(keys, versions, needed, spare=spare, below=below)
    compares = {key: kv.mod_revision if kv else MISSING for key, kv in single.items()}
    compares |= {key: found[key].mod_revision for key in puts}
    if puts:
        with contextlib.suppress(Conflict):
            await store.txn(compares, puts)
            return [v.version for v in versions if puts.get(keys.version(v.version)) is not None]
    return []


def retirement(
    keys: Keys, versions: Iterable[VersionRecord], needed: set[int], *, spare: int, below: int | None = None
) -> dict[str, bytes | None]:
    """What to write: superseded versions as retired, and the oldest tombstones no more."""
    known = list(versions)
    victims = superseded(known, needed, spare=spare, below=below)
    tombstones = sorted(v.version for v in known if v.state == "retired")[:-TOMBSTONES_KEPT]
    retired: dict[str, bytes | None] = {keys.version(v.version): replace(v, state="retired").to_json() for v in victims}
    return retired | {keys.version(version): None for version in tombstones}
