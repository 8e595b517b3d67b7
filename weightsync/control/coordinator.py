"""Drives the swap transaction of one model: watches the records, takes the step `state.decide` chooses, looks again.

Any number may run (one in every gateway replica); one of them leads, and only its steps are written. None holds state:
what a dead leader left in the swap record is finished or aborted by the next.

outcome.py tells any process, leader or not, what came of a request: it reads the records.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any

from weightsync.control import outcome, placement, swap
from weightsync.control.board import Board
from weightsync.control.chain import Action
from weightsync.control.history import History
from weightsync.control.lease import LEADER_TTL_S, Term, new_name
from weightsync.control.outcome import SwapReport
from weightsync.control.records import (
    Keys,
    OnLost,
    SplitRecord,
    SwapMode,
    SwapRecord,
    TargetRecord,
    VersionRecord,
)
from weightsync.control.state import PARTICIPATING, Ask, Step, decide, phase_of
from weightsync.control.trial import Probe, Trial
from weightsync.errors import StoreError
from weightsync.store.protocol import Store

log = logging.getLogger(__name__)
RETRY_S = 0.5


class Coordinator:
    """The swaps of `model`. `keep` counts retained versions: the active one, the previous one, and older ones.

    `probe` is asked about the canary of a rolling swap; without one, a canary that has flipped is good enough.
    `refuses` says why a version may not be swapped in, "" if it may.
    """

    def __init__(
        self,
        store: Store,
        model: str,
        *,
        keep: int = 2,
        probe: Probe | None = None,
        leader_ttl_s: float = LEADER_TTL_S,
        refuses: Callable[[VersionRecord], str] = lambda _: "",
    ) -> None:
        self._refuses = refuses
        self._store, self._keys, self._keep = store, Keys(model), keep
        self._probe, self._leader_ttl_s, self.name = probe, leader_ttl_s, new_name()
        self._term: Term | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def leads(self) -> bool:
        """Whether this one takes the steps, as far as it knows."""
        return self._term is not None and not self._term.lost.done()

    def start(self) -> None:
        """Run in the background of this event loop until `stop`."""
        self._task = asyncio.create_task(self.run(), name=f"coordinator {self._keys.model}")

    async def stop(self) -> None:
        """A swap in flight stays as it is recorded; the next leader, which may lead at once, goes on with it."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def run(self) -> None:
        """Be a candidate for ever, and lead when elected. While the store is away there are no swaps, and no losses."""
        while True:
            try:
                async with Board.follow(self._store, self._keys) as board:
                    while True:
                        await self._lead(board, await Term.win(self._store, board, self.name, self._leader_ttl_s))
            except StoreError as error:
                log.warning("no swaps until the store answers: %s", error)
                await asyncio.sleep(RETRY_S)

    async def activate(
        self,
        version: int,
        deadline_s: float = 60.0,
        *,
        mode: SwapMode = "together",
        drain_s: float | None = None,
        on_lost: OnLost = "abort",
        split: SplitRecord | None = None,
        requested_by: str = "coordinator",
        reason: str = "",
        action: Action = "activate",
    ) -> SwapReport:
        """Ask for `version`, and report how its swap ended. Raises SwapError, StoreUnavailable.

        `deadline_s` bounds staging, and once more the canary's flip and probe. With `mode` "rolling" one instance tries
        the version and is probed, then the others follow one by one; each lets its streams end for up to `drain_s`
        before. An instance that dies before the commit aborts the swap, or with `on_lost` "continue" is left out of it.
        With a `split`, other versions have shares of the requests (`placement.split_of`), or SwapError is raised. The
        ledger names `requested_by`, with the `reason`.
        """
        target = swap.new_target(
            version, requested_by, deadline_s, mode=mode, drain_s=drain_s, on_lost=on_lost, split=split
        )
        return await self.ask(target, reason=reason, action=action)

    async def ask(
        self,
        target: TargetRecord,
        *,
        reason: str = "",
        action: Action = "activate",
        approval: swap.Approval | None = None,
    ) -> SwapReport:
        """Ask for what `target` says, and report how its swap ended. Raises as `activate` does, and Conflict when what
        waited for `approval` does not wait any more."""
        if target.split is not None:
            board = Board(self._keys, *await self._store.list(self._keys.root))
            there = sum(i.state in PARTICIPATING for i in board.instances.values())
            placement.counts(target.version, target.split, there)
        await swap.request(self._store, self._keys, target, reason=reason, action=action, approval=approval)
        return await outcome.of_request(self._store, self._keys, target)

    async def rollback(
        self,
        deadline_s: float = 60.0,
        *,
        mode: SwapMode = "together",
        drain_s: float | None = None,
        on_lost: OnLost = "abort",
        requested_by: str = "coordinator",
        reason: str = "",
    ) -> SwapReport:
        """Activate the previous version. Raises SwapError when there is none."""
        version = await swap.previous_version(self._store, self._keys)
        by: dict[str, Any] = {"requested_by": requested_by, "reason": reason, "action": "rollback"}
        return await self.activate(version, deadline_s, mode=mode, drain_s=drain_s, on_lost=on_lost, **by)

    async def _lead(self, board: Board, term: Term) -> None:
        """Take steps as long as this term lasts."""
        log.info("%s coordinates the swaps of %s", self.name, self._keys.model)
        self._term, trial, phases = term, Trial(self._probe), Phases()
        try:
            past = await History.open(self._store, self._keys)
            while term.lasts(board):
                await self._advance(board, term, trial, phases, past)
        finally:
            self._term = None
            trial.end()
            await term.end()

    async def _advance(self, board: Board, term: Term, trial: Trial, phases: Phases, past: History) -> None:
        """One decision, and its step or its wait."""
        lasted_s = phases.lasted_s(board.swap, asyncio.get_running_loop().time())
        decision = decide(swap.view_of(board, time.time(), trial.result(board.swap), self._refuses, lasted_s))
        if isinstance(decision, Step):
            spare = max(0, self._keep - 2)
            await swap.take(self._store, board, decision, term.revision, past, spare=spare)
            await board.changed(None, term.lost)  # our own write, or what made it fail
            return
        waiting: list[asyncio.Task[Any]] = [term.lost]
        if isinstance(decision, Ask):
            waiting.append(trial.of(decision.canary, decision.swap, board.active))
        await board.changed(decision.left_s, *waiting)


class Phases:
    """How long the swap has been in its phase, as far as one leader has seen it."""

    def __init__(self) -> None:
        self._phase: tuple[str, ...] = ()
        self._since = 0.0

    def lasted_s(self, swap: SwapRecord | None, now: float) -> float:
        """Seconds, at the time `now` (of any clock that only grows)."""
        if (phase := phase_of(swap)) != self._phase:
            self._phase, self._since = phase, now
        return now - self._since
