"""`/admin/*`: what `hotswap weights` and operators use. The key is checked in `AdminGate`, before a body is read."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field

from server.gateway.admin import swaps
from server.gateway.admin.swaps import SwapOptions
from server.gateway.deps import GatewayDep
from server.gateway.gateway import Gateway
from weightsync.records import ActiveRecord, Keys, VersionRecord

router = APIRouter(prefix="/admin", tags=["admin"])

Version = Annotated[int, Field(ge=1, lt=2**63)]


class Push(SwapOptions):
    """A Hugging Face checkpoint directory on the gateway's host: the base model, or the `part` ("draft", "lora/NAME").

    `parts` adds more directories to the same version, by part.
    """

    path: str = Field(min_length=1, max_length=4096)
    part: str = Field(default="", max_length=200)
    parts: dict[str, str] = Field(default={}, max_length=256)
    activate: bool = True


class Activate(SwapOptions):
    """A published version to swap in."""

    version: Version


class Rollback(SwapOptions):
    """Where to go back to: any version that is still ready; by default the one before the active one."""

    version: Version | None = None


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
        swap = await swaps.activate(gateway, version, body) if body.activate else None
        return {"version": version, "swap": swap}

    return await gateway.pusher.push(Path(body.path), then, part=body.part, parts=body.parts)


@router.post("/weights/activate")
async def activate(gateway: GatewayDep, body: Activate) -> dict[str, Any]:
    """Swaps a published version in; answers when every instance has it, or says why none does."""
    return await swaps.activate(gateway, body.version, body)


@router.post("/weights/rollback")
async def rollback(gateway: GatewayDep, body: Rollback | None = None) -> dict[str, Any]:
    """Goes back to the version before the active one, or to the one that is named."""
    body = body or Rollback()
    if body.version is not None:
        return await swaps.activate(gateway, body.version, body)
    return await swaps.rollback(gateway, body)


@router.get("/swap")
async def swap(gateway: GatewayDep) -> dict[str, Any]:
    """The swap in flight, or the last one; null before the first."""
    record = await swaps.last_swap(gateway)
    return {"model": gateway.config.model, "swap": swaps.described(record) if record is not None else None}


@router.get("/swaps")
async def past_swaps(gateway: GatewayDep) -> dict[str, Any]:
    """The last swaps that have ended, newest first: what each cost, whether it was verified, and why it was aborted."""
    return {"model": gateway.config.model, "swaps": await swaps.history(gateway)}


@router.get("/weights/active")
async def active(gateway: GatewayDep) -> dict[str, Any]:
    """The commit record; `version` is null and `epoch` 0 before the first commit."""
    nothing = {"version": None, "epoch": 0, "previous": None}
    return {"model": gateway.config.model, **(await _active(gateway) or nothing)}


async def _active(gateway: Gateway) -> dict[str, Any] | None:
    found = await gateway.store.get(Keys(gateway.config.model).active)
    return asdict(ActiveRecord.from_json(found.value)) if found is not None else None
