"""`/admin/pause`: generation stops on every instance for as long as somebody keeps saying so.

A pause is a record under a lease that only the one who paused renews. Nobody else keeps it alive, the gateway least of
all: if who paused dies, or the gateway, or the store, generation goes on when the time to live is over.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Path
from pydantic import BaseModel, ConfigDict, Field

from server.errors import NotFound
from server.gateway.deps import GatewayDep
from weightsync.errors import LeaseLost
from weightsync.records import Keys, PauseRecord
from weightsync.store import Store
from weightsync.store.protocol import KeyValue

router = APIRouter(prefix="/admin", tags=["admin"])

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
        """Its time to live begins anew. Raises NotFound when it is over."""
        found = await self._find(pause_id)
        try:
            await self._store.keep_alive(found.lease or 0)
        except LeaseLost:
            raise _over(pause_id) from None
        return PauseRecord.from_json(found.value)

    async def end(self, pause_id: str) -> None:
        """Generation goes on, as far as this pause is concerned. Raises NotFound when it is over already."""
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
                except NotFound:
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


def _over(pause_id: str) -> NotFound:
    return NotFound(f"The pause {pause_id} is over, and generation goes on; pause again.", code="unknown_pause")


class Pause(BaseModel):
    """Who pauses, and for how long at most without a renewal."""

    model_config = ConfigDict(extra="forbid", strict=True)
    ttl_s: float = Field(default=DEFAULT_TTL_S, ge=1, le=MAX_TTL_S)
    requested_by: str = Field(default="admin", min_length=1, max_length=128)


PauseId = Annotated[str, Path(pattern="^[0-9a-f]{32}$")]


@router.post("/pause")
async def pause(gateway: GatewayDep, body: Pause | None = None) -> dict[str, Any]:
    """Pauses generation; requests in flight stay, and go on when it is over."""
    body = body or Pause()
    record = await PauseLeases(gateway.store, gateway.config.model).take(body.requested_by, body.ttl_s)
    return {"id": record.id, "ttl_s": record.ttl_s}


@router.get("/pause")
async def pauses(gateway: GatewayDep) -> dict[str, Any]:
    """The pauses that hold now; generation goes on when the last one is over."""
    found = await PauseLeases(gateway.store, gateway.config.model).holding()
    return {"paused": bool(found), "pauses": [asdict(record) for record in found]}


@router.post("/pause/{pause_id}/renew")
async def renew(gateway: GatewayDep, pause_id: PauseId) -> dict[str, Any]:
    """The pause holds for its `ttl_s` again, from now on."""
    record = await PauseLeases(gateway.store, gateway.config.model).renew(pause_id)
    return {"id": record.id, "ttl_s": record.ttl_s}


@router.delete("/pause/{pause_id}")
async def resume(gateway: GatewayDep, pause_id: PauseId) -> dict[str, Any]:
    """Ends the pause; `paused` says whether another one holds."""
    leases = PauseLeases(gateway.store, gateway.config.model)
    await leases.end(pause_id)
    return {"id": pause_id, "paused": bool(await leases.holding())}
