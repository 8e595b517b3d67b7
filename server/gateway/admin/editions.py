"""`/admin/editions`: adapters that are served by the edition, without swaps (weightsync/control/editions.py).

They are published, listed, given another share of the requests, and withdrawn. A trainer publishes them by itself with
`Publisher.publish_edition`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path
from pydantic import BaseModel, ConfigDict, Field

from server.errors import HttpError
from server.gateway.access.approvals import Guarded
from server.gateway.access.records import By
from server.gateway.admin.deps import ByDep, ModelDep
from server.gateway.models.model import Model
from server.gateway.models.publishing import Edition
from weightsync.control.chain import LedgerEntry, append
from weightsync.control.editions import EditionRecord, key_of, prefix_of, readable
from weightsync.control.records import Keys
from weightsync.errors import Conflict

router = APIRouter(prefix="/admin/editions", tags=["admin"])
Number = Annotated[int, Path(ge=1, lt=2**63, description="of the edition NAME@NUMBER")]


class Share(BaseModel):
    """The share of the requests for the name alone that no newer edition gets."""

    model_config = ConfigDict(extra="forbid", strict=True)
    percent: Annotated[float, Field(gt=0, le=100)]


@router.get("")
async def editions(model: ModelDep) -> dict[str, Any]:
    """Those of all adapters, the oldest first."""
    found = await _found(model)
    return {"model": model.name, "editions": [_shown(record) for record, _ in found.values()]}


@router.post("")
async def publish(model: ModelDep, by: ByDep, body: Edition) -> dict[str, Any]:
    """Publishes an edition, which serves requests from then on; nothing is swapped."""
    await _require_free(model, "activate")
    return _shown(EditionRecord(**await model.pusher.push_edition(body, by)))


@router.put("/{number}")
async def share(model: ModelDep, by: ByDep, number: Number, body: Share) -> dict[str, Any]:
    """Gives an edition another share: 100 ends its trial."""
    await _require_free(model, "split")
    return await _write(model, by, number, "split", lambda record: replace(record, percent=body.percent))


@router.delete("/{number}")
async def withdraw(model: ModelDep, by: ByDep, number: Number) -> dict[str, Any]:
    """Takes an edition away. Requests that run through it are finished, and the name alone leads to the one before."""
    await _require_free(model, "rollback")
    return await _write(model, by, number, "withdraw", lambda _: None)


async def _require_free(model: Model, action: Guarded) -> None:
    """Raises HttpError (409) where the policy asks for the approval of what such an action does with versions."""
    if action in (await model.approvals.policy()).approvals:
        message = (
            f"The policy asks for approval of {action}, and editions serve at once. Publish the adapter as a part of a "
            "version (part lora/NAME), which waits for it."
        )
        raise HttpError(409, message, code="approval_required")


async def _found(model: Model) -> dict[int, tuple[EditionRecord, int]]:
    """By number, each with the revision of its record."""
    listed = (await model.store.list(prefix_of(Keys(model.name))))[0]
    revisions = {kv.key: kv.mod_revision for kv in listed}
    records = readable({kv.key: kv.value for kv in listed})
    return {r.number: (r, revisions[key_of(Keys(model.name), r.name, r.number)]) for r in records}


async def _write(
    model: Model,
    by: By,
    number: int,
    action: Literal["split", "withdraw"],
    change: Callable[[EditionRecord], EditionRecord | None],
) -> dict[str, Any]:
    """Raises HttpError (404)."""
    while True:
        record, revision = (await _found(model)).get(number, (None, 0))
        if record is None:
            message = f"There is no edition {number}; GET /admin/editions lists those that there are."
            raise HttpError(404, message, code="unknown_edition", param="number")
        new = change(record)
        key, subject = key_of(Keys(model.name), record.name, number), record.full_name
        entry = LedgerEntry(action, by.who, model=model.name, version=number, subject=subject, reason=by.reason)
        try:
            await append(model.store, {key: revision}, {key: new.to_json() if new is not None else None}, entry)
        except Conflict:
            continue  # another change came first
        return _shown(new or record)


def _shown(record: EditionRecord) -> dict[str, Any]:
    hidden = ("slot", "signature")
    return {"id": record.full_name, **{name: value for name, value in asdict(record).items() if name not in hidden}}
