"""`/admin/instances`: who there is, how they do, and leaving one out of routing for a while.

A drain is a record in the store, so it holds at every gateway and outlives them. What is in flight goes on, and swaps
reach the instance as before: when it is resumed it serves what all serve.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Path

from server.errors import NotFound
from server.gateway.deps import GatewayDep
from server.gateway.fleet.drains import DrainRecord, drains
from server.gateway.fleet.instance import Instance
from server.gateway.fleet.signals import FIELDS
from server.gateway.gateway import Gateway
from weightsync.records import InstanceRecord, Keys

router = APIRouter(prefix="/admin", tags=["admin"])

InstanceId = Annotated[str, Path(min_length=1, max_length=200)]


@router.get("/instances")
async def instances(gateway: GatewayDep) -> dict[str, Any]:
    """Every instance: its record, and what this gateway sees of it."""
    rows = [{**asdict(i.record), **_seen(gateway, i)} for i in gateway.fleet.instances.values()]
    for row in rows:
        del row["key"]
    return {"model": gateway.config.model, "instances": rows}


@router.post("/instances/{instance_id}/drain")
async def drain(gateway: GatewayDep, instance_id: InstanceId) -> dict[str, Any]:
    """No gateway sends it new requests, until it is resumed or started anew; what it has goes on."""
    keys = Keys(gateway.config.model)
    record = await _record(gateway, instance_id)
    await _forget_gone(gateway)
    order = DrainRecord(record.id, record.address, record.pid, since=time.time())
    await gateway.store.put(drains(keys) + instance_id, order.to_json())
    return {"id": instance_id, "draining": True}


@router.post("/instances/{instance_id}/resume")
async def resume(gateway: GatewayDep, instance_id: InstanceId) -> dict[str, Any]:
    """It gets requests again. One that stops drains for itself, and cannot be called back."""
    record = await _record(gateway, instance_id)
    await gateway.store.delete(drains(Keys(gateway.config.model)) + instance_id)
    return {"id": instance_id, "draining": record.state == "DRAINING"}


async def _record(gateway: Gateway, instance_id: str) -> InstanceRecord:
    found = await gateway.store.get(Keys(gateway.config.model).instance(instance_id))
    if found is None:
        known = ", ".join(sorted(gateway.fleet.instances)) or "none"
        raise NotFound(f"No instance {instance_id!r} is registered (there are: {known}).", code="unknown_instance")
    return InstanceRecord.from_json(found.value)


async def _forget_gone(gateway: Gateway) -> None:
    """Drains of processes that have ended are of no more use to anybody."""
    keys = Keys(gateway.config.model)
    there = {kv.key.removeprefix(keys.instances) for kv in (await gateway.store.list(keys.instances))[0]}
    for kv in (await gateway.store.list(drains(keys)))[0]:
        if kv.key.removeprefix(drains(keys)) not in there:
            await gateway.store.delete(kv.key)


def _seen(gateway: Gateway, i: Instance) -> dict[str, Any]:
    now = time.monotonic()
    return {
        "eligible": i in gateway.fleet.serving,
        "draining": gateway.fleet.is_draining(i),
        "in_flight": i.inflight,
        "load": round(i.load, 1),
        "circuit": i.health.state(now),
        "ejected_for_s": round(max(0.0, i.health.until - now), 1) if not i.health.closed else None,
        "ejections": i.health.ejections,
        "answering": i.health.answering,
        "signals": {name: getattr(i.signals, name) for name in FIELDS} if i.signals is not None else None,
    }
