"""Drives the swap transaction of one model: watches the records, takes the step `swap_state` decides, looks again.

Any number may run (one in every gateway replica); every step compares what it was decided on. None holds state: what a
dead coordinator left in the swap record is finished or aborted by the next.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from weightsync import activation, retention
from weightsync.board import Board
from weightsync.errors import Conflict, StoreError, SwapAborted, SwapTimeout
from weightsync.records import InstanceRecord, Keys, SwapRecord, TargetRecord
from weightsync.store.protocol import Store
from weightsync.swap_state import Step, View, decide, depends_on, in_flight

log = logging.getLogger(__name__)
RETRY_S = 0.5
REPORT_GRACE_S = 35.0  # over the deadline: confirmations of a commit may take 30 s


@dataclass(frozen=True)
class SwapReport:
    """How a swap ended. `prepare_ms` is from open to commit, `commit_ms` from commit until every instance confirmed."""

    id: str
    version: int
    previous: int | None
    epoch: int
    ok: bool
    reason: str | None
    tensor: str | None
    prepare_ms: float
    commit_ms: float
    instances: Mapping[str, InstanceRecord]


class Coordinator:
    """The swaps of `model`. `keep` counts retained versions: the active one, the previous one, and older ones."""

    def __init__(self, store: Store, model: str, *, keep: int = 2) -> None:
        self._store, self._keys, self._keep = store, Keys(model), keep
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Run in the background of this event loop until `stop`."""
        self._task = asyncio.create_task(self.run(), name=f"coordinator {self._keys.model}")

    async def stop(self) -> None:
        """A swap in flight stays as it is recorded; the next coordinator goes on with it."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def run(self) -> None:
        """Coordinate for ever. While the store is away there are no swaps, and nothing else is lost."""
        while True:
            try:
                async with Board.follow(self._store, self._keys) as board:
                    while True:
                        await self._advance(board)
            except StoreError as error:
                log.warning("no swaps until the store answers: %s", error)
                await asyncio.sleep(RETRY_S)

    async def activate(self, version: int, deadline_s: float = 60.0) -> SwapReport:
        """Ask for `version`, and report how its swap ended. Raises UnknownVersion, SwapTimeout, StoreUnavailable."""
        target = activation.new_target(version, "coordinator", deadline_s)
        async with Board.follow(self._store, self._keys) as board:
            revision = await activation.request(self._store, self._keys, target)
            return await _report(board, target, revision)

    async def rollback(self, deadline_s: float = 60.0) -> SwapReport:
        """Activate the previous version. Raises SwapAborted when there is none."""
        return await self.activate(await activation.previous_version(self._store, self._keys), deadline_s)

    async def _advance(self, board: Board) -> None:
        """One decision, and its step or its wait."""
        decision = decide(_view(board))
        if isinstance(decision, Step):
            await self._take(board, decision)
            await board.changed()  # our own write, or what made it fail
        else:
            await board.changed(None if decision.until is None else max(0.0, decision.until - time.time()))

    async def _take(self, board: Board, step: Step) -> None:
        keys, swap = self._keys, step.swap
        puts: dict[str, bytes | None] = {keys.swap: swap.to_json()}
        if step.active is not None:
            puts[keys.active] = step.active.to_json()
        decided_on = depends_on(step, keys)
        if step.kind in ("commit", "finish"):
            retiring = self._superseded_by(board, step)
            decided_on += [keys.target, *retiring]
            puts |= retiring
        try:
            await self._store.txn({key: board.revision(key) for key in decided_on}, puts)
        except Conflict:
            return
        log.log(logging.WARNING if swap.reason else logging.INFO, "swap %s: %s", step.kind, swap)

    def _superseded_by(self, board: Board, step: Step) -> dict[str, bytes | None]:
        """What a commit makes superfluous goes with it, so that the slot is free for the next version at once."""
        active = step.active or board.active
        if active is None:
            return {}
        needed = retention.needed_versions(active, step.swap, board.target, board.instances.values())
        return retention.retirement(
            self._keys, board.versions, needed, spare=max(0, self._keep - 2), below=active.version
        )


def _view(board: Board) -> View:
    swap, target = board.swap, board.target
    version = swap.target if swap is not None and in_flight(swap) else target.version if target is not None else None
    record = board.version(version) if version is not None else None
    return View(
        now=time.time(),
        target=target,
        target_state=record.state if record is not None else None,
        swap=swap,
        active=board.active,
        instances=board.instances,
    )


async def _report(board: Board, target: TargetRecord, revision: int) -> SwapReport:
    """Follow the request of `revision` to its end."""
    deadline = time.monotonic() + target.deadline_s + REPORT_GRACE_S
    judge = activation.Judge(board.keys, target)
    while True:
        left = deadline - time.monotonic()
        event = await board.changed(left)
        if event is None:
            raise SwapTimeout(target.version, target.deadline_s + REPORT_GRACE_S)
        swap = board.swap
        if swap is not None and swap.id == target.id and swap.phase in ("done", "aborted"):
            return _report_of(board, swap)
        try:
            if event.kv.mod_revision > revision:
                judge.is_done(event)
        except SwapAborted as superseded:
            return replace(_report_of(board, _never_opened(target)), reason=superseded.reason)


def _never_opened(target: TargetRecord) -> SwapRecord:
    now = time.time()
    return SwapRecord(target.id, target.version, "aborted", (), deadline=now, opened_at=now)


def _report_of(board: Board, swap: SwapRecord) -> SwapReport:
    active = board.active
    ok = swap.phase == "done" and active is not None and active.swap_id == swap.id
    now = time.time()
    committed_at = active.committed_at if ok and active is not None else now
    return SwapReport(
        id=swap.id,
        version=swap.target,
        previous=active.previous if active is not None else None,
        epoch=active.epoch if active is not None else 0,
        ok=ok,
        reason=swap.reason,
        tensor=swap.tensor,
        prepare_ms=(committed_at - swap.opened_at) * 1e3,
        commit_ms=(now - committed_at) * 1e3,
        instances={name: found for name, found in board.instances.items() if name in swap.participants},
    )
