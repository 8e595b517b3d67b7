"""An instance's side of a swap: registers it, watches the records, does what `agent_state` decides, and reports it.

The steps themselves (stage, flip) are in swap.py. The store may go away at any time: the instance serves on and takes
part again when it is back.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from weightsync.control import agent_state
from weightsync.control.agent_state import Drain, Flip, Restart, Serve, Stage
from weightsync.control.board import Board
from weightsync.control.lease import LeaseKeeper
from weightsync.control.pauses import PauseFollower
from weightsync.control.records import InstanceRecord, Keys, SwapRecord
from weightsync.control.state import in_flight
from weightsync.control.swap import CommitCall, DropCall, EngineCalls, InstanceSteps, StageCall
from weightsync.errors import LeaseLost, StoreError
from weightsync.store.protocol import Store

log = logging.getLogger(__name__)
FIRST_RETRY_S, LAST_RETRY_S = 0.1, 2.0
DRAIN_GRACE_S = 1.0  # over the time that `drain` was given

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
        self._store, self._keys = store, Keys(model)
        self._steps = InstanceSteps(record, EngineCalls(stage, commit, drop), self._say)
        self._idle, self._restart = drain, restart
        self._pauses = PauseFollower(store, self._keys, pause, resume) if pause and resume else None
        self._draining: tuple[str, asyncio.Task[None]] | None = None
        self._before: str | None = None  # the instance that is to flip first, and is followed
        self._lease_ttl_s, self._guard_url = lease_ttl_s, guard_url
        self._lease: LeaseKeeper | None = None
        self._task: asyncio.Task[None] | None = None
        self._serving = asyncio.Event()
        self._left = False

    @property
    def record(self) -> InstanceRecord:
        """The record in which this instance describes, or will describe, itself."""
        return self._steps.record

    @property
    def admits(self) -> bool:
        """Whether it may take requests now: not while it drains, is on trial as a canary, or is torn."""
        return agent_state.admits(self.record)

    @property
    def paused(self) -> bool:
        return self._pauses is not None and self._pauses.paused

    @property
    def withdraws(self) -> bool:
        """In the callback `commit`: whether the version that it leaves is withdrawn, for an older one."""
        return self._steps.withdraws

    def start(self) -> None:
        """Run in the background of this event loop until `stop`."""
        self._task = asyncio.create_task(self.run(), name=f"participant {self.record.id}")

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
        await self._say(replace(self.record, leaves_at=leaves_at))

    async def run(self) -> None:
        """Take part for ever."""
        try:
            async with asyncio.TaskGroup() as tasks:
                if self._pauses is not None:
                    tasks.create_task(self._pauses.run(), name=f"pauses {self.record.id}")
                tasks.create_task(self._take_part(), name=f"swaps {self.record.id}")
        finally:
            await self._steps.stop()

    async def _take_part(self) -> None:
        delay = FIRST_RETRY_S
        while True:
            started = time.monotonic()
            try:
                await self._session()
            except StoreError as error:
                log.warning("instance %s goes on serving without the store: %s", self.record.id, error)
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
                    record, under_way = self.record, self._under_way()
                    retry_s = await self._reconcile(board)
                    if retry_s is None and (self.record != record or any(task.done() for task in under_way)):
                        continue  # what it says of itself now may ask for more, and it does not follow its own record
                    await board.changed(retry_s, lost, *self._under_way())
            finally:
                lost.cancel()
                self._stop_draining()
        raise LeaseLost(lease.id)

    def _under_way(self) -> list[asyncio.Task[Any]]:
        """The tasks that run beside the watch. When one has ended there is something to do."""
        draining = [self._draining[1]] if self._draining is not None else []
        staging = [self._steps.staging.task] if self._steps.staging is not None else []
        return [task for task in (*draining, *staging) if not task.done()]

    async def _reconcile(self, board: Board) -> float | None:
        """Do what the records ask for. Returns after how many seconds to try again, None if only on a change."""
        await self._look(board)
        view = self._view(board)
        action = agent_state.decide(self.record, view)
        if not isinstance(action, Drain | Flip):
            self._stop_draining()
        await self._steps.give_up(board, action)
        if isinstance(action, Serve):
            await self._steps.serve(board, action.active)
        elif isinstance(action, Stage):
            await self._steps.stage(board, action.swap)
        elif isinstance(action, Drain):
            await self._leave(action.swap)
            return 0.0 if self._drained_for() is not None else None
        elif isinstance(action, Flip):
            return await self._steps.flip(board, action)
        elif isinstance(action, Restart) and self._restart is not None:
            log.info("instance %s starts anew: its engine cannot run the version", self.record.id)
            restart, self._restart = self._restart, None
            restart()
        return None

    def _view(self, board: Board) -> agent_state.View:
        forms = {record.version: record.form for record in board.versions}
        return agent_state.View(board.active, board.swap, board.instances, self._drained_for(), forms)

    async def _look(self, board: Board) -> None:
        """Read what the decision needs and is not followed, or has not come yet. Raises StoreUnavailable."""
        name = self.record.id
        found = {board.active.of(name).version} if board.active is not None else set()
        if board.swap is not None and in_flight(board.swap):
            found.add(board.swap.of(name).target)
        if any((version := board.version(number)) is None or version.state != "ready" for number in found):
            await board.look(self._store, self._keys.versions)
        if self._before is None or agent_state.awaited(self.record, self._view(board)) != self._before:
            await self._look_before(board)

    async def _look_before(self, board: Board) -> None:
        """In a rolling swap, follow the nearest before this one that has not flipped, and no other: if all instances
        followed each other, their number would count twice."""
        if self._before is not None:
            await board.leave(self._keys.instance(self._before))
            self._before = None
        if agent_state.may_wait(self.record, self._view(board)):
            await board.look(self._store, self._keys.instances)
            self._before = agent_state.awaited(self.record, self._view(board))
            if self._before is not None:
                await board.also(self._store, self._keys.instance(self._before))

    async def _leave(self, swap: SwapRecord) -> None:
        """Out of routing, and wait for streams to end, beside the watch: the swap may abort meanwhile."""
        if self.record.state != "COMMITTING":
            await self._say(agent_state.leaving(self.record, swap))
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
            log.warning("instance %s flips with streams open: %s", self.record.id, error or type(error).__name__)

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
        self._steps.record = record
        await self._publish()

    async def _publish(self) -> None:
        if self._lease is not None:
            await self._store.put(self._keys.instance(self.record.id), self.record.to_json(), self._lease.id)
        if self.record.state == "SERVING":
            self._serving.set()
