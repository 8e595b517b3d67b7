"""Weights and swaps on the admin port: what `hotswap weights` and operators use, and uploads of a `RemotePublisher`.

The key is checked in `AdminGate`, before a body is read.

The body of `POST /admin/weights/upload`, a version as a delta or in full (weightsync/publish/delta.py), goes to an
unnamed file in the arena, which the kernel frees with the last process that has it open: a connection lost half-way,
or a gateway killed half-way, leaves nothing. A publication begins only when the body has arrived whole, in a process
of its own (publishing.py); it is checked there, not here.
"""

from __future__ import annotations

import errno
import os
import tempfile
from dataclasses import asdict
from typing import Annotated, Any, BinaryIO, Literal

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import ClientDisconnect

from server.errors import HttpError
from server.gateway.access.approvals import Guarded, PendingRecord
from server.gateway.access.records import By
from server.gateway.admin.deps import ByDep, ModelDep
from server.gateway.models.model import Model
from server.gateway.models.publishing import Prepared, Publication, Published
from weightsync.control import history, placement
from weightsync.control.arenas import ensure_arena
from weightsync.control.board import readable_versions
from weightsync.control.outcome import SwapReport
from weightsync.control.parts import BASE, check_name
from weightsync.control.records import (
    ActiveRecord,
    FormRecord,
    Keys,
    OnLost,
    PastSwapRecord,
    SplitRecord,
    SwapMode,
    SwapRecord,
    TargetRecord,
    VersionRecord,
)
from weightsync.control.state import in_flight
from weightsync.control.swap import new_target, previous_version
from weightsync.control.swap import request as request_swap
from weightsync.errors import SwapError
from weightsync.format.manifest import Schema

router = APIRouter(prefix="/admin", tags=["admin"])

SLACK = 64 << 20  # over the bytes of the tensors: the header, and a few bytes a block
FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

UploadId = Annotated[str, Query(pattern="^[A-Za-z0-9_-]{8,64}$", description="the same id again, the same version")]
Deadline = Annotated[float | None, Query(gt=0, le=3600, description="seconds to stage everywhere")]
Drain = Annotated[float | None, Query(ge=0, le=3600, description="for streams to end; rolling 30, else 0")]
WithConfig = Annotated[bool, Query(description="it brings a config.json: it may have other tensors, and more of them")]
Part = Annotated[str, Query(max_length=200, description='"draft" or "lora/NAME", if it brings no base model')]
Onto = Annotated[int | None, Query(ge=1, lt=2**63, description="the version it carries on; default: the active one")]
Of = Annotated[int, Query(ge=1, lt=2**63, description="a version that this host holds")]
Lost = Annotated[OnLost, Query(description="when an instance dies before the commit")]
Version = Annotated[int, Field(ge=1, lt=2**63)]
WAITS: dict[int | str, dict[str, Any]] = {202: {"description": "It waits for the approval of a second identity."}}


class SwapOptions(BaseModel):
    """The way in which the fleet takes a version: all at once, or one instance after the other behind a probed
    canary."""

    model_config = ConfigDict(extra="forbid", strict=True)
    mode: SwapMode = "together"
    drain_s: Annotated[float | None, Field(ge=0, le=3600, description="for streams to end; rolling 30, else 0")] = None
    deadline_s: Annotated[float | None, Field(gt=0, le=3600, description="to stage everywhere")] = None
    on_lost: Annotated[OnLost, Field(description="when an instance dies before the commit")] = "abort"


class Push(SwapOptions, Publication):
    """A Hugging Face checkpoint directory on the gateway's host: the base model, or the `part` ("draft", "lora/NAME").

    `parts` adds more directories to the same version, by part. `without` are parts of the version before that it takes
    away; with them alone it needs no `path`.
    """

    activate: bool = True


class Activate(SwapOptions):
    """A published version to swap in."""

    version: Version


class Rollback(SwapOptions):
    """The version to go back to: any version that is still ready; by default the one before the active one."""

    version: Version | None = None


class Share(BaseModel):
    """A version, and what it gets of the requests."""

    model_config = ConfigDict(extra="forbid", strict=True)
    version: Version
    percent: Annotated[float, Field(ge=0, le=100)]
    shadow: Annotated[
        float, Field(ge=0, le=100, description="percent of other versions' requests that are repeated on it, unseen")
    ] = 0.0


class Split(SwapOptions):
    """Versions that share the traffic. The one that is active stays so, if it is among them; else the one with most
    becomes it."""

    shares: Annotated[list[Share], Field(min_length=2, max_length=16, description="percentages that make 100 together")]
    sticky: Annotated[
        str, Field(max_length=80, description="requests equal in it go to one version: key, session or header:NAME")
    ] = ""
    minimum: Annotated[int, Field(ge=1, le=1024, description="instances of each version, at least")] = 1


@router.get("/weights")
async def list_versions(model: ModelDep) -> dict[str, Any]:
    """Every version the store knows, newest last, and the active one."""
    keys = Keys(model.name)
    items, _ = await model.store.list(keys.versions)
    versions = [asdict(record) for record in readable_versions(items)]
    active = await active_record(model)
    return {
        "model": model.name,
        "active": asdict(active) if active is not None else None,
        "versions": versions,
    }


@router.post("/weights", responses=WAITS)
async def push(model: ModelDep, by: ByDep, body: Push, response: Response) -> dict[str, Any]:
    """Publishes a checkpoint, or a version without some parts; with `activate`, swaps it in and reports the swap."""
    if not body.path and not body.without and not body.parts:
        raise HttpError(
            400, "Name a checkpoint in `path`, or parts in `without`.", code="invalid_parameter", param="path"
        )

    async def then(version: Published) -> dict[str, Any]:
        swap = await swap_in(model, version, body, by) if body.activate else None
        answer = {"version": int(version), "kept": version.kept}
        if swap is not None and "pending" in swap:
            return {**answer, "swap": None, **swap}
        return {**answer, "swap": swap}

    return _accepted(await model.pusher.push(body, then, by), response)


@router.post("/weights/activate", responses=WAITS)
async def activate(model: ModelDep, by: ByDep, body: Activate, response: Response) -> dict[str, Any]:
    """Swaps a published version in; answers when every instance has it, or says why none does."""
    return _accepted(await swap_in(model, body.version, body, by), response)


@router.post("/weights/rollback", responses=WAITS)
async def rollback(model: ModelDep, by: ByDep, response: Response, body: Rollback | None = None) -> dict[str, Any]:
    """Goes back to the version before the active one, or to the one that is named."""
    body = body or Rollback()
    keys, version = Keys(model.name), body.version
    if version is None:
        version = await previous_version(model.store, keys)
    now = await active_record(model)
    back = now is not None and version == now.previous
    if now is not None and back:  # a version that was withdrawn needs the approval of a new one
        back = await history.goes_back(model.store, keys, now.version, version)
    return _accepted(await swap_in(model, version, body, by, "rollback" if back else "activate"), response)


@router.post("/weights/split", responses=WAITS)
async def split(model: ModelDep, by: ByDep, body: Split, response: Response) -> dict[str, Any]:
    """Divides requests between versions; answers when every instance runs its own, or says why none does."""
    percents = {share.version: share.percent for share in body.shares}
    if len(percents) < len(body.shares):
        raise SwapError("a version is named twice; give it one share", code="bad_split")
    now = await active_record(model)
    active = now.version if now is not None else None
    shadow = {share.version: share.shadow for share in body.shares if share.shadow}
    version, wanted = placement.split_of(percents, active, sticky=body.sticky, minimum=body.minimum, shadow=shadow)
    return _accepted(await swap_in(model, version, body, by, "split", wanted), response)


@router.delete("/weights/split", responses=WAITS)
async def end_split(model: ModelDep, by: ByDep, response: Response) -> dict[str, Any]:
    """All requests go to the active version again; answers when every instance runs it."""
    now = await active_record(model)
    if now is None or now.split is None:
        raise HttpError(409, "No versions share the traffic.", code="no_split")
    return _accepted(await swap_in(model, now.version, SwapOptions(), by, "split"), response)


@router.get("/swap")
async def swap(model: ModelDep) -> dict[str, Any]:
    """The swap in flight, or the last one; null before the first."""
    record = await _last_swap(model)
    return {"model": model.name, "swap": _described(record) if record is not None else None}


@router.get("/swaps")
async def past_swaps(model: ModelDep) -> dict[str, Any]:
    """The last swaps that have ended, newest first: what each cost, whether it was verified, and why it was aborted."""
    ended = await history.past_swaps(model.store, Keys(model.name))
    return {"model": model.name, "swaps": [_told(swap) for swap in ended]}


@router.get("/weights/active")
async def active(model: ModelDep) -> dict[str, Any]:
    """The commit record; `version` is null and `epoch` 0 before the first commit."""
    record = await active_record(model)
    nothing = {"version": None, "epoch": 0, "previous": None}
    return {"model": model.name, **(asdict(record) if record is not None else nothing)}


@router.get("/weights/diff")
async def diff(model: ModelDep, a: Of, b: Of) -> dict[str, Any]:
    """The tensors in which two versions differ, the largest change first, and how many are compared."""
    found = await model.pusher.diff(a, b)
    differing = [tensor for tensor in found["tensors"] if tensor["state"] != "same"]
    return {"model": model.name, **found, "compared": len(found["tensors"]), "tensors": differing}


@router.get("/weights/schema")
async def schema(model: ModelDep, part: Part = "") -> dict[str, Any]:
    """The tensors that the next version of the base or draft model must have; null if it may have any."""
    keys = Keys(model.name)
    if check_name(part) == BASE:
        found = await model_schema(model)
    else:
        kept = await model.store.get(keys.part_schema(part))
        found = Schema.from_json(kept.value) if kept is not None else None
    rows = found and [[name, spec.dtype, spec.shape] for name, spec in found.tensors.items()]
    return {"model": model.name, "tensors": rows}


@router.post("/weights/upload")
async def upload(
    model: ModelDep,
    by: ByDep,
    request: Request,
    upload_id: UploadId,
    activate: bool = False,
    mode: Literal["together", "rolling"] = "together",
    drain_s: Drain = None,
    deadline_s: Deadline = None,
    on_lost: Lost = "abort",
    with_config: WithConfig = False,
    part: Part = "",
    onto: Onto = None,
) -> dict[str, Any]:
    """Publishes what the body holds; with `activate`, asks for its swap and does not wait for it."""
    if request.headers.get("content-type") != "application/octet-stream":
        raise HttpError(400, "Send the version as application/octet-stream.", code="bad_content_type")

    async def then(answer: dict[str, Any]) -> dict[str, Any]:
        if activate:
            within_s = deadline_s or model.config.swap_deadline_s
            wish = new_target(int(answer["version"]), by.who, within_s, mode=mode, drain_s=drain_s, on_lost=on_lost)
            return {**answer, **await _ask_for(model, wish, by)}
        return answer

    others = with_config or bool(part)
    return await model.pusher.push_delta(await _received(model, request, upload_id, others, onto, by), then)


async def _received(model: Model, request: Request, upload_id: str, others: bool, onto: int | None, by: By) -> Prepared:
    """The whole body, in an unnamed file, and the process that is to publish it. `others`: it has other tensors than
    the base model that is served. Raises HttpError."""
    arena = await ensure_arena(model.store)
    most = await _most(model, arena.free_nbytes(), others)
    if int(request.headers.get("content-length", 0)) > most:
        raise _too_large(most)
    file = tempfile.TemporaryFile(dir=arena.directory, buffering=0)  # noqa: SIM115 - `Prepared` closes it
    prepared = await model.pusher.prepare(file, upload_id, by, onto)
    try:
        await _copy(request, file, most)
    except BaseException as error:
        await prepared.discard()
        if isinstance(error, ClientDisconnect):
            raise HttpError(400, "The connection was lost half-way; nothing was kept.", code="upload_cut_off") from None
        raise
    return prepared


async def _copy(request: Request, file: BinaryIO, most: int) -> None:
    done = 0
    async for chunk in request.stream():
        done += len(chunk)
        if done > most:
            raise _too_large(most)
        try:
            _write_all(file.fileno(), chunk)
        except OSError as error:
            if error.errno not in FULL_DISK:
                raise
            raise HttpError(
                507,
                f"The arena has no room for the upload ({done:,} bytes so far): retire versions nobody needs, or "
                "enlarge it (--shm-size, or a larger emptyDir).",
                code="arena_full",
            ) from error


def _too_large(most: int) -> HttpError:
    return HttpError(413, f"The upload has over {most:,} bytes, more than a version of this model takes.")


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


async def _most(model: Model, free: int, others: bool) -> int:
    """Bytes an upload may have: what a version of the model takes in full; what there is room for before the first one
    and for one with other tensors."""
    schema = None if others else await model_schema(model)
    if schema is None:
        return free
    return sum(spec.nbytes for spec in schema.tensors.values()) * 17 // 16 + SLACK


async def _ask_for(model: Model, wish: TargetRecord, by: By) -> dict[str, Any]:
    """Write the target, unless the version is active already: it may have been sent a second time."""
    active = await active_record(model)
    if active is not None and active.version == wish.version:
        return {}
    if (pending := await model.approvals.hold("activate", by, wish)) is not None:
        return waits(pending)
    await request_swap(model.store, Keys(model.name), wish, reason=by.reason)
    return {}


async def active_record(model: Model) -> ActiveRecord | None:
    """The commit record; None before the first commit."""
    found = await model.store.get(Keys(model.name).active)
    return ActiveRecord.from_json(found.value) if found is not None else None


async def model_schema(model: Model) -> Schema | None:
    """The tensors of the active version; None before the first version."""
    keys, active = Keys(model.name), await active_record(model)
    found = await model.store.get(keys.version(active.version)) if active is not None else None
    form = VersionRecord.from_json(found.value).form if found is not None else ""
    if form and (kept := await model.store.get(keys.form(form))) is not None:
        return Schema.from_json(FormRecord.from_json(kept.value).tensors.encode())
    first = await model.store.get(keys.schema)
    return Schema.from_json(first.value) if first is not None else None


async def swap_in(
    model: Model,
    version: int,
    options: SwapOptions,
    by: By,
    guarded: Guarded = "activate",
    split: SplitRecord | None = None,
) -> dict[str, Any]:
    """Swaps `version` in, with a `split` or for all; the report when every instance has what it is to run. Where the
    policy asks for approval of what is `guarded`, the request waits, and the answer says so in `pending`.

    Raises SwapError.
    """
    target = new_target(
        version,
        by.who,
        options.deadline_s or model.config.swap_deadline_s,
        mode=options.mode,
        drain_s=options.drain_s,
        on_lost=options.on_lost,
        split=split,
    )
    if (pending := await model.approvals.hold(guarded, by, target)) is not None:
        return waits(pending)
    return await checked(model, await model.coordinator.ask(target, reason=by.reason, action=guarded))


def waits(pending: PendingRecord, response: Response | None = None) -> dict[str, Any]:
    """The answer to a request that waits for approval: 202."""
    if response is not None:
        response.status_code = 202
    told = {"id": pending.id, "action": pending.action, "until": pending.until}
    return {"pending": {**told, "version": pending.version}}


def _accepted(answer: dict[str, Any], response: Response) -> dict[str, Any]:
    """The answer, whose status says whether it waits for approval."""
    if "pending" in answer:
        response.status_code = 202
    return answer


async def _last_swap(model: Model) -> SwapRecord | None:
    """The swap in flight, or the last one."""
    found = await model.store.get(Keys(model.name).swap)
    return SwapRecord.from_json(found.value) if found is not None else None


def _described(swap: SwapRecord) -> dict[str, Any]:
    """The record as JSON, and what can be read out of it: `probe` is None while no canary was judged."""
    return {**asdict(swap), "in_flight": in_flight(swap), "probe": history.probe_outcome(swap)}


def _told(swap: PastSwapRecord) -> dict[str, Any]:
    """`prepare_ms` until the commit or the end, `commit_ms` until all confirmed, `stall_ms` and `step_loss` of the
    worst instance."""
    committed_at = swap.committed_at
    return {
        **asdict(swap),
        "prepare_ms": ((committed_at or swap.ended_at) - swap.opened_at) * 1e3,
        "commit_ms": (swap.ended_at - committed_at) * 1e3 if committed_at is not None else None,
        "stall_ms": max((f.stall_ms for f in swap.flips if f.stall_ms is not None), default=None),
        "step_loss": max((f.step_loss for f in swap.flips if f.step_loss is not None), default=None),
    }


async def checked(model: Model, report: SwapReport) -> dict[str, Any]:
    """The report of a swap that was done. Raises SwapError."""
    report.checked()
    swap = await _last_swap(model)
    if swap is None or swap.id != report.id:  # a later swap has taken its place already
        return asdict(report)
    return {**asdict(report), "mode": swap.mode, "canary": swap.canary, "probe": history.probe_outcome(swap)}
