"""The swap of a model, from top to bottom: admit, stage, commit, flip, undo, retire.

    admit    `request` writes the target: the version that is wanted, if it is ready. A publisher may while it holds its
             lineage, an operator always
    stage    the leader opens a swap of the target's id (`take`), and each instance builds the version beside the one
             that it runs (`InstanceSteps.stage`)
    commit   once all have staged it, the leader writes the active record and the swap's phase in one transaction
             (`take`, `transaction`)
    flip     each instance follows the active record (`InstanceSteps.flip`)
    undo     before a commit, an abort: the version before has never stopped serving. After it the leader reverts, or a
             rollback asks for the version before (`previous_version`)
    retire   a version goes when no instance and no record needs it any more, and its slot is free (`retirement`)

Two pure machines decide each step: `state.py` for the leader, `agent_state.py` for an instance. `coordinator.py` elects
the leader and runs its loop, `agent.py` follows the records for an instance, and `outcome.py` tells how a swap ended.
No other module writes a swap record or an active record.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from weightsync.control import agent_state, history, placement
from weightsync.control.agent_state import Flip
from weightsync.control.board import Board
from weightsync.control.chain import Action, LedgerEntry, append
from weightsync.control.forms import changes_to
from weightsync.control.history import History
from weightsync.control.records import (
    ActiveRecord,
    ErrorInfo,
    InstanceRecord,
    Keys,
    OnLost,
    SplitRecord,
    SwapMode,
    SwapRecord,
    TargetRecord,
    VersionRecord,
    shared_versions,
)
from weightsync.control.state import ROLLING_DRAIN_S, Step, View, abort, in_flight, untried
from weightsync.control.strict_json import shown
from weightsync.control.trial import ProbeResult
from weightsync.errors import (
    Conflict,
    StoreRefused,
    fingerprint_mismatch,
    record_refused,
    swap_aborted,
    unknown_version,
)
from weightsync.store.protocol import MISSING, KeyValue, Store

log = logging.getLogger(__name__)
RETIRE_ATTEMPTS = 10
CATCH_UP_RETRY_S = 1.0
MOST_WAIT_S = 7 * 86400  # of a phase of a swap, and of a drain: nothing else ends them
MOST_KEYS, MOST_NBYTES = 32, 128 << 10  # of what one transaction retires: etcd takes 128 keys and 1.5 MiB
TOMBSTONES_KEPT = 64  # retired records: they show the fate of older versions

# Admit: ask for a version.


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
    """Raises RecordError for what no swap can be asked for with; it calls the deadline `deadline_name`."""
    for name, value in {deadline_name: deadline_s, "drain_s": drain_s}.items():
        if value is not None and not (isinstance(value, int | float) and 0 <= value <= MOST_WAIT_S):
            problem = f"{name!r} cannot be {shown(value)}"
            raise record_refused("TargetRecord", problem, f"Nothing was written: pass 0 to {MOST_WAIT_S:,} seconds")
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
    """The records of the versions it asks for. Raises SwapError when one is not ready."""
    ready = {}
    for version in (target.version, *shared_versions(target.split)):
        found = await store.get(keys.version(version))
        record = VersionRecord.readable(found.key, found.value) if found else None
        state = record.state if record is not None else None
        if found is None or state != "ready":
            raise unknown_version(version, state)
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

    An operator asks without a fence. Raises SwapError when a version is not ready, Conflict when `fence` fell.
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
        action, about = "split", {**about, "outcome": placement.in_words(target.split, target.version)}
    return LedgerEntry(action, target.requested_by, reason=reason, **about)


# The leader's steps: open, try, commit, revert, end.


def view_of(
    board: Board,
    now: float,
    probe: ProbeResult | None = None,
    refuses: Callable[[VersionRecord], str] = lambda _: "",
    lasted_s: float = 0.0,
) -> View:
    """The view that `decide` looks at."""
    swap, target = board.swap, board.target
    version = swap.target if swap is not None and in_flight(swap) else target.version if target is not None else None
    record = board.version(version) if version is not None else None
    opening = target is not None and (swap is None or not swap.answers(target)) and not in_flight(swap)
    splits = [found.split for found in (swap, target, board.active) if found is not None]
    shared = {v: r for split in splits for v in shared_versions(split) if (r := board.version(v)) is not None}
    if any(splits) and board.active is not None and (now_active := board.version(board.active.version)) is not None:
        shared[now_active.version] = now_active
    asked = [version, *shared_versions(target.split)] if opening and target is not None else []
    since = None
    if swap is not None and untried(swap):
        asked, since = [swap.target], swap.former
    records = [known for v in asked if v is not None and (known := board.version(v)) is not None]
    return View(
        now=now,
        target=target,
        target_state=record.state if record is not None else None,
        swap=swap,
        active=board.active,
        instances=board.instances,
        target_fingerprint=record.fingerprint if record is not None else "",
        probe=probe,
        changes=next((found for v in asked if v is not None and (found := changes_to(board, v, since))), ""),
        starts=board.starts,
        shared=shared,
        refused=next((found for one in records if (found := refuses(one))), ""),
        lasted_s=lasted_s,
    )


async def take(store: Store, board: Board, step: Step, leader: int, past: History, *, spare: int = 0) -> None:
    """Write a step, with its entries of the history and of the ledger; nothing if what it was decided on has changed.

    `leader` as in `transaction`. A commit that the store refuses for good becomes the abort. Raises StoreError.
    """
    compares, puts = transaction(board, step, leader, spare=spare)
    ends = step.kind in history.ENDS
    if ends:
        puts |= past.additions(history.entry(board, step, time.time()))
    try:
        await append(store, compares, puts, *history.ledger_entries(board, step))
    except Conflict:
        return
    except StoreRefused as refusal:
        if step.kind not in ("try", "commit") or board.swap is None:
            raise
        undone = abort(view_of(board, time.time()), board.swap, str(refusal))  # another try would be refused too
        await take(store, board, undone, leader, past, spare=spare)
        return
    if ends:
        past.added()
    log.log(logging.WARNING if step.swap.reason else logging.INFO, "swap %s: %s", step.kind, step.swap)


def transaction(
    board: Board, step: Step, leader: int, *, spare: int = 0
) -> tuple[dict[str, int], dict[str, bytes | None]]:
    """The keys that a step compares and writes; `leader` is the revision of the leader's key in its term."""
    keys, swap = board.keys, step.swap
    puts: dict[str, bytes | None] = {keys.swap: swap.to_json()}
    if step.active is not None:
        puts[keys.active] = step.active.to_json()
    decided_on = depends_on(step, keys)
    taken = (swap.target, *shared_versions(swap.split)) if step.kind == "commit" else ()
    for number in (step.refused, *taken):
        record = board.version(number) if number is not None else None
        if record is not None and record.refused != (number == step.refused):
            key = keys.version(record.version)
            puts[key] = replace(record, refused=not record.refused).to_json()
            decided_on.append(key)
    if step.kind in ("commit", "finish"):
        retiring = _superseded_by(board, step, spare)
        decided_on += [keys.target, *retiring]
        puts |= retiring
    return {key: leader if key == keys.leader else board.revision(key) for key in decided_on}, puts


def _superseded_by(board: Board, step: Step, spare: int) -> dict[str, bytes | None]:
    """The versions that a commit makes superfluous go with it, so that a slot is free for the next one at once."""
    active = step.active or board.active
    if active is None:
        return {}
    needed = needed_versions(active, step.swap, board.target, board.instances.values())
    return retirement(board.keys, board.versions, needed, spare=spare, below=active.version)


def depends_on(step: Step, keys: Keys) -> list[str]:
    """The keys a step was decided on: it must be written only if none of them has changed.

    A commit compares the instances' records as one ("instances/"): none was written since the leader looked, so those
    that had staged have said nothing else since. The store does not compare keys that are gone: if the lease of a
    participant ends in the moment of the commit, that is as if it had died right after it. An instance that leaves of
    its own will says DRAINING first, which the commit notices.
    """
    found = [keys.leader, keys.swap, keys.active]
    if step.kind in ("open", "refuse"):
        found.append(keys.target)
    if step.kind in ("open", "try", "commit"):
        found += [keys.version(version) for version in (step.swap.target, *shared_versions(step.swap.split))]
    if step.kind in ("try", "commit", "revert"):
        found.append(keys.instances)
    return found


# An instance's steps: stage, flip, serve on.


@dataclass(frozen=True)
class StageResult:
    """The result of a staging: its fingerprint, how fast (bytes of the version per second, in 1e9), and which way.

    `stage_ms` and, if the callback does not say it, `staging_gbps` are measured around the callback. `built`,
    `expected_flip_ms`, `device_copies` and `step_loss`: see `InstanceRecord`.
    """

    fingerprint: str | None = None
    staging_gbps: float | None = None
    path: str | None = None
    stage_ms: float | None = None
    built: str = ""
    expected_flip_ms: float | None = None
    device_copies: int | None = None
    step_loss: float | None = None


@dataclass
class _Staging:
    """A staging beside the watch. `unwanted`: it was cancelled, and what it may have built all the same is dropped."""

    version: int
    task: asyncio.Task[StageResult]
    unwanted: bool = False


@dataclass(frozen=True)
class CommitResult:
    """The time that the flip itself took; None: as long as the callback did.

    `fingerprint` is that of what runs, if it was read again after the flip; it must be the staged one.
    """

    commit_ms: float | None = None
    fingerprint: str | None = None


StageCall = Callable[[VersionRecord], Awaitable[StageResult]]
CommitCall = Callable[[ActiveRecord, VersionRecord], Awaitable[CommitResult]]
DropCall = Callable[[VersionRecord], Awaitable[object]]


@dataclass(frozen=True)
class EngineCalls:
    """The engine as a swap sees it: `control/agent.py` says what each call does."""

    stage: StageCall
    commit: CommitCall
    drop: DropCall | None = None


class InstanceSteps:
    """The steps of one instance: it stages, flips, goes on serving, or gives a staging up. `say` writes its record."""

    def __init__(
        self, record: InstanceRecord, engine: EngineCalls, say: Callable[[InstanceRecord], Awaitable[None]]
    ) -> None:
        self.record, self._engine, self._say = record, engine, say
        self.staging: _Staging | None = None
        self.withdraws = False  # in `engine.commit`: the version that it leaves is withdrawn, for an older one
        self._tried: int | None = None  # the version it flipped to on trial

    async def stop(self) -> None:
        """End a staging that is under way."""
        staging, self.staging = self.staging, None
        if staging is not None:
            staging.task.cancel()
            await asyncio.wait({staging.task})

    async def stage(self, board: Board, swap: SwapRecord) -> None:
        """Stage the swap's version; say STAGED, or SERVING with the error that refuses it. Raises StoreError."""
        if (self.record.state, self.record.swap_id) != ("STAGING", swap.id):
            await self._say(agent_state.staging(self.record, swap))
        try:
            if not self._is_staged(board, swap.target):
                return
            fingerprint = self._take_staged()
        except Exception as error:
            log.warning("instance %s refuses version %d: %s", self.record.id, swap.target, error)
            await self._say(agent_state.refused(self.record, ErrorInfo.of(error)))
        else:
            await self._say(agent_state.staged(self.record, swap.target, fingerprint))

    async def flip(self, board: Board, flip: Flip) -> float | None:
        """Flip to the version of the commit record, staging it first if this was not part of the swap."""
        active, record = flip.active, self.record
        try:
            fingerprint = record.staged_fingerprint
            if agent_state.to_stage(record, flip) is not None:
                if not self._is_staged(board, active.version):
                    return None
                fingerprint = self._take_staged()
            if not agent_state.same(fingerprint, active.fingerprint):
                await self._let_go(board, active.version)  # or it would be taken for staged the next time
                raise fingerprint_mismatch(active.version, active.fingerprint, fingerprint or "")
            version = _ready(board, active.version)
        except Exception as error:
            behind = agent_state.behind(self.record, active, ErrorInfo.of(error))
            if behind != record:  # else each attempt would say it
                log.warning("instance %s cannot follow to version %d: %s", record.id, active.version, error)
            await self._say(behind)
            return CATCH_UP_RETRY_S
        self.withdraws = board.active is not None and agent_state.withdraws(record, board.active)
        started = time.perf_counter()
        try:
            result = await self._engine.commit(active, version)
            if not agent_state.same(result.fingerprint, active.fingerprint):
                raise fingerprint_mismatch(active.version, active.fingerprint, result.fingerprint or "")
        except Exception as error:
            log.exception("instance %s is torn", record.id)
            await self._say(agent_state.torn(self.record, ErrorInfo.of(error)))
            return None
        commit_ms = result.commit_ms if result.commit_ms is not None else (time.perf_counter() - started) * 1e3
        after = agent_state.flipped(self.record, active, result.fingerprint or fingerprint)
        await self._say(replace(after, commit_ms=commit_ms, form=version.form))
        tried, self._tried = self._tried, active.version if active.trial is not None else None
        if tried not in (None, active.version):  # its trial has failed
            await self._let_go(board, tried)
        return None

    def _is_staged(self, board: Board, number: int) -> bool:
        """Whether the staging of `number` has ended; begins it if need be. Raises SwapError.

        There is one staging at a time: after one that was given up it begins when that has ended.
        """
        if self.staging is None or (self.staging.task.cancelled() and not self.staging.unwanted):
            task = asyncio.create_task(self._build(_ready(board, number)), name=f"staging {self.record.id}")
            self.staging = _Staging(number, task)
        return self.staging.task.done() and not self.staging.unwanted

    async def _build(self, version: VersionRecord) -> StageResult:
        started = time.perf_counter()
        result = await self._engine.stage(version)
        seconds = time.perf_counter() - started
        gbps = result.staging_gbps if result.staging_gbps is not None else version.nbytes / max(seconds, 1e-9) / 1e9
        return replace(result, staging_gbps=gbps, stage_ms=seconds * 1e3)

    def _take_staged(self) -> str | None:
        """The fingerprint of what the staging built, and the end of it. Raises whatever the callback raised."""
        assert self.staging is not None
        task, self.staging = self.staging.task, None
        done = task.result()
        told = {name: value for name, value in vars(done).items() if name not in ("fingerprint", "path")}
        self.record = replace(self.record, **told, path=done.path if done.path is not None else self.record.path)
        return done.fingerprint

    async def give_up(self, board: Board, action: agent_state.Action) -> None:
        """Cancel a staging that `action` has no use for; once it has ended, drop what it may have built."""
        staging = self.staging
        if staging is None:
            return
        if not staging.unwanted and agent_state.gives_up(self.record, action, staging.version):
            log.info("instance %s stops staging version %d", self.record.id, staging.version)
            staging.unwanted = True
            staging.task.cancel()
        if staging.unwanted and staging.task.done():
            self.staging = None
            if not staging.task.cancelled():
                staging.task.exception()  # asyncio complains of one that nobody has looked at
            await self._let_go(board, staging.version)

    async def serve(self, board: Board, active: ActiveRecord | None) -> None:
        """Where something is staged, its swap was aborted: it is of no use."""
        if self.record.staged_version != self.record.active_version:
            await self._let_go(board, self.record.staged_version)
        await self._say(agent_state.serving(self.record, active))

    async def _let_go(self, board: Board, number: int | None) -> None:
        version = board.version(number) if number is not None else None
        if self._engine.drop is None or version is None:
            return
        try:
            await self._engine.drop(version)
        except Exception:
            log.exception("instance %s could not drop version %d", self.record.id, version.version)


def _ready(board: Board, number: int) -> VersionRecord:
    version = board.version(number)
    if version is None or version.state != "ready":
        raise unknown_version(number, version.state if version else None)
    return version


# Undo: after a commit.


async def previous_version(store: Store, keys: Keys) -> int:
    """The version a rollback goes to. Raises SwapError when there is none."""
    found = await store.get(keys.active)
    active = ActiveRecord.from_json(found.value) if found else None
    if active is None or active.previous is None:
        raise swap_aborted(active.version if active else 0, "there is no previous version to roll back to")
    return active.previous


async def recommit(
    store: Store,
    keys: Keys,
    lost: ActiveRecord,
    record: VersionRecord,
    found: Mapping[str, KeyValue | None],
    puts: dict[str, bytes | None],
    *,
    split_ends: bool,
) -> None:
    """Write `puts`, what is left of the versions after a restart of their host, in one transaction.

    If the version of the active record was lost, `record` serves instead; if another of its split was (`split_ends`),
    `record` serves alone. `found` is what was read of the keys. Raises Conflict, StoreUnavailable.
    """
    if record.version != lost.version:
        active = ActiveRecord(record.version, lost.epoch + 1, None, uuid.uuid4().hex, time.time(), record.fingerprint)
        outcome = f"version {lost.version} was lost with the memory of its host"
        past = await History.open(store, keys)
        puts |= past.additions(history.restored(active, lost, outcome))
    else:
        active = replace(lost, epoch=lost.epoch + 1, committed_at=time.time(), split=None, trial=None)
        outcome = f"version {record.version} alone: another of the split was lost with the memory of its host"
    entries = []
    if split_ends or record.version != lost.version:
        puts[keys.active] = active.to_json()
        entries.append(LedgerEntry("commit", "restore", model=keys.model, version=record.version, outcome=outcome))
    if puts and (counter := found[keys.counter]) is not None:
        puts[keys.counter] = counter.value
    decided_on = {key for key in puts if not key.startswith(keys.history)} | {keys.active, keys.counter}
    revisions = {key: kv.mod_revision if (kv := found.get(key)) is not None else MISSING for key in decided_on}
    if puts:
        await append(store, revisions, puts, *entries)


# Retire: give the slots of superseded versions back.


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
        own = tuple(part for part in victim.parts if part.version == victim.version)
        raw = replace(victim, state="retired", parts=own).to_json()
        room -= len(raw)
        if puts and (room < 0 or len(puts) >= MOST_KEYS):
            break
        puts[keys.version(victim.version)] = raw
    gone = {v.version for v in tombstones[: MOST_KEYS // 2]}
    forms = {v.form for v in tombstones if v.version in gone} - {v.form for v in known if v.version not in gone} - {""}
    return puts | dict.fromkeys([*map(keys.version, sorted(gone)), *map(keys.form, sorted(forms))])
