"""`/admin/*`: what `hotswap weights` and operators use. The key is checked in `AdminGate`, before a body is read."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from server.gateway.deps import GatewayDep
from server.gateway.gateway import Gateway
from server.gateway.signals import FIELDS
from weightsync.coordinator import SwapReport
from weightsync.errors import SwapAborted
from weightsync.records import ActiveRecord, Keys, VersionRecord

router = APIRouter(prefix="/admin", tags=["admin"])

Deadline = Annotated[float | None, Field(default=None, gt=0, le=3600, description="seconds to stage everywhere")]


class Push(BaseModel):
    """A Hugging Face checkpoint directory on the gateway's host."""

    model_config = ConfigDict(extra="forbid", strict=True)
    path: str = Field(min_length=1, max_length=4096)
    activate: bool = True
    deadline_s: Deadline = None


class Activate(BaseModel):
    """A published version to swap in."""

    model_config = ConfigDict(extra="forbid", strict=True)
    version: int = Field(ge=1, lt=2**63)
    deadline_s: Deadline = None


@router.get("/weights")
async def list_versions(gateway: GatewayDep) -> dict[str, Any]:
    """Every version the store knows, newest last, and the active one."""
    keys = Keys(gateway.config.model)
    items, _ = await gateway.store.list(keys.versions)
    versions = [asdict(VersionRecord.from_json(kv.value)) for kv in items]
    return {"model": gateway.config.model, "active": await _active(gateway), "versions": versions}


@router.post("/weights")
async def push(gateway: GatewayDep, body: Push) -> dict[str, Any]:
    """Publishes a checkpoint; with `activate`, swaps it in and reports the swap."""

    async def then(version: int) -> dict[str, Any]:
        swap = await _activate(gateway, version, body.deadline_s) if body.activate else None
        return {"version": version, "swap": swap}

    return await gateway.pusher.push(Path(body.path), then)


@router.post("/weights/activate")
async def activate(gateway: GatewayDep, body: Activate) -> dict[str, Any]:
    """Swaps a published version in; answers when every instance has it, or says why none does."""
    return await _activate(gateway, body.version, body.deadline_s)


@router.post("/weights/rollback")
async def rollback(gateway: GatewayDep) -> dict[str, Any]:
    """Goes back to the version before the active one."""
    return _checked(await gateway.coordinator.rollback(gateway.config.swap_deadline_s))


@router.get("/weights/active")
async def active(gateway: GatewayDep) -> dict[str, Any]:
    """The commit record; `version` is null and `epoch` 0 before the first commit."""
    nothing = {"version": None, "epoch": 0, "previous": None}
    return {"model": gateway.config.model, **(await _active(gateway) or nothing)}


@router.get("/instances")
async def instances(gateway: GatewayDep) -> dict[str, Any]:
    """Every instance: its record, and what this gateway sees of it."""
    rows = []
    for i in gateway.fleet.instances.values():
        signals = {name: getattr(i.signals, name) for name in FIELDS} if i.signals is not None else None
        rows.append({**asdict(i.record), "in_flight": i.inflight, "signals": signals})
    return {"model": gateway.config.model, "instances": rows}


async def _active(gateway: Gateway) -> dict[str, Any] | None:
    found = await gateway.store.get(Keys(gateway.config.model).active)
    return asdict(ActiveRecord.from_json(found.value)) if found is not None else None


async def _activate(gateway: Gateway, version: int, deadline_s: float | None) -> dict[str, Any]:
    return _checked(await gateway.coordinator.activate(version, deadline_s or gateway.config.swap_deadline_s))


def _checked(report: SwapReport) -> dict[str, Any]:
    """The report of a swap that was done. Raises SwapAborted for one that was not."""
    if not report.ok:
        raise SwapAborted(report.version, report.reason or "no reason given", report.tensor)
    return asdict(report)
