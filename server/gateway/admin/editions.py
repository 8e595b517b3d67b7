"""`/admin/editions`: adapters that are served by the edition, without swaps (weightsync/control/editions.py).

They are published, listed, given another share of the requests, and withdrawn. A trainer publishes them by itself with
`Publisher.publish_edition`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter, Path
from pydantic import BaseModel, ConfigDict, Field

from server.errors import HttpError
from server.gateway.access.approvals import Guarded
from server.gateway.access.records import By
from server.gateway.admin.deps import ByDep, ModelDep
from server.gateway.admin.fleet import within
from server.gateway.fleet.instance import Instance
from server.gateway.fleet.scrape import fetch
from server.gateway.models.model import Model
from server.gateway.models.publishing import Edition
from weightsync.control.chain import LedgerEntry, append
from weightsync.control.editions import EditionRecord, key_of, outdated, prefix_of, readable
from weightsync.control.records import Keys
from weightsync.errors import Conflict

log = logging.getLogger("hotswap.gateway")
LOAD_S = 60.0  # for an instance to have an edition loaded
SEEN_S = 2.0
MOST_REASON = 200  # characters of a refusal in the ledger
router = APIRouter(prefix="/admin/editions", tags=["admin"])
Number = Annotated[int, Path(ge=1, lt=2**63, description="of the edition NAME@NUMBER")]


class Share(BaseModel):
    """The share of the requests for the name alone that no newer edition gets."""

    model_config = ConfigDict(extra="forbid", strict=True)
    percent: Annotated[float, Field(ge=0, le=100)]


@router.get("")
async def editions(model: ModelDep) -> dict[str, Any]:
    """Those of all adapters, the oldest first."""
    found = await _found(model)
    return {"model": model.name, "editions": [_shown(record) for record, _ in found.values()]}


@router.post("")
async def publish(model: ModelDep, by: ByDep, body: Edition) -> dict[str, Any]:
    """Publishes an edition, which serves requests once every instance has loaded it; nothing is swapped."""
    return _shown(await published(model, body, by))


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


async def published(model: Model, wanted: Edition, by: By) -> EditionRecord:
    """An edition that every instance has loaded that answers. It is on trial until then, and withdrawn if an instance
    refuses it. Raises HttpError, PublishError."""
    await _require_free(model, "activate")
    trial = EditionRecord(**await model.pusher.push_edition(wanted.model_copy(update={"percent": 0.0}), by))
    refusals = await asyncio.gather(*(_refusal(instance, trial.full_name) for instance in list(model.fleet.serving)))
    for refusal in filter(None, refusals):
        by = replace(by, reason=refusal["message"][:MOST_REASON])
        await _write(model, by, trial.number, "withdraw", lambda _: None)
        raise HttpError(422, f"The edition is withdrawn. {refusal['message']}", code=refusal["code"])
    if wanted.percent:
        await _write(model, by, trial.number, "split", lambda record: replace(record, percent=wanted.percent), wanted)
    return replace(trial, percent=wanted.percent)


async def _seen(model: Model, key: str, wanted: EditionRecord | None) -> None:
    """Returns when this gateway routes by the record, so that the next request meets it."""

    async def seen() -> bool:
        return model.fleet.editions.get(key) == wanted

    await within(SEEN_S, seen)


async def _refusal(instance: Instance, name: str) -> dict[str, str] | None:
    """The error of an instance that cannot load the edition. One that does not answer loads it when it is needed."""
    try:
        status, body = await fetch(instance, b"/hotswap/config", LOAD_S, b"x-hotswap-edition: %b\r\n" % name.encode())
        error: dict[str, str] = orjson.loads(body)["error"] if status == 422 else {}
    except (HttpError, TimeoutError, ValueError, KeyError) as problem:
        log.warning("%s has not loaded %s yet: %s", instance.id, name, problem)
        return None
    return error or None


async def withdrawn(model: Model, name: str, by: By) -> bool:
    """Take every edition of an adapter away; whether there were any."""
    await _require_free(model, "rollback")
    numbers = [number for number, (record, _) in (await _found(model)).items() if record.name == name]
    for number in numbers:
        await _write(model, by, number, "withdraw", lambda _: None)
    return bool(numbers)


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
    retention: Edition | None = None,
) -> dict[str, Any]:
    """Raises HttpError (404)."""
    while True:
        known = await _found(model)
        record, revision = known.get(number, (None, 0))
        if record is None:
            message = f"There is no edition {number}; GET /admin/editions lists those that there are."
            raise HttpError(404, message, code="unknown_edition", param="number")
        new = change(record)
        key, subject = key_of(Keys(model.name), record.name, number), record.full_name
        puts = {key: new.to_json() if new is not None else None}
        if new is not None and retention is not None:
            others = [other for other, _ in known.values()]
            gone = outdated(others, new, retention.keep, retention.max_age_s)
            puts |= {key_of(Keys(model.name), old.name, old.number): None for old in gone}
        entry = LedgerEntry(action, by.who, model=model.name, version=number, subject=subject, reason=by.reason)
        try:
            await append(model.store, {key: revision}, puts, entry)
        except Conflict:
            continue  # another change came first
        await _seen(model, key, new)
        return _shown(new or record)


def _shown(record: EditionRecord) -> dict[str, Any]:
    hidden = ("slot", "signature")
    return {"id": record.full_name, **{name: value for name, value in asdict(record).items() if name not in hidden}}
