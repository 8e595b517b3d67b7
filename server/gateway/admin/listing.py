"""`GET /v1/models` where there are several, or a key may not see all; `/admin/models`: what is behind each name."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterable
from typing import Any, Final

import orjson
from fastapi import APIRouter, Request

from server.errors import ConfigError, HttpError
from server.gateway.access.keys import Principal
from server.gateway.admin.deps import GatewayDep
from server.gateway.admin.feedback import principal_of
from server.gateway.fleet.scrape import fetch
from server.gateway.middleware import MODELS
from server.gateway.models.served import Served

router = APIRouter()

TIMEOUT_S: Final = 2.0
BEGAN: Final = int(time.time())


@router.get(MODELS, include_in_schema=False)
async def models(request: Request, gateway: GatewayDep) -> dict[str, Any]:
    """The names that the key may ask for: models, their adapters, aliases; as OpenAI lists models."""
    principal = principal_of(request, gateway)
    directory = gateway.directory
    told = await asyncio.gather(*(_of(served) for served in directory.models.values()))
    listed = {entry["id"]: entry for entries in told for entry in reversed(entries)}
    ordered = [entry for entries in told for entry in entries if listed[entry["id"]] is entry]
    ordered = [entry for entry in ordered if not directory.is_edition(entry["id"])]  # loaded at that instance
    ordered += [_entry(name, "hotswap", editions=numbers) for name, numbers in _editions(directory.models.values())]
    ordered += [_alias(name, targets, listed, principal) for name, targets in directory.aliases.items()]
    return {"object": "list", "data": [entry for entry in ordered if _may_see(principal, entry["id"])]}


@router.get("/admin/models", tags=["admin"])
async def show(gateway: GatewayDep) -> dict[str, Any]:
    """The models and aliases of this gateway; the first model answers requests that name none."""
    rows = []
    for served in gateway.directory.models.values():
        at = gateway.file.external.get(served.name)
        row: dict[str, Any] = {"name": served.name, "default": served is gateway.directory.default}
        row |= {"kind": "instances", "instances": len(served.fleet.instances), "serving": len(served.fleet.serving)}
        if served.fleet.active is not None:
            row["version"] = served.fleet.active.version
        if at is not None:
            row = {"name": served.name, "default": row["default"], "kind": "upstream", "url": at.entry.url}
            row |= {"model": at.model, "has_key": bool(at.key)}
        row["in_flight"] = served.stats.inflight
        rows.append(row)
    aliases = {name: list(targets) for name, targets in gateway.directory.aliases.items()}
    return {"models": rows, "aliases": aliases, "file": str(gateway.config.models or "")}


@router.post("/admin/models/reload", tags=["admin"])
async def reload(gateway: GatewayDep) -> dict[str, Any]:
    """Reads the file of models anew, as SIGHUP does. One that cannot be used changes nothing."""
    if gateway.config.models is None:
        raise HttpError(
            422, "This gateway was started without --models; there is no file to read.", code="no_models_file"
        )
    try:
        await gateway.reload()
    except ConfigError as error:
        raise HttpError(422, str(error), code="bad_models_file") from error
    if gateway.config.worker is not None:
        os.kill(gateway.config.worker.parent, signal.SIGHUP)  # which tells all workers
    return await show(gateway)


async def _of(served: Served) -> list[dict[str, Any]]:
    """The entries of one model: what an instance tells, or its name where none does."""
    if served.upstream is not None:
        return [_entry(served.name, "upstream", weights="external")]
    for instance in list(served.fleet.serving):
        try:
            status, body = await fetch(instance, MODELS.encode(), TIMEOUT_S)
            if status == 200:
                return list(orjson.loads(body)["data"])
        except (HttpError, TimeoutError, ValueError, KeyError):
            continue
    return [_entry(served.name, "hotswap")]


def _editions(models: Iterable[Served]) -> list[tuple[str, list[int]]]:
    """Adapters with editions, and the numbers of these, the newest first."""
    found: dict[str, list[int]] = {}
    for record in (record for served in models for record in served.fleet.editions.records):
        found.setdefault(record.name, []).append(record.number)
    return list(found.items())


def _entry(name: str, owner: str, **more: Any) -> dict[str, Any]:
    about = {"hotswap": more} if more else {}
    return {"id": name, "object": "model", "created": BEGAN, "owned_by": owner, **about}


def _alias(
    name: str, targets: Iterable[str], listed: dict[str, dict[str, Any]], principal: Principal
) -> dict[str, Any]:
    """The entry of an alias: the `max_model_len` that each of its models takes, and the `root` of the first one."""
    entry = _entry(name, "hotswap", alias_for=[to for to in targets if _may_see(principal, to)])
    told = [(to, listed.get(to, {})) for to in targets]
    lengths = [about["max_model_len"] for _, about in told if about.get("max_model_len") is not None]
    if lengths:
        entry["max_model_len"] = min(lengths)
    first, about = told[0]
    if "root" in about and _may_see(principal, first):
        entry["root"] = about["root"]
    return entry


def _may_see(principal: Principal, name: str) -> bool:
    return principal.models is None or name in principal.models
