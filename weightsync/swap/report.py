"""What came of a request for a version: found by following the records, in any process, leader or not."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from weightsync.board import Board
from weightsync.errors import SwapAborted, SwapTimeout
from weightsync.records import InstanceRecord, SwapMode, SwapRecord, TargetRecord
from weightsync.swap import activation
from weightsync.swap.state import confirm_within_s, in_flight

REPORT_GRACE_S = 10.0  # over what the phases of a swap may take: a new leader may have to be found


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
    mode: SwapMode = "together"


async def follow(board: Board, target: TargetRecord, revision: int) -> SwapReport:
    """Follow the request of `revision` to its end. Raises SwapTimeout when no leader answers it."""
    asked = time.monotonic()
    judge = activation.Judge(board.keys, target)
    while True:
        limit = _patience_s(target, board.swap)
        event = await board.changed(max(0.0, asked + limit - time.monotonic()))
        if event is None:
            raise SwapTimeout(target.version, limit)
        swap = board.swap
        if swap is not None and swap.id == target.id and swap.phase in ("done", "aborted"):
            return _of(board, swap)
        try:
            if event.kv.mod_revision > revision:
                judge.is_done(event)
        except SwapAborted as superseded:
            return replace(_of(board, _never_opened(target)), reason=superseded.reason)


def _patience_s(target: TargetRecord, swap: SwapRecord | None) -> float:
    """Seconds from the request within which a leader that works has ended its swap, and the one in flight before it."""
    limit = target.deadline_s + REPORT_GRACE_S
    if swap is None or not in_flight(swap):
        return limit
    before = swap.deadline - swap.opened_at if swap.id != target.id else 0.0
    canary = 0.0 if swap.mode == "together" else swap.deadline - swap.opened_at + swap.drain_s
    return limit + before + canary + confirm_within_s(swap)


def _never_opened(target: TargetRecord) -> SwapRecord:
    now = time.time()
    return SwapRecord(target.id, target.version, "aborted", (), deadline=now, opened_at=now)


def _of(board: Board, swap: SwapRecord) -> SwapReport:
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
        mode=swap.mode,
    )
