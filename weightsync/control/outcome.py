"""The outcome of a swap, for any process that waits for it: the gateway that leads, another one, or a publisher.

The records tell the outcome as they stand, so a waiter may come late, and outlives outages of the store. The history
has the swaps that a later one has replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from weightsync.control.board import Board
from weightsync.control.history import past_swaps
from weightsync.control.records import (
    MODELS_PREFIX,
    InstanceRecord,
    Keys,
    PastSwapRecord,
    SplitRecord,
    SwapMode,
    SwapRecord,
    TargetRecord,
)
from weightsync.control.state import RESTART_S, confirm_within_s, in_flight, not_flipped, untried
from weightsync.errors import StoreRefused, StoreUnavailable, WatchCompacted, swap_aborted, swap_timeout
from weightsync.store.protocol import MISSING, Store
from weightsync.timeouts import timeout_at

T = TypeVar("T")
RETRY_S = 0.2
GRACE_S = 10.0  # over what the phases of a swap may take: a new leader may have to be found


@dataclass(frozen=True)
class SwapReport:
    """The outcome of a swap. `prepare_ms` is from open to commit, `commit_ms` from commit until every instance
    confirmed. `changes`: what their forms differ in, if the instances were restarted for it one by one.
    `not_flipped`: the instances that could not follow the commit, and start anew with it."""

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
    changes: str = ""
    split: SplitRecord | None = None
    not_flipped: tuple[str, ...] = ()

    def checked(self) -> SwapReport:
        """Raises SwapError unless the version serves."""
        if not self.ok:
            raise swap_aborted(self.version, self.reason or "no reason given", self.tensor)
        return self


async def of_request(store: Store, keys: Keys, target: TargetRecord) -> SwapReport:
    """The report of the swap that `target` has asked for, once every participant has flipped or was given up.

    So a rollout that starts afterwards comes from the new weights. Raises SwapError when no leader ends it in time:
    `deadline_s` until it opens, and then what its phases may take. Each leader has that time.
    """
    patience = Patience(target, _now())

    async def ended(board: Board) -> SwapReport | None:
        swap, wanted = board.swap, board.target
        if swap is not None and swap.id == target.id:
            return None if in_flight(swap) and not untried(swap) else _report(board, swap)
        if wanted is None or (wanted.id == target.id and not (swap is not None and swap.answers(target))):
            return None
        never = f"superseded by a request for version {wanted.version}"
        past = PastSwapRecord(target.id, target.version, "aborted", target.mode, 0.0, 0.0, reason=never)
        with contextlib.suppress(StoreRefused):  # the role of a trainer that was made by an older release
            past = next((one for one in await past_swaps(store, keys) if one.id == target.id), past)
        return _remembered(past)

    return await _wait(store, keys, target.version, lambda board: patience.until(board, _now()), ended)


async def of_version(store: Store, keys: Keys, version: int, timeout_s: float) -> None:
    """Return when `version` serves, by any request: committed, and its swap done.

    Raises SwapError when a swap to it ends otherwise meanwhile, or there is no outcome in time.
    """
    end, before = _now() + timeout_s, -1

    async def ended(board: Board) -> bool | None:
        nonlocal before
        active, swap, revision = board.active, board.swap, board.revision(keys.swap)
        before = revision if before < 0 else before
        if active is not None and active.version == version:
            return True if swap is None or swap.id != active.swap_id or _stands(swap) else None
        if swap is not None and swap.target == version and swap.phase == "aborted" and revision > before:
            _report(board, swap).checked()
        return None

    await _wait(store, keys, version, lambda _: end, ended)


class Patience:
    """Until when a request is waited for: from its beginning, from when its swap opens, and under each leader anew."""

    def __init__(self, target: TargetRecord, now: float) -> None:
        self._target, self._since = target, now
        self._stage = ("", MISSING)

    def until(self, board: Board, now: float) -> float:
        """By the clock of `now`, which only grows."""
        opened = board.swap.id if board.swap is not None and in_flight(board.swap) else ""
        if (stage := (opened, board.revision(board.keys.leader))) != self._stage:
            self._stage, self._since = stage, now
        return self._since + patience_s(self._target, board.swap)


def patience_s(target: TargetRecord, swap: SwapRecord | None) -> float:
    """Seconds from when `swap` opened, or the one before ended, within which a leader that works has ended it."""
    if swap is None or not in_flight(swap):
        return target.deadline_s
    phase = swap.deadline - swap.opened_at
    limit = (target.deadline_s if swap.id == target.id else phase) + GRACE_S
    if swap.changes:  # the canary, everybody's turn, and everybody's turn back
        return limit + RESTART_S + swap.drain_s + 2 * confirm_within_s(swap)
    canary = 0.0 if swap.mode == "together" else phase + swap.drain_s
    return limit + canary + confirm_within_s(swap) * (2 if swap.phase == "revert" else 1)


async def _wait(
    store: Store,
    keys: Keys,
    version: int,
    until: Callable[[Board], float],
    ended: Callable[[Board], Awaitable[T | None]],
) -> T:
    """The first answer of `ended` that is not None, as the records change. `until` tells when to give up."""
    began, board = _now(), Board(keys)
    try:
        async with timeout_at(until(board)) as limit:
            while True:
                with contextlib.suppress(StoreUnavailable, WatchCompacted):
                    async with Board.follow(store, keys) as board:
                        while (found := await ended(board)) is None:
                            limit.reschedule(until(board))
                            await board.changed()
                        return found
                await asyncio.sleep(RETRY_S)
    except TimeoutError:
        raise swap_timeout(version, round(_now() - began, 1), await _hint(store, keys)) from None


async def _hint(store: Store, keys: Keys) -> str:
    """Names that are served, where this one is not."""
    with contextlib.suppress(StoreUnavailable):  # it may be away, or this user may see one model alone
        records, _ = await store.list(MODELS_PREFIX)
        served = {kv.key[len(MODELS_PREFIX) :].rpartition("/instances/")[0] for kv in records} - {""}
        if served and keys.model not in served:
            return f"no instance serves {keys.model!r}; name a model that is served: {', '.join(sorted(served))}"
    return ""


def _report(board: Board, swap: SwapRecord) -> SwapReport:
    active = board.active
    ok = _stands(swap) and active is not None and active.swap_id == swap.id
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
        changes=swap.changes,
        split=swap.split,
        not_flipped=not_flipped(swap, active, board.instances) if ok else (),
    )


def _stands(swap: SwapRecord) -> bool:
    """Whether its commit stands, as far as an instance could say."""
    return swap.phase == "done" or untried(swap)


def _remembered(past: PastSwapRecord) -> SwapReport:
    committed_at = past.committed_at or past.ended_at
    return SwapReport(
        id=past.id,
        version=past.version,
        previous=past.previous,
        epoch=past.epoch or 0,
        ok=past.outcome == "done",
        reason=past.reason,
        tensor=past.tensor,
        prepare_ms=(committed_at - past.opened_at) * 1e3,
        commit_ms=(past.ended_at - committed_at) * 1e3,
        instances={},
        mode=past.mode,
        changes=past.changes,
        split=past.split,
    )


def _now() -> float:
    return asyncio.get_running_loop().time()
