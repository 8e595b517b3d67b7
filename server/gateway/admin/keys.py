"""`/admin/keys`: making, limiting, rotating and revoking keys. A key itself is only in the answer that made it."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from typing import Annotated, Any, get_type_hints

from fastapi import APIRouter, Path, Query, Response
from pydantic import BaseModel, ConfigDict, Field, create_model

from server.errors import HttpError
from server.gateway.access.key_sources import NewKey
from server.gateway.access.records import INFER, KeyRecord, Scope
from server.gateway.admin.deps import ByDep, GatewayDep
from server.gateway.gateway import Gateway
from server.key_limits import LIMITS, KeyLimits

router = APIRouter(prefix="/admin/keys", tags=["admin"])

MAX_LIFE_S = 10 * 365 * 86400
MAX_GRACE_S = 30 * 86400
Forget = Annotated[bool, Query(description="remove the record of a revoked one")]
KeyId = Annotated[str, Path(pattern="^[A-Za-z0-9_-]{1,64}$")]
Name = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f]+$")]
Scopes = Annotated[list[Scope], Field(min_length=1, max_length=2)]
Models = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=128)]],
    Field(max_length=64, description="models, aliases and adapters that it may ask for; none: all"),
]


_BOUNDS: Any = {
    field: (hint, Field(getattr(KeyLimits, field), ge=LIMITS[field].least, le=LIMITS[field].most))
    for field, hint in get_type_hints(KeyLimits).items()
}
_Declared: Any = create_model("_Declared", __config__=ConfigDict(extra="forbid", strict=True), **_BOUNDS)


class Limits(_Declared):  # type: ignore[misc]
    """The limits of the key; null: none."""

    def on(self, before: KeyLimits) -> KeyLimits:
        """`before`, changed in what was sent."""
        return replace(before, **self.model_dump(exclude_unset=True))


class Expiry(BaseModel):
    """When a key ends; in neither form: never."""

    model_config = ConfigDict(extra="forbid", strict=True)
    expires_at: Annotated[float | None, Field(ge=0, le=2**40, description="unix seconds")] = None
    expires_in_s: Annotated[float | None, Field(gt=0, le=MAX_LIFE_S)] = None

    def moment(self) -> float | None:
        """Unix seconds. Raises HttpError (400)."""
        if self.expires_in_s is None:
            return self.expires_at
        if self.expires_at is not None:
            raise HttpError(
                400, "Send one of expires_at and expires_in_s.", code="invalid_parameter", param="expires_at"
            )
        return time.time() + self.expires_in_s


class Create(Expiry):
    """A new key."""

    name: Name
    scopes: Scopes = [INFER]
    limits: Limits = Limits()
    collect: Annotated[bool, Field(description="keep the answers it gets, for training")] = False
    models: Models = []


class Update(Expiry):
    """The changes; fields that are left out stay. A null takes a limit, or the expiry, away."""

    name: Name | None = None
    scopes: Scopes | None = None
    disabled: bool | None = None
    limits: Limits = Limits()
    collect: bool | None = None
    models: Models | None = None

    def on(self, record: KeyRecord) -> KeyRecord:
        """The record as it is to be."""
        sent = self.model_fields_set
        changes: dict[str, Any] = {"limits": self.limits.on(record.limits)}
        changes |= {"expires_at": self.moment()} if sent & {"expires_at", "expires_in_s"} else {}
        changes |= {"name": self.name} if self.name is not None else {}
        changes |= {"scopes": _scopes(self.scopes)} if self.scopes is not None else {}
        changes |= {"disabled": self.disabled} if self.disabled is not None else {}
        changes |= {"collect": self.collect} if self.collect is not None else {}
        changes |= {"models": _models(self.models)} if self.models is not None else {}
        return replace(record, **changes)


class Rotate(BaseModel):
    """The time in which the former key works beside the new one."""

    model_config = ConfigDict(extra="forbid", strict=True)
    grace_s: Annotated[float, Field(ge=0, le=MAX_GRACE_S)] = 0.0


@router.get("")
async def list_keys(gateway: GatewayDep) -> dict[str, Any]:
    """Every key, oldest first, and whether inference asks for one."""
    asked = "open" if gateway.keys.open_inference else "keys"
    records = await gateway.key_store.every()
    return {"inference": asked, "keys": [_with_use(gateway, record) for record in records]}


@router.post("")
async def create_key(gateway: GatewayDep, by: ByDep, body: Create, response: Response) -> dict[str, Any]:
    """Makes a key, and shows it this once."""
    expires_at = body.moment()
    if expires_at is not None and expires_at <= time.time():
        raise HttpError(400, "expires_at is over already.", code="invalid_parameter", param="expires_at")
    new = NewKey(
        body.name, _scopes(body.scopes), expires_at, body.limits.on(KeyLimits()), body.collect, _models(body.models)
    )
    record, key = await gateway.key_store.create(new, by)
    return _shown_once(record, key, response)


@router.post("/inference/open")
async def open_inference(gateway: GatewayDep, by: ByDep) -> dict[str, Any]:
    """Opens inference to everybody, until a key is made. Refused while there is a key that was not revoked."""
    await gateway.key_store.open(by)
    return {"inference": "open"}


@router.get("/{key_id}")
async def show_key(gateway: GatewayDep, key_id: KeyId) -> dict[str, Any]:
    """One key's record."""
    return _with_use(gateway, await gateway.key_store.one(key_id))


@router.patch("/{key_id}")
async def update_key(gateway: GatewayDep, by: ByDep, key_id: KeyId, body: Update) -> dict[str, Any]:
    """Changes name, scopes, expiry, limits, whether it works for now, or whether its answers are kept."""
    return described(await gateway.key_store.change(key_id, body.on, by))


@router.delete("/{key_id}")
async def revoke_key(gateway: GatewayDep, by: ByDep, key_id: KeyId, forget: Forget = False) -> dict[str, Any]:
    """Ends a key for good. Its record stays until it is forgotten."""
    if forget:
        return described(await gateway.key_store.forget(key_id, by))

    def revoked(record: KeyRecord) -> KeyRecord:
        return replace(record, revoked_at=time.time())

    return described(await gateway.key_store.change(key_id, revoked, by, "key_revoke"))


@router.post("/{key_id}/rotate")
async def rotate_key(
    gateway: GatewayDep, by: ByDep, key_id: KeyId, response: Response, body: Rotate | None = None
) -> dict[str, Any]:
    """Gives a record a new key, shown this once; limits and prefix cache stay the same."""
    grace_s, made = (body or Rotate()).grace_s, ""

    def rotated(record: KeyRecord) -> KeyRecord:
        nonlocal made
        record, made = record.rotated(grace_s)
        return record

    return _shown_once(await gateway.key_store.change(key_id, rotated, by, "key_rotate"), made, response)


def described(record: KeyRecord) -> dict[str, Any]:
    """A record as it is shown: without digests."""
    now = time.time()
    shown = {k: v for k, v in asdict(record).items() if k not in ("digest", "old_digest", "old_until")}
    old_until = record.old_until if record.old_digest is not None and record.old_until > now else None
    return {**shown, "state": record.standing(now), "old_key_until": old_until}


def _with_use(gateway: Gateway, record: KeyRecord) -> dict[str, Any]:
    """The same, and what it has used of its budget."""
    budget = record.limits.tokens_per_month
    return described(record) | ({"spent": gateway.budgets.used(record.id, budget)} if budget is not None else {})


def _models(names: list[str]) -> tuple[str, ...]:
    return tuple(sorted(set(names)))


def _shown_once(record: KeyRecord, key: str, response: Response) -> dict[str, Any]:
    response.headers["cache-control"] = "no-store"
    return {**described(record), "key": key}


def _scopes(scopes: list[Scope]) -> tuple[Scope, ...]:
    return tuple(sorted(set(scopes)))
