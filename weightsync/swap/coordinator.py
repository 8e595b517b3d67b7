"""Drives the swap transaction of one model: watches the records, takes the step `swap_state` decides, looks again.

Any number may run (one in every gateway replica); one of them leads, and only its steps are written. None holds state:
what a dead leader left in the swap record is finished or aborted by the next.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import Any

from weightsync import retention
from weightsync.board import Board
from weightsync.errors import Conflict, StoreError, StoreRefused
from weightsync.records import Keys, OnLost, SwapMode
from weightsync.store.protocol import Store
from weightsync.swap import activation, history
from weightsync.swap import report as swap_report
from weightsync.swap.history import History
from weightsync.swap.leader import LEADER_TTL_S, Term, new_name
from weightsync.swap.probe import Probe, ProbeResult, Trial
from weightsync.swap.report import SwapReport
from weightsync.swap.state import Ask, Step, View, abort, decide, depends_on, in_flight

__all__ = ["Coordinator", "Probe", "ProbeResult", "SwapReport"]

log = logging.getLogger(__name__)
RETRY_S = 0.5


class Coordinator:
    """The swaps of `model`. `keep` counts retained versions: the active one, the previous one, and older ones.

    `probe` is asked about the canary of a rolling swap; without one, a canary that has flipped is good enough.
    """

    def __init__(
        self,
        store: Store,
        model: str,
        *,
        keep: int = 2,
        probe: Probe | None = None,
        leader_ttl_s: float = LEADER_TTL_S,
    ) -> None:
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
    ) -> SwapReport:
        """Ask for `version`, and report how its swap ended. Raises UnknownVersion, SwapTimeout, StoreUnavailable.

        `deadline_s` bounds staging, and once more the canary's flip and probe. With `mode` "rolling" one instance flips
        ahead and is probed, then the others follow one by one; each lets its streams end for up to `drain_s` before.
        An instance that dies before the commit aborts the swap, or with `on_lost` "continue" is left out of it.
        """
        target = activation.new_target(version, "coordinator", deadline_s, mode=mode, drain_s=drain_s, on_lost=on_lost)
        async with Board.follow(self._store, self._keys) as board:
            revision = await activation.request(self._store, self._keys, target)
            return await swap_report.follow(board, target, revision)

    async def rollback(
        self,
        deadline_s: float = 60.0,
        *,
        mode: SwapMode = "together",
        drain_s: float | None = None,
        on_lost: OnLost = "abort",
    ) -> SwapReport:
        """Activate the previous version. Raises SwapAborted when there is none."""
        version = await activation.previous_version(self._store, self._keys)
        return await self.activate(version, deadline_s, mode=mode, drain_s=drain_s, on_lost=on_lost)

    async def _lead(self, board: Board, term: Term) -> None:
        """Take steps as long as this term lasts."""
        log.info("%s coordinates the swaps of %s", self.name, self._keys.model)
        self._term, trial = term, Trial(self._probe)
        try:
            past = await History.open(self._store, self._keys)
            while term.lasts(board):
                await self._advance(board, term, trial, past)
        finally:
            self._term = None
            trial.end()
            await term.end()

    async def _advance(self, board: Board, term: Term, trial: Trial, past: History) -> None:
        """One decision, and its step or its wait."""
        decision = decide(view_of(board, time.time(), trial.result(board.swap)))
        if isinstance(decision, Step):
            await self._take(board, term, decision, past)
            await board.changed(None, term.lost)  # our own write, or what made it fail
            return
        waiting: list[asyncio.Task[Any]] = [term.lost]
        if isinstance(decision, Ask):
            waiting.append(trial.of(decision.canary, decision.swap, board.active))
        until = decision.until
        await board.changed(None if until is None else max(0.0, until - time.time()), *waiting)

    async def _take(self, board: Board, term: Term, step: Step, past: History) -> None:
        compares, puts = transaction(board, step, term.revision, spare=max(0, self._keep - 2))
        ends = step.kind in history.ENDS
        if ends:
            puts |= past.additions(history.entry(board, step, time.time()))
        try:
            await self._store.txn(compares, puts)
        except Conflict:
            return
        except StoreRefused as refusal:
            if step.kind not in ("try", "commit") or board.swap is None:
                raise
            # More participants than etcd compares in one transaction: it would be refused for ever.
            await self._take(board, term, abort(board.swap, str(refusal)), past)
            return
        if ends:
            past.added()
        log.log(logging.WARNING if step.swap.reason else logging.INFO, "swap %s: %s", step.kind, step.swap)


def transaction(
    board: Board, step: Step, leader: int, *, spare: int = 0
) -> tuple[dict[str, int], dict[str, bytes | None]]:
    """What a step compares and writes; `leader` is the revision of the leader's key in its term."""
    keys, swap = board.keys, step.swap
    puts: dict[str, bytes | None] = {keys.swap: swap.to_json()}
    if step.active is not None:
        puts[keys.active] = step.active.to_json()
    decided_on = depends_on(step, keys)
    if step.kind in ("commit", "finish"):
        retiring = _superseded_by(board, step, spare)
        decided_on += [keys.target, *retiring]
        puts |= retiring
    return {key: leader if key == keys.leader else board.revision(key) for key in decided_on}, puts


def _superseded_by(board: Board, step: Step, spare: int) -> dict[str, bytes | None]:
    """What a commit makes superfluous goes with it, so that the slot is free for the next version at once."""
    active = step.active or board.active
    if active is None:
        return {}
    needed = retention.needed_versions(active, step.swap, board.target, board.instances.values())
    return retention.retirement(board.keys, board.versions, needed, spare=spare, below=active.version)


def view_of(board: Board, now: float, probe: ProbeResult | None = None) -> View:
    """What `decide` looks at."""
    swap, target = board.swap, board.target
    version = swap.target if swap is not None and in_flight(swap) else target.version if target is not None else None
    record = board.version(version) if version is not None else None
    return View(
        now=now,
        target=target,
        target_state=record.state if record is not None else None,
        swap=swap,
        active=board.active,
        instances=board.instances,
        target_fingerprint=record.fingerprint if record is not None else "",
        probe=probe,
    )
