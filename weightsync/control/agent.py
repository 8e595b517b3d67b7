"""An instance's side of a swap: registers it, watches the records, does what `agent_state` decides, and reports it.

The store may go away at any time: the instance serves on and takes part again when it is back.

The instance pauses too: while a pause record exists, its engine generates nothing. A pause record hangs on a lease, so
it ends with whoever wrote it. An instance that cannot reach the store cannot see that; it lets a pause go when the
record's time to live has passed since it last saw it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from weightsync.control import agent_state
from weightsync.control.agent_state import Drain, Flip, Restart, Serve, Stage
from weightsync.control.board import Board
from weightsync.control.lease import LeaseKeeper
from weightsync.control.records import (
    ActiveRecord,
    ErrorInfo,
    InstanceRecord,
    Keys,
    PauseRecord,
    SwapRecord,
    VersionRecord,
)
from weightsync.control.state import in_flight
from weightsync.errors import FingerprintMismatch, LeaseLost, RecordError, StoreError, UnknownVersion
from weightsync.store.protocol import KeyValue, Store

log = logging.getLogger(__name__)
RETRY_S = 0.2
LEAST_TTL_S = 0.1

Callback = Callable[[], Awaitable[object]]


class Pauses:
    """The pauses an instance knows of, and until when each holds without being seen in the store again."""

    def __init__(self) -> None:
        self._ends: dict[str, float] = {}

    def see(self, found: Iterable[KeyValue], now: float) -> None:
        """Take in what the store holds at the time `now` (seconds of any clock that only grows)."""
        self._ends = {}
        for kv in found:
            try:
                record = PauseRecord.from_json(kv.value)
            except RecordError as error:
                log.error("ignoring %s: %s", kv.key, error)
                continue
            self._ends[kv.key] = now + max(record.ttl_s, LEAST_TTL_S)

    def wanted(self, now: float) -> bool:
        """Whether generation must stand still."""
        return any(end > now for end in self._ends.values())

    def left_s(self, now: float) -> float | None:
        """Seconds until the first of them must have been seen again; None if there is none."""
        return min((end - now for end in self._ends.values() if end > now), default=None)

    def clear(self) -> None:
        self._ends = {}


class PauseFollower:
    """Calls `pause` when the first pause record appears and `resume` when the last one is gone or out of date."""

    def __init__(self, store: Store, keys: Keys, pause: Callback, resume: Callback) -> None:
        self._store, self._keys, self._pause, self._resume = store, keys, pause, resume
        self._known = Pauses()
        self._paused = False

    @property
    def paused(self) -> bool:
        return self._paused

    async def run(self) -> None:
        """Follow for ever; cancelled, it resumes first."""
        try:
            while True:
                try:
                    await self._follow()
                except (StoreError, TimeoutError) as error:
                    log.debug("pauses are not seen without the store: %s", error)
                    await self._apply()
                    await asyncio.sleep(min(RETRY_S, self._look_again_s() or RETRY_S))
        finally:
            self._known.clear()
            await self._apply()

    async def _follow(self) -> None:
        """Look, act, and look again when a record changes, or in good time before what is known is out of date."""
        async with asyncio.timeout(self._look_again_s()):  # a store may also just not answer
            found, revision = await self._store.list(self._keys.pauses)
        self._known.see(found, time.monotonic())
        await self._apply()
        async with contextlib.aclosing(self._store.watch(self._keys.pauses, revision + 1)) as events:
            change = asyncio.ensure_future(anext(events))  # type: ignore[arg-type]
            try:
                await asyncio.wait({change}, timeout=self._look_again_s())
                if change.done():
                    change.result()
            finally:
                change.cancel()
                await asyncio.gather(change, return_exceptions=True)

    async def _apply(self) -> None:
        wanted = self._known.wanted(time.monotonic())
        if wanted == self._paused:
            return
        log.info("generation %s", "pauses" if wanted else "goes on")
        try:
            await (self._pause() if wanted else self._resume())
            self._paused = wanted
        except Exception:
            log.exception("could not %s generation; trying again", "pause" if wanted else "resume")

    def _look_again_s(self) -> float | None:
        """How soon at the latest: several times before a pause is out of date, or soon after a callback failed."""
        now = time.monotonic()
        if self._known.wanted(now) != self._paused:
            return RETRY_S
        left = self._known.left_s(now)
        return max(0.01, left / 3) if left is not None else None


FIRST_RETRY_S, LAST_RETRY_S = 0.1, 2.0
CATCH_UP_RETRY_S = 1.0
DRAIN_GRACE_S = 1.0  # over the time that `drain` was given


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
DrainCall = Callable[[float], Awaitable[object]]
RestartCall = Callable[[], object]
PauseCall = Callable[[], Awaitable[object]]


class Participant:
    """One instance's part in the swaps of `model`.

    stage(version)           build it beside the running one; raise to refuse it (WeightSyncError for a typed reason).
                             Idempotent: at once when it is staged already, as the previous version is. Cancelled when
                             nobody wants the version any more; it then ends soon, but not before it has stopped.
    commit(active, version)  flip to it. Raising means torn. A canary is asked for its trial, and for the version that
                             stands if the trial fails.
    drop(version)            it was staged for a swap that was aborted, its trial has failed, or its staging was
                             cancelled. Optional.
    restart()                start the process anew, which leaves the fleet; returns at once. Optional.
    drain(seconds)           return when it is idle, or when the time is up. Optional; cancelled if the swap aborts.
    pause(), resume()        stop and go on generating. Optional, both or none; called beside everything else.
    """

    def __init__(
        self,
        store: Store,
        model: str,
        record: InstanceRecord,
        stage: StageCall,
        commit: CommitCall,
        *,
        drop: DropCall | None = None,
        drain: DrainCall | None = None,
        restart: RestartCall | None = None,
        pause: PauseCall | None = None,
        resume: PauseCall | None = None,
        lease_ttl_s: float = 5.0,
        guard_url: str = "",
    ) -> None:
        """`record` says who this is and, in `active_version`, what it runs already, if that came from a version.

        `guard_url`: of the store, where a guard keeps the lease while this process is busy (`control/lease.py`).
        """
        if (pause is None) != (resume is None):
            raise TypeError("give both pause and resume, or neither")
        self._store, self._keys, self._record = store, Keys(model), record
        self._stage, self._commit, self._drop, self._idle = stage, commit, drop, drain
        self._restart = restart
        self._pauses = PauseFollower(store, self._keys, pause, resume) if pause and resume else None
        self._draining: tuple[str, asyncio.Task[None]] | None = None
        self._staging: _Staging | None = None
        self._withdraws = False
        self._tried: int | None = None  # the version it flipped to on trial
        self._before: str | None = None  # who is to flip first, and is followed
        self._lease_ttl_s, self._guard_url = lease_ttl_s, guard_url
        self._lease: LeaseKeeper | None = None
        self._task: asyncio.Task[None] | None = None
        self._serving = asyncio.Event()
        self._left = False

    @property
    def record(self) -> InstanceRecord:
        """The record in which this instance describes, or will describe, itself."""
        return self._record

    @property
    def admits(self) -> bool:
        """Whether it may take requests now: not while it drains, is on trial as a canary, or is torn."""
        return agent_state.admits(self._record)

    @property
    def paused(self) -> bool:
        return self._pauses is not None and self._pauses.paused

    @property
    def withdraws(self) -> bool:
        """In the callback `commit`: whether the version that it leaves is withdrawn, for an older one."""
        return self._withdraws

    def start(self) -> None:
        """Run in the background of this event loop until `stop`."""
        self._task = asyncio.create_task(self.run(), name=f"participant {self._record.id}")

    async def ended(self) -> None:
        """Return once it was stopped; raises the fault that has ended it before."""
        assert self._task is not None
        await asyncio.wait({self._task})
        if not self._task.cancelled():
            self._task.result()

    async def serving(self) -> None:
        """Return when the fleet has seen it SERVING once."""
        await self._serving.wait()

    async def stop(self) -> None:
        """Leave the fleet now. A callback that runs is cancelled."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})  # a fault that has ended it before is `ended`'s to tell
        if self._lease is not None:
            await self._lease.end()

    async def drain(self, leaves_at: float | None = None) -> None:
        """Take no new requests from here on, and tell the fleet so, and until when those in flight go on here (unix
        seconds). Raises StoreUnavailable.

        A step of a swap that is under way ends, but leads out of DRAINING no more.
        """
        self._left = True
        await self._say(replace(self._record, leaves_at=leaves_at))

    async def run(self) -> None:
        """Take part for ever."""
        try:
            async with asyncio.TaskGroup() as tasks:
                if self._pauses is not None:
                    tasks.create_task(self._pauses.run(), name=f"pauses {self._record.id}")
                tasks.create_task(self._take_part(), name=f"swaps {self._record.id}")
        finally:
            staging, self._staging = self._staging, None
            if staging is not None:
                staging.task.cancel()
                await asyncio.wait({staging.task})

    async def _take_part(self) -> None:
        delay = FIRST_RETRY_S
        while True:
            started = time.monotonic()
            try:
                await self._session()
            except StoreError as error:
                log.warning("instance %s goes on serving without the store: %s", self._record.id, error)
            delay = FIRST_RETRY_S if time.monotonic() - started > LAST_RETRY_S else min(2 * delay, LAST_RETRY_S)
            await asyncio.sleep(delay * random.uniform(0.5, 1.5))  # noqa: S311 - not all instances at once

    async def _session(self) -> None:
        """Register under a fresh lease and follow the records until the store or the lease is lost."""
        lease = await LeaseKeeper.grant(self._store, self._lease_ttl_s, self._guard_url)
        former, self._lease = self._lease, lease
        try:
            await self._publish()
        except BaseException as error:
            self._lease = former
            # If only the answer was lost, the record stays for the lease's time to live: the next session is sooner.
            await (lease.stop() if isinstance(error, StoreError) else lease.end())
            raise
        if former is not None:
            await former.end()  # only now, or the record would be gone for a moment
        self._before = None
        async with Board.follow(self._store, self._keys, *self._keys.concerns) as board:
            lost = asyncio.create_task(lease.lost.wait())
            try:
                while not lost.done():
                    record, under_way = self._record, self._under_way()
                    retry_s = await self._reconcile(board)
                    if retry_s is None and (self._record != record or any(task.done() for task in under_way)):
                        continue  # what it says of itself now may ask for more, and it does not follow its own record
                    await board.changed(retry_s, lost, *self._under_way())
            finally:
                lost.cancel()
                self._stop_draining()
        raise LeaseLost(lease.id)

    def _under_way(self) -> list[asyncio.Task[Any]]:
        """The tasks that run beside the watch. When one has ended there is something to do."""
        draining = [self._draining[1]] if self._draining is not None else []
        staging = [self._staging.task] if self._staging is not None else []
        return [task for task in (*draining, *staging) if not task.done()]

    async def _reconcile(self, board: Board) -> float | None:
        """Do what the records ask for. Returns after how many seconds to try again, None if only on a change."""
        await self._look(board)
        view = self._view(board)
        action = agent_state.decide(self._record, view)
        if not isinstance(action, Drain | Flip):
            self._stop_draining()
        await self._give_up_staging(board, action)
        if isinstance(action, Serve):
            await self._serve(board, action.active)
        elif isinstance(action, Stage):
            await self._prepare(board, action.swap)
        elif isinstance(action, Drain):
            await self._leave(action.swap)
            return 0.0 if self._drained_for() is not None else None
        elif isinstance(action, Flip):
            return await self._flip(board, action)
        elif isinstance(action, Restart) and self._restart is not None:
            log.info("instance %s starts anew: its engine cannot run the version", self._record.id)
            restart, self._restart = self._restart, None
            restart()
        return None

    def _view(self, board: Board) -> agent_state.View:
        forms = {record.version: record.form for record in board.versions}
        return agent_state.View(board.active, board.swap, board.instances, self._drained_for(), forms)

    async def _look(self, board: Board) -> None:
        """Read what the decision needs and is not followed, or has not come yet. Raises StoreUnavailable."""
        name = self._record.id
        found = {board.active.of(name).version} if board.active is not None else set()
        if board.swap is not None and in_flight(board.swap):
            found.add(board.swap.of(name).target)
        if any((version := board.version(number)) is None or version.state != "ready" for number in found):
            await board.look(self._store, self._keys.versions)
        if self._before is None or agent_state.awaited(self._record, self._view(board)) != self._before:
            await self._look_before(board)

    async def _look_before(self, board: Board) -> None:
        """In a rolling swap, follow the nearest before this one that has not flipped, and no other: if all instances
        followed each other, their number would count twice."""
        if self._before is not None:
            await board.leave(self._keys.instance(self._before))
            self._before = None
        if agent_state.may_wait(self._record, self._view(board)):
            await board.look(self._store, self._keys.instances)
            self._before = agent_state.awaited(self._record, self._view(board))
            if self._before is not None:
                await board.also(self._store, self._keys.instance(self._before))

    async def _prepare(self, board: Board, swap: SwapRecord) -> None:
        if (self._record.state, self._record.swap_id) != ("STAGING", swap.id):
            await self._say(agent_state.staging(self._record, swap))
        try:
            if not self._is_staged(board, swap.target):
                return
            fingerprint = self._take_staged()
        except Exception as error:
            log.warning("instance %s refuses version %d: %s", self._record.id, swap.target, error)
            await self._say(agent_state.refused(self._record, ErrorInfo.of(error)))
        else:
            await self._say(agent_state.staged(self._record, swap.target, fingerprint))

    async def _flip(self, board: Board, flip: Flip) -> float | None:
        """Flip to the version of the commit record, staging it first if this was not part of the swap."""
        active, record = flip.active, self._record
        try:
            fingerprint = record.staged_fingerprint
            if agent_state.to_stage(record, flip) is not None:
                if not self._is_staged(board, active.version):
                    return None
                fingerprint = self._take_staged()
            if not agent_state.same(fingerprint, active.fingerprint):
                await self._let_go(board, active.version)  # or it would be taken for staged the next time
                raise FingerprintMismatch(active.version, active.fingerprint, fingerprint or "")
            version = _ready(board, active.version)
        except Exception as error:
            behind = agent_state.behind(self._record, active, ErrorInfo.of(error))
            if behind != record:  # else each attempt would say it
                log.warning("instance %s cannot follow to version %d: %s", record.id, active.version, error)
            await self._say(behind)
            return CATCH_UP_RETRY_S
        self._withdraws = board.active is not None and agent_state.withdraws(record, board.active)
        started = time.perf_counter()
        try:
            result = await self._commit(active, version)
            if not agent_state.same(result.fingerprint, active.fingerprint):
                raise FingerprintMismatch(active.version, active.fingerprint, result.fingerprint or "")
        except Exception as error:
            log.exception("instance %s is torn", record.id)
            await self._say(agent_state.torn(self._record, ErrorInfo.of(error)))
            return None
        commit_ms = result.commit_ms if result.commit_ms is not None else (time.perf_counter() - started) * 1e3
        after = agent_state.flipped(self._record, active, result.fingerprint or fingerprint)
        await self._say(replace(after, commit_ms=commit_ms, form=version.form))
        tried, self._tried = self._tried, active.version if active.trial is not None else None
        if tried not in (None, active.version):  # its trial has failed
            await self._let_go(board, tried)
        return None

    def _is_staged(self, board: Board, number: int) -> bool:
        """Whether the staging of `number` has ended; begins it if need be. Raises UnknownVersion.

        There is one staging at a time: after one that was given up it begins when that has ended.
        """
        if self._staging is None or (self._staging.task.cancelled() and not self._staging.unwanted):
            task = asyncio.create_task(self._build(_ready(board, number)), name=f"staging {self._record.id}")
            self._staging = _Staging(number, task)
        return self._staging.task.done() and not self._staging.unwanted

    async def _build(self, version: VersionRecord) -> StageResult:
        started = time.perf_counter()
        result = await self._stage(version)
        seconds = time.perf_counter() - started
        gbps = result.staging_gbps if result.staging_gbps is not None else version.nbytes / max(seconds, 1e-9) / 1e9
        return replace(result, staging_gbps=gbps, stage_ms=seconds * 1e3)

    def _take_staged(self) -> str | None:
        """The fingerprint of what the staging built, and the end of it. Raises whatever the callback raised."""
        assert self._staging is not None
        task, self._staging = self._staging.task, None
        done = task.result()
        path = done.path if done.path is not None else self._record.path
        self._record = replace(
            self._record,
            stage_ms=done.stage_ms,
            staging_gbps=done.staging_gbps,
            path=path,
            built=done.built,
            expected_flip_ms=done.expected_flip_ms,
            device_copies=done.device_copies,
            step_loss=done.step_loss,
        )
        return done.fingerprint

    async def _give_up_staging(self, board: Board, action: agent_state.Action) -> None:
        """Cancel a staging that `action` has no use for; once it has ended, drop what it may have built."""
        staging = self._staging
        if staging is None:
            return
        if not staging.unwanted and agent_state.gives_up(self._record, action, staging.version):
            log.info("instance %s stops staging version %d", self._record.id, staging.version)
            staging.unwanted = True
            staging.task.cancel()
        if staging.unwanted and staging.task.done():
            self._staging = None
            if not staging.task.cancelled():
                staging.task.exception()  # asyncio complains of one that nobody has looked at
            await self._let_go(board, staging.version)

    async def _serve(self, board: Board, active: ActiveRecord | None) -> None:
        """Where something is staged, its swap was aborted: it is of no use."""
        if self._record.staged_version != self._record.active_version:
            await self._let_go(board, self._record.staged_version)
        await self._say(agent_state.serving(self._record, active))

    async def _let_go(self, board: Board, number: int | None) -> None:
        version = board.version(number) if number is not None else None
        if self._drop is None or version is None:
            return
        try:
            await self._drop(version)
        except Exception:
            log.exception("instance %s could not drop version %d", self._record.id, version.version)

    async def _leave(self, swap: SwapRecord) -> None:
        """Out of routing, and wait for streams to end, beside the watch: the swap may abort meanwhile."""
        if self._record.state != "COMMITTING":
            await self._say(agent_state.leaving(self._record, swap))
        if self._draining is None or self._draining[0] != swap.id:
            self._stop_draining()
            self._draining = (swap.id, asyncio.create_task(self._drain_streams(swap.drain_s)))

    async def _drain_streams(self, seconds: float) -> None:
        if self._idle is None or seconds <= 0:
            return
        try:
            async with asyncio.timeout(seconds + DRAIN_GRACE_S):
                await self._idle(seconds)
        except Exception as error:
            log.warning("instance %s flips with streams open: %s", self._record.id, error or type(error).__name__)

    def _drained_for(self) -> str | None:
        return self._draining[0] if self._draining is not None and self._draining[1].done() else None

    def _stop_draining(self) -> None:
        if self._draining is not None:
            self._draining[1].cancel()
            self._draining = None

    async def _say(self, record: InstanceRecord) -> None:
        """Change the record here, then in the store; if that is away, the next session says it."""
        if self._left and record.state != "TORN":
            record = replace(record, state="DRAINING")
        self._record = record
        await self._publish()

    async def _publish(self) -> None:
        if self._lease is not None:
            await self._store.put(self._keys.instance(self._record.id), self._record.to_json(), self._lease.id)
        if self._record.state == "SERVING":
            self._serving.set()


def _ready(board: Board, number: int) -> VersionRecord:
    version = board.version(number)
    if version is None or version.state != "ready":
        raise UnknownVersion(number, version.state if version else None)
    return version
