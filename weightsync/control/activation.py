"""The active version: asking for another, and retiring versions without a use.

An operator may write the target record, and a publisher while it holds its lineage. The coordinator answers with a swap
record of the same id, and a commit with an `active` record that names it. So who asked can tell its own outcome from
everybody else's (outcome.py).

A version may be retired when nobody serves it, holds it, goes back to it or has asked for it.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from weightsync.control.board import Board
from weightsync.control.chain import Action, LedgerEntry, append
from weightsync.control.records import (
    ActiveRecord,
    InstanceRecord,
    Keys,
    OnLost,
    PartRecord,
    SplitRecord,
    SwapMode,
    SwapRecord,
    TargetRecord,
    VersionRecord,
    shared_versions,
)
from weightsync.control.state import ROLLING_DRAIN_S, in_flight
from weightsync.control.strict_json import shown
from weightsync.errors import (
    Conflict,
    RecordRefused,
    SwapAborted,
    UnknownVersion,
)
from weightsync.store.protocol import Store

RETIRE_ATTEMPTS = 10
MOST_WAIT_S = 7 * 86400  # of a phase of a swap, and of a drain: nothing else ends them
MOST_KEYS, MOST_NBYTES = 32, 128 << 10  # of what one transaction retires: etcd takes 128 keys and 1.5 MiB
TOMBSTONES_KEPT = 64  # retired records, for whoever wants to see what became of a version


def needed_versions(
    active: ActiveRecord | None,
    swap: SwapRecord | None,
    target: TargetRecord | None,
    instances: Iterable[InstanceRecord],
) -> set[int]:
    """Versions that must stay: active and previous, those of a split, in flight or asked for, and what instances run or
    have staged."""
    needed: set[int | None] = set()
    splits = []
    if active is not None:
        needed |= {active.version, active.previous}
        splits.append(active.split)
    if swap is not None and in_flight(swap):
        needed.add(swap.target)
        splits.append(swap.split)
        if swap.former is not None:
            needed |= {swap.former.version, swap.former.previous}
            splits.append(swap.former.split)
    if target is not None and (swap is None or not swap.answers(target)):
        needed.add(target.version)
        splits.append(target.split)
    needed |= {version for split in splits for version in shared_versions(split)}
    for instance in instances:
        needed |= {instance.active_version, instance.staged_version}
    return {version for version in needed if version is not None}


def superseded(
    versions: Iterable[VersionRecord], needed: set[int], *, spare: int, below: int | None = None
) -> list[VersionRecord]:
    """Ready versions that are not needed, but for the newest `spare` that were not refused; with `below`, only older
    ones than that."""
    candidates = sorted(
        (v for v in versions if v.state == "ready" and v.version not in needed), key=lambda v: v.version, reverse=True
    )
    spared = {v.version for v in [v for v in candidates if not v.refused][:spare]}
    return [v for v in candidates if v.version not in spared and (below is None or v.version < below)]


async def retire(store: Store, keys: Keys, *, spare: int, below: int | None = None) -> list[int]:
    """Retire superseded versions and drop old tombstones; returns what was retired.

    One transaction. If anything it was decided on has changed it fails whole, and is decided anew.
    """
    for _ in range(RETIRE_ATTEMPTS):
        board = Board(keys, *await store.list(keys.root))
        needed = needed_versions(board.active, board.swap, board.target, board.instances.values())
        puts = retirement(keys, board.versions, needed, spare=spare, below=below)
        compares = {key: board.revision(key) for key in (keys.active, keys.swap, keys.target, *puts)}
        if not puts:
            break
        with contextlib.suppress(Conflict):
            await store.txn(compares, puts)
            return [v.version for v in board.versions if puts.get(keys.version(v.version)) is not None]
    return []


def retirement(
    keys: Keys, versions: Iterable[VersionRecord], needed: set[int], *, spare: int, below: int | None = None
) -> dict[str, bytes | None]:
    """The keys to write: superseded versions as retired; the oldest tombstones, and forms only they name, as gone.

    The oldest come first, and as many as leave room in the transaction; the next one has the rest. A retired version
    names the parts alone that it published itself.

    The writer compares the revision of each key: a publisher writes the form anew that no version had.
    """
    known = list(versions)
    victims = superseded(known, needed, spare=spare, below=below)
    tombstones = sorted((v for v in known if v.state == "retired"), key=lambda v: v.version)[:-TOMBSTONES_KEPT]
    puts: dict[str, bytes | None] = {}
    room = MOST_NBYTES
    for victim in reversed(victims):
        raw = replace(victim, state="retired", parts=own_parts(victim)).to_json()
        room -= len(raw)
        if puts and (room < 0 or len(puts) >= MOST_KEYS):
            break
        puts[keys.version(victim.version)] = raw
    gone = {v.version for v in tombstones[: MOST_KEYS // 2]}
    forms = {v.form for v in tombstones if v.version in gone} - {v.form for v in known if v.version not in gone} - {""}
    return puts | dict.fromkeys([*map(keys.version, sorted(gone)), *map(keys.form, sorted(forms))])


def own_parts(record: VersionRecord) -> tuple[PartRecord, ...]:
    """Those that the version itself has published."""
    return tuple(part for part in record.parts if part.version == record.version)


RETRY_S = 0.2


def new_target(
    version: int,
    requested_by: str,
    deadline_s: float,
    *,
    mode: SwapMode = "together",
    drain_s: float | None = None,
    on_lost: OnLost = "abort",
    split: SplitRecord | None = None,
    deadline_name: str = "deadline_s",
) -> TargetRecord:
    """Raises RecordRefused for what no swap can be asked for with; it calls the deadline `deadline_name`."""
    for name, value in {deadline_name: deadline_s, "drain_s": drain_s}.items():
        if value is not None and not (isinstance(value, int | float) and 0 <= value <= MOST_WAIT_S):
            problem = f"{name!r} cannot be {shown(value)}"
            raise RecordRefused("TargetRecord", problem, f"Nothing was written: pass 0 to {MOST_WAIT_S:,} seconds")
    if drain_s is None:  # else streams that are still there would go on with weights nobody has vouched for
        drain_s = ROLLING_DRAIN_S if mode == "rolling" else 0.0
    target = TargetRecord(version, uuid.uuid4().hex, requested_by, deadline_s, mode, drain_s, on_lost, split)
    target.to_json()
    return target


@dataclass(frozen=True)
class Approval:
    """The consent of a second identity to a request that waited at `key`, as it was at `revision`."""

    key: str
    revision: int
    who: str
    reason: str = ""


async def ready_revisions(store: Store, keys: Keys, target: TargetRecord) -> dict[str, int]:
    """The records of the versions it asks for. Raises UnknownVersion when one is not ready."""
    ready = {}
    for version in (target.version, *shared_versions(target.split)):
        found = await store.get(keys.version(version))
        record = VersionRecord.readable(found.key, found.value) if found else None
        state = record.state if record is not None else None
        if found is None or state != "ready":
            raise UnknownVersion(version, state)
        ready[keys.version(version)] = found.mod_revision
    return ready


async def request(
    store: Store,
    keys: Keys,
    target: TargetRecord,
    fence: Mapping[str, int] | None = None,
    *,
    reason: str = "",
    action: Action = "activate",
    approval: Approval | None = None,
) -> int:
    """Write the target; returns the revision to wait from. `fence`: keys that must still be at these revisions.

    `reason` and `action` are for the ledger. The request behind `approval` waits no more, in the same transaction.

    An operator asks without a fence. Raises UnknownVersion when a version is not ready, Conflict when `fence` fell.
    """
    fence = {**(fence or {}), **({approval.key: approval.revision} if approval is not None else {})}
    asked = asking(keys, target, reason, action)
    puts: dict[str, bytes | None] = {keys.target: target.to_json()}
    entries = [asked]
    if approval is not None:
        puts[approval.key] = None
        about: dict[str, Any] = {"model": keys.model, "version": target.version, "swap": target.id}
        about["subject"] = f"{asked.action} asked for by {target.requested_by}"
        consent = LedgerEntry("approve", approval.who, reason=approval.reason, **about)
        entries = [consent, replace(asked, subject=f"approved by {approval.who}")]
    while True:
        ready = await ready_revisions(store, keys, target)
        try:
            return await append(store, {**fence, **ready}, puts, *entries)
        except Conflict as conflict:
            if conflict.key not in ready:
                raise


def asking(keys: Keys, target: TargetRecord, reason: str = "", action: Action = "activate") -> LedgerEntry:
    """The entry of the ledger for a request."""
    about: dict[str, Any] = {"model": keys.model, "version": target.version, "swap": target.id}
    if target.split is not None:
        action, about = "split", {**about, "outcome": in_words(target.split, target.version)}
    return LedgerEntry(action, target.requested_by, reason=reason, **about)


def in_words(split: SplitRecord, active: int) -> str:
    """`version 3: 90 %, version 4: 10 %`."""
    return ", ".join(f"version {version}: {percent:g} %" for version, percent in split.percents(active).items())


async def previous_version(store: Store, keys: Keys) -> int:
    """The version a rollback goes to. Raises SwapAborted when there is none."""
    found = await store.get(keys.active)
    active = ActiveRecord.from_json(found.value) if found else None
    if active is None or active.previous is None:
        raise SwapAborted(active.version if active else 0, "there is no previous version to roll back to")
    return active.previous
