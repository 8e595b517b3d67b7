"""`/admin/policy` and `/admin/approvals`: which requests need a second identity, and those that wait for one.

`GET /admin/ledger`: who did what to weights and keys, and why. The chain itself is weightsync/control/chain.py. The
command `hotswap ledger` exports and verifies it without a gateway: what checks the record is not what wrote it.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from server.errors import HttpError
from server.gateway.access.approvals import Guarded, PendingRecord, PolicyRecord, gone
from server.gateway.access.keys import lacking
from server.gateway.access.records import ADMIN, By
from server.gateway.admin.deps import ByDep, GatewayDep, ModelDep
from server.gateway.admin.releases import described as released
from server.gateway.admin.weights import WAITS, checked, waits
from weightsync.control import chain
from weightsync.errors import Conflict as StoreConflict

router = APIRouter(prefix="/admin", tags=["admin"])

Limit = Annotated[int, Query(ge=1, le=1000, description="entries at most")]
Before = Annotated[int | None, Query(ge=1, le=2**53, description="only those with a lower number")]
PendingId = Annotated[str, Path(pattern="^[0-9a-f]{12}$")]


class Policy(BaseModel):
    """The requests that need the approval of a second identity, and how long they wait for it."""

    model_config = ConfigDict(extra="forbid", strict=True)
    approvals: Annotated[list[Guarded], Field(max_length=8)] = []
    lapse_s: Annotated[float, Field(ge=10, le=30 * 86400)] = 3600.0

    def record(self) -> PolicyRecord:
        return PolicyRecord(tuple(sorted(set(self.approvals))), self.lapse_s)


@router.get("/policy")
async def policy(model: ModelDep) -> dict[str, Any]:
    """The policy in force."""
    return asdict(await model.approvals.policy())


@router.put("/policy", responses=WAITS)
async def put_policy(model: ModelDep, by: ByDep, body: Policy, response: Response) -> dict[str, Any]:
    """Sets the policy; if the one in force asks for approval of that, the new one waits for it."""
    new = body.record()
    if (pending := await model.approvals.hold("policy", by, policy=new)) is not None:
        return waits(pending, response)
    try:
        await model.approvals.put_policy(new, by)
    except StoreConflict:
        raise HttpError(409, "Somebody else is changing the policy; look at it again.", code="policy_busy") from None
    return asdict(new)


@router.get("/approvals")
async def waiting(model: ModelDep) -> dict[str, Any]:
    """The requests that wait for approval, oldest first."""
    return {"pending": [described(pending) for pending in await model.approvals.waiting()]}


@router.post("/approvals/{pending_id}")
async def approve(model: ModelDep, by: ByDep, pending_id: PendingId, request: Request) -> dict[str, Any]:
    """Approves a request of somebody else, and carries it out: the report of the swap, the release, or the policy."""
    pending, revision = await model.approvals.find(pending_id)
    if pending.policy is not None and ADMIN not in request.state.principal.scopes:
        raise lacking(ADMIN)
    consent = model.approvals.consent(pending, revision, by)
    try:
        if pending.policy is not None:
            await model.approvals.put_policy(pending.policy, By(pending.who, pending.reason), consent)
            return asdict(pending.policy)
        if pending.release is not None:
            wish = pending.release
            begun = await model.releases.start(wish.version, wish.text, By(pending.who, pending.reason), consent)
            return released(begun)
        assert pending.target is not None
        report = await model.coordinator.ask(
            pending.target, reason=pending.reason, action=pending.action, approval=consent
        )
    except StoreConflict as conflict:
        if conflict.key != consent.key and pending.policy is None:
            raise
        raise gone(pending_id) from None
    return await checked(model, report)


@router.delete("/approvals/{pending_id}")
async def refuse(model: ModelDep, by: ByDep, pending_id: PendingId) -> dict[str, Any]:
    """Refuses a request, or withdraws one's own."""
    return described(await model.approvals.refuse(pending_id, by))


def described(pending: PendingRecord) -> dict[str, Any]:
    """As it is shown: without the digest of who asked."""
    return {name: value for name, value in asdict(pending).items() if name != "digest"}


@router.get("/ledger")
async def entries(gateway: GatewayDep, limit: Limit = 100, before: Before = None) -> dict[str, Any]:
    """The last entries of the ledger that are in the store, newest first: who did what to weights and keys, and why."""
    return {"entries": [asdict(entry) for entry in await chain.recent(gateway.store, limit, before)]}
