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
from dataclasses import replace
from typing import Any

from weightsync.control import activation, history, outcome, placement
from weightsync.control.board import Board
from weightsync.control.chain import Action, append
from weightsync.control.forms import changes_to
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
    shared_versions,
)
from weightsync.control.state import (
    PARTICIPATING,
    Ask,
    Step,
    View,
    abort,
    decide,
    in_flight,
    phase_of,
    untried,
)
from weightsync.control.trial import Probe, ProbeResult, Trial
from weightsync.errors import Conflict, StoreError, StoreRefused
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
        """Ask for `version`, and report how its swap ended. Raises UnknownVersion, SwapTimeout, StoreUnavailable.

        `deadline_s` bounds staging, and once more the canary's flip and probe. With `mode` "rolling" one instance tries
        the version and is probed, then the others follow one by one; each lets its streams end for up to `drain_s`
        before. An instance that dies before the commit aborts the swap, or with `on_lost` "continue" is left out of it.
        With a `split`, other versions have shares of the requests (`placement.split_of`), or NotEnoughInstances is
        raised. The ledger names `requested_by`, with the `reason`.
        """
        target = activation.new_target(
            version, requested_by, deadline_s, mode=mode, drain_s=drain_s, on_lost=on_lost, split=split
        )
        return await self.ask(target, reason=reason, action=action)

    async def ask(
        self,
        target: TargetRecord,
        *,
        reason: str = "",
        action: Action = "activate",
        approval: activation.Approval | None = None,
    ) -> SwapReport:
        """Ask for what `target` says, and report how its swap ended. Raises as `activate` does, and Conflict when what
        waited for `approval` does not wait any more."""
        if target.split is not None:
            board = Board(self._keys, *await self._store.list(self._keys.root))
            there = sum(i.state in PARTICIPATING for i in board.instances.values())
            placement.counts(target.version, target.split, there)
        await activation.request(self._store, self._keys, target, reason=reason, action=action, approval=approval)
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
        """Activate the previous version. Raises SwapAborted when there is none."""
        version = await activation.previous_version(self._store, self._keys)
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
        decision = decide(view_of(board, time.time(), trial.result(board.swap), self._refuses, lasted_s))
        if isinstance(decision, Step):
            await self._take(board, term, decision, past)
            await board.changed(None, term.lost)  # our own write, or what made it fail
            return
        waiting: list[asyncio.Task[Any]] = [term.lost]
        if isinstance(decision, Ask):
            waiting.append(trial.of(decision.canary, decision.swap, board.active))
        await board.changed(decision.left_s, *waiting)

    async def _take(self, board: Board, term: Term, step: Step, past: History) -> None:
        compares, puts = transaction(board, step, term.revision, spare=max(0, self._keep - 2))
        ends = step.kind in history.ENDS
        if ends:
            puts |= past.additions(history.entry(board, step, time.time()))
        try:
            await append(self._store, compares, puts, *history.ledger_entries(board, step))
        except Conflict:
            return
        except StoreRefused as refusal:
            if step.kind not in ("try", "commit") or board.swap is None:
                raise
            # It would be refused for ever.
            await self._take(board, term, abort(view_of(board, time.time()), board.swap, str(refusal)), past)
            return
        if ends:
            past.added()
        log.log(logging.WARNING if step.swap.reason else logging.INFO, "swap %s: %s", step.kind, step.swap)


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
    needed = activation.needed_versions(active, step.swap, board.target, board.instances.values())
    return activation.retirement(board.keys, board.versions, needed, spare=spare, below=active.version)


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
