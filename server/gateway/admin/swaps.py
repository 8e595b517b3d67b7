"""Asking for a swap on behalf of an HTTP client: what may be asked, and the report as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from server.gateway.gateway import Gateway
from weightsync.errors import SwapAborted
from weightsync.records import Keys, OnLost, PastSwapRecord, SwapMode, SwapRecord
from weightsync.swap.coordinator import SwapReport
from weightsync.swap.history import past_swaps, probe_outcome
from weightsync.swap.state import in_flight


class SwapOptions(BaseModel):
    """How the fleet is to take a version: all at once, or one instance after the other behind a probed canary."""

    model_config = ConfigDict(extra="forbid", strict=True)
    mode: SwapMode = "together"
    drain_s: Annotated[float | None, Field(ge=0, le=3600, description="for streams to end; rolling 30, else 0")] = None
    deadline_s: Annotated[float | None, Field(gt=0, le=3600, description="to stage everywhere")] = None
    on_lost: Annotated[OnLost, Field(description="when an instance dies before the commit")] = "abort"


async def activate(gateway: Gateway, version: int, options: SwapOptions) -> dict[str, Any]:
    """Swaps `version` in; the report when every instance has it. Raises SwapAborted, UnknownVersion, SwapTimeout."""
    deadline_s = options.deadline_s or gateway.config.swap_deadline_s
    report = await gateway.coordinator.activate(
        version, deadline_s, mode=options.mode, drain_s=options.drain_s, on_lost=options.on_lost
    )
    return await _checked(gateway, report)


async def rollback(gateway: Gateway, options: SwapOptions) -> dict[str, Any]:
    """Goes back to the version before the active one. Raises as `activate` does."""
    deadline_s = options.deadline_s or gateway.config.swap_deadline_s
    report = await gateway.coordinator.rollback(
        deadline_s, mode=options.mode, drain_s=options.drain_s, on_lost=options.on_lost
    )
    return await _checked(gateway, report)


async def last_swap(gateway: Gateway) -> SwapRecord | None:
    """The swap in flight, or the last one."""
    found = await gateway.store.get(Keys(gateway.config.model).swap)
    return SwapRecord.from_json(found.value) if found is not None else None


def described(swap: SwapRecord) -> dict[str, Any]:
    """The record as JSON, and what can be read out of it: `probe` is None while no canary was judged."""
    return {**asdict(swap), "in_flight": in_flight(swap), "probe": probe_outcome(swap)}


async def history(gateway: Gateway) -> list[dict[str, Any]]:
    """The swaps that have ended, newest first."""
    return [_told(swap) for swap in await past_swaps(gateway.store, Keys(gateway.config.model))]


def _told(swap: PastSwapRecord) -> dict[str, Any]:
    """`prepare_ms` until the commit or the end, `commit_ms` until all confirmed, `stall_ms` of the worst instance."""
    committed_at = swap.committed_at
    return {
        **asdict(swap),
        "prepare_ms": ((committed_at or swap.ended_at) - swap.opened_at) * 1e3,
        "commit_ms": (swap.ended_at - committed_at) * 1e3 if committed_at is not None else None,
        "stall_ms": max((f.stall_ms for f in swap.flips if f.stall_ms is not None), default=None),
    }


async def _checked(gateway: Gateway, report: SwapReport) -> dict[str, Any]:
    if not report.ok:
        raise SwapAborted(report.version, report.reason or "no reason given", report.tensor)
    swap = await last_swap(gateway)
    if swap is None or swap.id != report.id:  # a later swap has taken its place already
        return asdict(report)
    return {**asdict(report), "mode": swap.mode, "canary": swap.canary, "probe": probe_outcome(swap)}
