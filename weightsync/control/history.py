"""The swaps of a model that have ended, the last `KEPT` of them, in the store: all gateways see them, and restarts too.

The leader writes an entry in the transaction that ends the swap, so there is none without its swap, and none twice. It
numbers them from those at the beginning of its term: no other process writes here meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from weightsync.control import placement
from weightsync.control.board import Board
from weightsync.control.chain import Action, LedgerEntry
from weightsync.control.records import (
    ActiveRecord,
    FlipRecord,
    InstanceRecord,
    Keys,
    PastSwapRecord,
    SwapRecord,
    TargetRecord,
)
from weightsync.control.state import Step
from weightsync.errors import RecordError
from weightsync.store.protocol import Store

log = logging.getLogger(__name__)
KEPT = 100
ENDS = ("finish", "abort", "refuse")  # the steps that end a swap


class History:
    """The place of the leader's next entry, and the entries that make way for it."""

    def __init__(self, keys: Keys, numbers: Iterable[int]) -> None:
        self._keys, self._numbers = keys, sorted(numbers)

    @classmethod
    async def open(cls, store: Store, keys: Keys) -> History:
        """Raises StoreUnavailable."""
        return cls(keys, await _entries(store, keys))

    def additions(self, entry: PastSwapRecord) -> dict[str, bytes | None]:
        """The further writes of the transaction that ends the swap. Say `added` when the transaction went through."""
        kept = self._numbers[-(KEPT - 1) :]
        puts: dict[str, bytes | None] = {self._keys.past_swap(n): None for n in self._numbers[: -len(kept) or None]}
        return puts | {self._keys.past_swap(self._next): entry.to_json()}

    def added(self) -> None:
        """The last additions are written."""
        self._numbers = [*self._numbers[-(KEPT - 1) :], self._next]

    @property
    def _next(self) -> int:
        return self._numbers[-1] + 1 if self._numbers else 1


async def past_swaps(store: Store, keys: Keys) -> list[PastSwapRecord]:
    """Newest first. Raises StoreUnavailable."""
    return list(_readable(await _entries(store, keys)))[::-1]


async def goes_back(store: Store, keys: Keys, active: int, version: int) -> bool:
    """Whether `version` served before `active` ever did; False if it was withdrawn in favor of `active`.

    Raises StoreUnavailable.
    """
    served = [swap.version for swap in reversed(await past_swaps(store, keys)) if swap.outcome == "done"]
    return not {active, version} <= {*served} or served.index(version) < served.index(active)


def entry(board: Board, step: Step, now: float) -> PastSwapRecord:
    """The record kept of a swap that `step`, one of ENDS, brings to its end at the time `now` (unix seconds)."""
    swap, active, target = step.swap, board.active, board.target
    stands = swap.phase == "done" and active is not None and active.swap_id == swap.id
    committed = active if stands else None
    version = board.version(swap.target)
    published = version.fingerprint if version is not None else ""
    present = [board.instances[name] for name in swap.participants if name in board.instances]
    before = committed.previous if committed is not None else active.version if active is not None else None
    return PastSwapRecord(
        id=swap.id,
        version=swap.target,
        outcome="done" if swap.phase == "done" else "aborted",
        mode=swap.mode,
        opened_at=swap.opened_at,
        ended_at=now,
        committed_at=committed.committed_at if committed is not None else None,
        epoch=committed.epoch if committed is not None else None,
        previous=before,
        requested_by=_requested_by(swap, target),
        reason=swap.reason,
        tensor=swap.tensor,
        canary=swap.canary,
        probe=probe_outcome(swap),
        fingerprint=published,
        verified=_verified(board, swap, committed, present),
        changes=swap.changes,
        flips=tuple(_flip(instance, swap, committed) for instance in present),
        split=swap.split,
    )


def restored(active: ActiveRecord, lost: ActiveRecord, reason: str) -> PastSwapRecord:
    """The record kept of a commit that a restart of the host has made, in place of the version that was `lost`."""
    return PastSwapRecord(
        id=active.swap_id,
        version=active.version,
        outcome="done",
        mode="together",
        opened_at=active.committed_at,
        ended_at=active.committed_at,
        committed_at=active.committed_at,
        epoch=active.epoch,
        previous=lost.version,
        requested_by="restore",
        reason=reason,
        fingerprint=active.fingerprint,
    )


def _requested_by(swap: SwapRecord, target: TargetRecord | None) -> str:
    if target is None or not swap.answers(target):
        return ""
    return target.requested_by if swap.id == target.id else "placement"  # the leader's own, as instances came or went


def ledger_entries(board: Board, step: Step) -> list[LedgerEntry]:
    """The entries of the ledger for a step: that it commits, or how it ends the swap."""
    swap, who = step.swap, _requested_by(step.swap, board.target)
    asked = f"asked for by {who}" if who else ""
    about: dict[str, Any] = {"model": board.keys.model, "swap": swap.id, "subject": asked}
    if step.active is not None and step.kind in ("commit", "revert"):
        what: Action = "revert" if step.kind == "revert" else "commit"
        epoch = f"version {step.active.version}, epoch {step.active.epoch}"
        if swap.split is not None and what == "commit":
            epoch += f" ({placement.in_words(swap.split, step.active.version)})"
        outcome = f"{epoch}: {swap.reason}" if swap.reason else epoch
        return [LedgerEntry(what, "coordinator", version=step.active.version, outcome=outcome, **about)]
    if step.kind not in ENDS:
        return []
    ended: Action = "done" if swap.phase == "done" else "abort"
    return [LedgerEntry(ended, "coordinator", version=swap.target, outcome=swap.reason or "", **about)]


def probe_outcome(swap: SwapRecord) -> Literal["passed", "failed"] | None:
    """The outcome of the probe of the swap's canary; None while no canary was judged."""
    if swap.canary is None or swap.phase == "canary":
        return None
    if swap.phase == "aborted":
        return "failed" if (swap.reason or "").startswith(f"the probe of canary {swap.canary} failed") else None
    return "passed"


def _flip(instance: InstanceRecord, swap: SwapRecord, committed: ActiveRecord | None) -> FlipRecord:
    staged = instance.swap_id == swap.id
    followed = _followed(instance, committed)
    return FlipRecord(
        instance=instance.id,
        version=instance.active_version,
        fingerprint=instance.fingerprint,
        stage_ms=instance.stage_ms if staged else None,
        staging_gbps=instance.staging_gbps if staged else None,
        step_loss=instance.step_loss if staged else None,
        stall_ms=instance.commit_ms if staged and followed else None,
    )


def _followed(instance: InstanceRecord, committed: ActiveRecord | None) -> bool:
    return committed is not None and instance.active_epoch == committed.epoch


def _verified(
    board: Board, swap: SwapRecord, committed: ActiveRecord | None, present: Iterable[InstanceRecord]
) -> bool | None:
    """Compares what runs after a commit, or what had been staged when the swap was aborted."""
    found = []
    for i in present:
        wanted = swap.of(i.id).target
        if committed is not None:
            built = i.fingerprint if _followed(i, committed) else None
        else:
            built = i.staged_fingerprint if (i.swap_id, i.staged_version) == (swap.id, wanted) else None
        version = board.version(wanted)
        if built and version is not None and version.fingerprint:
            found.append(built == version.fingerprint)
    return all(found) if found else None


async def _entries(store: Store, keys: Keys) -> dict[int, bytes]:
    """By number, oldest first. Of this model alone: another one's name may begin like this one's."""
    found, _ = await store.list(keys.history)
    tails = ((kv.key.removeprefix(keys.history), kv.value) for kv in found)
    return {int(tail): value for tail, value in tails if tail.isascii() and tail.isdigit()}


def _readable(found: Mapping[int, bytes]) -> Iterator[PastSwapRecord]:
    for number, value in found.items():
        try:
            yield PastSwapRecord.from_json(value)
        except RecordError as error:
            log.error("ignoring entry %d of the history of swaps: %s", number, error)
