"""`/admin/instances/{id}/sleep` and `/wake`: an instance gives its memory back, and has it again (server/sleeping.py).

A trainer that shares the device with the fleet orders this between its phases. The order is a record in the store, so
any gateway may give it, and it holds for an instance that is started anew. A sleeping instance is in no swap and gets
no request; it wakes with dummy weights, or those it slept with, and serves nothing but the version active then.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Path
from pydantic import BaseModel, ConfigDict, Field

from server.errors import NotFound
from server.gateway.deps import GatewayDep
from server.gateway.gateway import Gateway
from server.sleeping import Level, SleeperRecord, SleepOrder, orders, sleepers
from weightsync.records import Keys

router = APIRouter(prefix="/admin", tags=["admin"])

LOOK_S = 0.05
InstanceId = Annotated[str, Path(min_length=1, max_length=200)]
Wait = Annotated[float, Field(ge=0, le=600, description="seconds to wait for it, 0: answer at once")]


class Sleep(BaseModel):
    """How deep, and how: requests in flight get `drain_s` to end; after `ttl_s` it wakes unless the order was renewed
    by giving it again."""

    model_config = ConfigDict(extra="forbid", strict=True)
    level: Level = 2
    drain_s: float = Field(default=30.0, ge=0, le=3600)
    ttl_s: float | None = Field(default=None, ge=1, le=86400)
    requested_by: str = Field(default="admin", min_length=1, max_length=128)
    wait_s: Wait = 0.0


class Wake(BaseModel):
    """How long to wait until it serves."""

    model_config = ConfigDict(extra="forbid", strict=True)
    wait_s: Wait = 0.0


@router.get("/sleep")
async def sleeping(gateway: GatewayDep) -> dict[str, Any]:
    """Who is ordered to sleep, and who does; an order without a sleeper is being followed, or its process is gone."""
    keys = Keys(gateway.config.model)
    ordered = [asdict(SleepOrder.from_json(kv.value)) for kv in (await gateway.store.list(orders(keys)))[0]]
    asleep = [asdict(SleeperRecord.from_json(kv.value)) for kv in (await gateway.store.list(sleepers(keys)))[0]]
    return {"model": gateway.config.model, "orders": ordered, "asleep": asleep}


@router.post("/instances/{instance_id}/sleep")
async def sleep(gateway: GatewayDep, instance_id: InstanceId, body: Sleep | None = None) -> dict[str, Any]:
    """Orders it to sleep, or renews the order; `state` is `asleep` as soon as its memory is free."""
    body = body or Sleep()
    await _check_known(gateway, instance_id)
    order = SleepOrder(instance_id, body.level, body.drain_s, body.requested_by, time.time(), body.ttl_s)
    lease = await gateway.store.grant_lease(body.ttl_s) if body.ttl_s is not None else None
    await gateway.store.put(orders(Keys(gateway.config.model)) + instance_id, order.to_json(), lease)
    found = await _within(body.wait_s, lambda: _is_asleep(gateway, instance_id))
    return {"id": instance_id, "level": body.level, "state": "asleep" if found else "falling_asleep"}


@router.post("/instances/{instance_id}/wake")
async def wake(gateway: GatewayDep, instance_id: InstanceId, body: Wake | None = None) -> dict[str, Any]:
    """Ends its sleep; `state` is `serving` as soon as it gets requests. One that is awake stays so."""
    body = body or Wake()
    await _check_known(gateway, instance_id)
    await gateway.store.delete(orders(Keys(gateway.config.model)) + instance_id)
    found = await _within(body.wait_s, lambda: _serves(gateway, instance_id))
    return {"id": instance_id, "state": "serving" if found else "waking"}


async def _check_known(gateway: Gateway, instance_id: str) -> None:
    """Raises NotFound for one that neither serves nor sleeps nor is ordered to."""
    keys = Keys(gateway.config.model)
    for key in (keys.instance(instance_id), sleepers(keys) + instance_id, orders(keys) + instance_id):
        if await gateway.store.get(key) is not None:
            return
    known = ", ".join(sorted(gateway.fleet.instances)) or "none"
    raise NotFound(f"No instance {instance_id!r} is registered (there are: {known}).", code="unknown_instance")


async def _is_asleep(gateway: Gateway, instance_id: str) -> bool:
    return await gateway.store.get(sleepers(Keys(gateway.config.model)) + instance_id) is not None


async def _serves(gateway: Gateway, instance_id: str) -> bool:
    return any(instance.record.id == instance_id for instance in gateway.fleet.serving)


async def _within(seconds: float, holds: Callable[[], Awaitable[bool]]) -> bool:
    deadline = time.monotonic() + seconds
    while not await holds():
        if time.monotonic() >= deadline:
            return False
        await asyncio.sleep(LOOK_S)
    return True
