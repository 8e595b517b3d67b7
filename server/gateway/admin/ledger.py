"""`GET /admin/ledger`: who did what to weights and keys, and why.

The chain itself is weightsync/control/chain.py. `hotswap ledger` exports and verifies it from the store, without a
gateway: what checks the record of what was done is not whoever did it.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Query

from server.gateway.deps import GatewayDep
from weightsync.control import chain

router = APIRouter(prefix="/admin", tags=["admin"])

Limit = Annotated[int, Query(ge=1, le=1000, description="entries at most")]
Before = Annotated[int | None, Query(ge=1, le=2**53, description="only those with a lower number")]


@router.get("/ledger")
async def entries(gateway: GatewayDep, limit: Limit = 100, before: Before = None) -> dict[str, Any]:
    """The last entries of the ledger that are in the store, newest first: who did what to weights and keys, and why."""
    return {"entries": [asdict(entry) for entry in await chain.recent(gateway.store, limit, before)]}
