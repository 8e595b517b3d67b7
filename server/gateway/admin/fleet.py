"""The fleet's control on the admin port: the instances, draining one, sending one to sleep, pausing them all.

Each order is a record in the store, so any gateway may give it, it holds at every one, and it outlives them.

- A drained instance gets no new request. Requests in flight go on, and swaps reach the instance as before: when it is
  resumed it serves what all serve.
- A sleeping instance gives its memory back and has it again when it wakes (server/orders.py); a trainer that shares
  the device with the fleet orders this between its phases. It is in no swap and gets no request; it wakes with dummy
  weights, or those it slept with, and serves nothing but the version active then. The order holds for an instance
  that is started anew.
- A pause stops generation on every instance for as long as the client that paused keeps saying so: the record of the
  pause is under a lease that this client alone renews. The gateway does not keep the lease alive: if the client dies,
  or the gateway, or the store, generation goes on when the time to live is over.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Path
from pydantic import BaseModel, ConfigDict, Field

from server.errors import HttpError
from server.gateway.admin.deps import ModelDep
from server.gateway.fleet.instance import FIELDS, Instance
from server.gateway.models.model import Model
from server.orders import DrainRecord, Level, SleeperRecord, SleepOrder, drains, orders, sleepers
from weightsync.control.records import InstanceRecord, Keys, PauseRecord
from weightsync.errors import LeaseLost
from weightsync.store import Store
from weightsync.store.protocol import KeyValue

router = APIRouter(prefix="/admin", tags=["admin"])

InstanceId = Annotated[str, Path(min_length=1, max_length=200)]


@router.get("/instances")
async def instances(model: ModelDep) -> dict[str, Any]:
    """Every instance: its record, and what this gateway sees of it."""
    rows = [{**asdict(i.record), **_seen(model, i)} for i in model.fleet.instances.values()]
    for row in rows:
        del row["key"]
    return {"model": model.name, "instances": rows}


@router.post("/instances/{instance_id}/drain")
async def drain(model: ModelDep, instance_id: InstanceId) -> dict[str, Any]:
    """No gateway sends it new requests, until it is resumed or started anew; what it has goes on."""
    keys = Keys(model.name)
    record = await _record(model, instance_id)
    await _forget_gone(model)
    order = DrainRecord(record.id, record.address, record.pid, since=time.time())
    await model.store.put(drains(keys) + instance_id, order.to_json())
    return {"id": instance_id, "draining": True}


@router.post("/instances/{instance_id}/resume")
async def resume(model: ModelDep, instance_id: InstanceId) -> dict[str, Any]:
    """It gets requests again. One that stops drains for itself, and cannot be called back."""
    record = await _record(model, instance_id)
    await model.store.delete(drains(Keys(model.name)) + instance_id)
    return {"id": instance_id, "draining": record.state == "DRAINING"}


async def _record(model: Model, instance_id: str) -> InstanceRecord:
    found = await model.store.get(Keys(model.name).instance(instance_id))
    if found is None:
        raise _unknown(model, instance_id)
    return InstanceRecord.from_json(found.value)


def _unknown(model: Model, instance_id: str) -> HttpError:
    known = ", ".join(sorted(model.fleet.instances)) or "none"
    return HttpError(404, f"No instance {instance_id!r} is registered (there are: {known}).", code="unknown_instance")


async def _forget_gone(model: Model) -> None:
    """Drains of processes that have ended are of no more use to anybody."""
    keys = Keys(model.name)
    there = {kv.key.removeprefix(keys.instances) for kv in (await model.store.list(keys.instances))[0]}
    for kv in (await model.store.list(drains(keys)))[0]:
        if kv.key.removeprefix(drains(keys)) not in there:
            await model.store.delete(kv.key)


def _seen(model: Model, i: Instance) -> dict[str, Any]:
    now = time.monotonic()
    return {
        "eligible": i in model.fleet.serving,
        "draining": model.fleet.is_draining(i),
        "in_flight": i.inflight,
        "load": round(i.load, 1),
        "circuit": i.health.state(now),
        "ejected_for_s": round(max(0.0, i.health.until - now), 1) if not i.health.closed else None,
        "ejections": i.health.ejections,
        "answering": i.health.answering,
        "signals": {name: getattr(i.signals, name) for name in FIELDS} if i.signals is not None else None,
    }


LOOK_S = 0.05
Wait = Annotated[float, Field(ge=0, le=600, description="seconds to wait for it, 0: answer at once")]


class Sleep(BaseModel):
    """How deep an instance sleeps: requests in flight get `drain_s` to end; after `ttl_s` it wakes unless the order was
    renewed by giving it again."""

    model_config = ConfigDict(extra="forbid", strict=True)
    level: Level = 2
    drain_s: float = Field(default=30.0, ge=0, le=3600)
    ttl_s: float | None = Field(default=None, ge=1, le=86400)
    requested_by: str = Field(default="admin", min_length=1, max_length=128)
    wait_s: Wait = 0.0


class Wake(BaseModel):
    """The time to wait until the instance serves."""

    model_config = ConfigDict(extra="forbid", strict=True)
    wait_s: Wait = 0.0


@router.get("/sleep")
async def sleeping(model: ModelDep) -> dict[str, Any]:
    """The instances that are ordered to sleep, and those that do. An order without a sleeper is being followed, or its
    process is gone."""
    keys = Keys(model.name)
    ordered = [asdict(SleepOrder.from_json(kv.value)) for kv in (await model.store.list(orders(keys)))[0]]
    asleep = [asdict(SleeperRecord.from_json(kv.value)) for kv in (await model.store.list(sleepers(keys)))[0]]
    return {"model": model.name, "orders": ordered, "asleep": asleep}


@router.post("/instances/{instance_id}/sleep")
async def sleep(model: ModelDep, instance_id: InstanceId, body: Sleep | None = None) -> dict[str, Any]:
    """Orders it to sleep, or renews the order; `state` is `asleep` as soon as its memory is free."""
    body = body or Sleep()
    await _check_known(model, instance_id)
    order = SleepOrder(instance_id, body.level, body.drain_s, body.requested_by, time.time(), body.ttl_s)
    lease = await model.store.grant_lease(body.ttl_s) if body.ttl_s is not None else None
    await model.store.put(orders(Keys(model.name)) + instance_id, order.to_json(), lease)
    found = await within(body.wait_s, lambda: _is_asleep(model, instance_id))
    return {"id": instance_id, "level": body.level, "state": "asleep" if found else "falling_asleep"}


@router.post("/instances/{instance_id}/wake")
async def wake(model: ModelDep, instance_id: InstanceId, body: Wake | None = None) -> dict[str, Any]:
    """Ends its sleep; `state` is `serving` as soon as it gets requests. One that is awake stays so."""
    body = body or Wake()
    await _check_known(model, instance_id)
    await model.store.delete(orders(Keys(model.name)) + instance_id)
    found = await within(body.wait_s, lambda: _serves(model, instance_id))
    return {"id": instance_id, "state": "serving" if found else "waking"}


async def _check_known(model: Model, instance_id: str) -> None:
    """Raises HttpError (404) for one that neither serves nor sleeps nor is ordered to."""
    keys = Keys(model.name)
    for key in (keys.instance(instance_id), sleepers(keys) + instance_id, orders(keys) + instance_id):
        if await model.store.get(key) is not None:
            return
    raise _unknown(model, instance_id)


async def _is_asleep(model: Model, instance_id: str) -> bool:
    return await model.store.get(sleepers(Keys(model.name)) + instance_id) is not None


async def _serves(model: Model, instance_id: str) -> bool:
    return any(instance.record.id == instance_id for instance in model.fleet.serving)


async def within(seconds: float, holds: Callable[[], Awaitable[bool]]) -> bool:
    """Whether the condition holds before the time is over."""
    deadline = time.monotonic() + seconds
    while not await holds():
        if time.monotonic() >= deadline:
            return False
        await asyncio.sleep(LOOK_S)
    return True


DEFAULT_TTL_S = 30.0
MAX_TTL_S = 600.0


class PauseLeases:
    """The pauses of one model, as the store has them. Every method raises StoreUnavailable."""

    def __init__(self, store: Store, model: str) -> None:
        self._store, self._keys = store, Keys(model)

    async def take(self, requested_by: str, ttl_s: float) -> PauseRecord:
        """Pause for `ttl_s` seconds, unless renewed or ended before."""
        record = PauseRecord(uuid.uuid4().hex, requested_by, ttl_s, since=time.time())
        lease = await self._store.grant_lease(ttl_s)
        try:
            await self._store.put(self._keys.pause(record.id), record.to_json(), lease)
        except BaseException:
            await self._store.revoke(lease)
            raise
        return record

    async def renew(self, pause_id: str) -> PauseRecord:
        """Its time to live begins anew. Raises HttpError (404) when it is over."""
        found = await self._find(pause_id)
        try:
            await self._store.keep_alive(found.lease or 0)
        except LeaseLost:
            raise _over(pause_id) from None
        return PauseRecord.from_json(found.value)

    async def end(self, pause_id: str) -> None:
        """Generation goes on, as far as this pause is concerned. Raises HttpError (404) when it is over already."""
        await self._end(await self._find(pause_id))

    async def end_all(self, requested_by: str) -> int:
        """Ends every pause of one name; how many there were."""
        mine = [kv for kv in await self._all() if PauseRecord.from_json(kv.value).requested_by == requested_by]
        for kv in mine:
            await self._end(kv)
        return len(mine)

    async def renew_all(self, requested_by: str) -> None:
        """Every pause of one name goes on, if it is not over."""
        for record in await self.holding():
            if record.requested_by == requested_by:
                try:
                    await self.renew(record.id)
                except HttpError:
                    continue

    async def holding(self) -> list[PauseRecord]:
        """Those that hold now, oldest first."""
        return sorted((PauseRecord.from_json(kv.value) for kv in await self._all()), key=lambda record: record.since)

    async def _all(self) -> list[KeyValue]:
        return (await self._store.list(self._keys.pauses))[0]

    async def _find(self, pause_id: str) -> KeyValue:
        found = await self._store.get(self._keys.pause(pause_id))
        if found is None:
            raise _over(pause_id)
        return found

    async def _end(self, kv: KeyValue) -> None:
        await self._store.delete(kv.key)
        if kv.lease is not None:
            await self._store.revoke(kv.lease)


def _over(pause_id: str) -> HttpError:
    return HttpError(404, f"The pause {pause_id} is over, and generation goes on; pause again.", code="unknown_pause")


class Pause(BaseModel):
    """The name of the pauser, and for how long it pauses at most without a renewal."""

    model_config = ConfigDict(extra="forbid", strict=True)
    ttl_s: float = Field(default=DEFAULT_TTL_S, ge=1, le=MAX_TTL_S)
    requested_by: str = Field(default="admin", min_length=1, max_length=128)


PauseId = Annotated[str, Path(pattern="^[0-9a-f]{32}$")]


@router.post("/pause")
async def pause(model: ModelDep, body: Pause | None = None) -> dict[str, Any]:
    """Pauses generation; requests in flight stay, and go on when it is over."""
    body = body or Pause()
    record = await PauseLeases(model.store, model.name).take(body.requested_by, body.ttl_s)
    return {"id": record.id, "ttl_s": record.ttl_s}


@router.get("/pause")
async def pauses(model: ModelDep) -> dict[str, Any]:
    """The pauses that hold now; generation goes on when the last one is over."""
    found = await PauseLeases(model.store, model.name).holding()
    return {"paused": bool(found), "pauses": [asdict(record) for record in found]}


@router.post("/pause/{pause_id}/renew")
async def renew(model: ModelDep, pause_id: PauseId) -> dict[str, Any]:
    """The pause holds for its `ttl_s` again, from now on."""
    record = await PauseLeases(model.store, model.name).renew(pause_id)
    return {"id": record.id, "ttl_s": record.ttl_s}


@router.delete("/pause/{pause_id}")
async def end_pause(model: ModelDep, pause_id: PauseId) -> dict[str, Any]:
    """Ends the pause; `paused` says whether another one holds."""
    leases = PauseLeases(model.store, model.name)
    await leases.end(pause_id)
    return {"id": pause_id, "paused": bool(await leases.holding())}
