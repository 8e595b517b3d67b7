"""The routes that the openai SDK asks for: files, fine-tuning jobs, and the models that come of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, FastAPI, Query, Request
from fastapi.responses import FileResponse, Response
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from trainer.api.app import body_of, content_of, door_of
from trainer.api.errors import ApiError
from trainer.api.finetuning import files, jobs
from trainer.api.finetuning.files import FILE, UPLOADED
from trainer.api.finetuning.jobs import CHECKPOINT, EVENT, JOB, CreateJob, Jobs
from trainer.api.finetuning.models import Models
from trainer.api.journal import Record
from trainer.api.sampling import Client

router = APIRouter(prefix="/v1")
BATCH = 200  # records that are looked through at a time
OVERHEAD = 1 << 16  # bytes of an upload beside the file: boundaries and other fields
Limit = Annotated[int, Query(ge=1, le=10_000)]


@dataclass(frozen=True)
class Desk:
    """The objects that the routes share."""

    jobs: Jobs
    models: Models


def add(app: FastAPI, desk: Desk) -> None:
    """Serve the routes, too."""
    app.state.desk = desk
    app.include_router(router)


async def _asked(request: Request) -> tuple[Desk, Client]:
    """Raises ApiError (401, 503)."""
    desk: Desk = request.app.state.desk
    return desk, await door_of(request).client(request)


@router.post("/files")
async def create_file(request: Request) -> dict[str, Any]:
    desk, client = await _asked(request)
    name, purpose, upload = await _upload(request)
    try:
        made = await asyncio.to_thread(desk.jobs.files.keep, client.owner, name, purpose, upload.file)
    finally:
        await upload.close()
    return files.described(made)


@router.get("/files")
async def list_files(
    request: Request, purpose: str | None = None, after: str = "", limit: Limit = 10_000, order: str = "desc"
) -> dict[str, Any]:
    desk, client = await _asked(request)
    if order not in ("asc", "desc"):
        raise ApiError(400, f"order is {order!r}: use asc or desc", param="order")
    if after:
        desk.jobs.files.find(client.owner, after, "after")
    wanted: Callable[[Record], bool] = lambda file: purpose in (None, file.about["purpose"])  # noqa: E731
    asc = order == "asc"
    return await _page(desk, files.described, FILE, wanted, limit, after=after, asc=asc, owner=client.owner)


@router.get("/files/{file_id}")
async def retrieve_file(request: Request, file_id: str) -> dict[str, Any]:
    desk, client = await _asked(request)
    return files.described(desk.jobs.files.find(client.owner, file_id))


@router.get("/files/{file_id}/content")
async def file_content(request: Request, file_id: str) -> Response:
    desk, client = await _asked(request)
    found = desk.jobs.files.find(client.owner, file_id)
    kind = "application/jsonl" if found.about["purpose"] == UPLOADED else "text/csv"
    return FileResponse(desk.jobs.files.path(found.id), media_type=kind, filename=found.about["filename"])


@router.delete("/files/{file_id}")
async def delete_file(request: Request, file_id: str) -> dict[str, Any]:
    return await _deleted(request, Jobs.delete_file, file_id, "file")


@router.post("/fine_tuning/jobs")
async def create_job(request: Request) -> dict[str, Any]:
    desk, client = await _asked(request)
    return _job(await desk.jobs.create(client, await body_of(request, CreateJob)))


@router.get("/fine_tuning/jobs")
async def list_jobs(request: Request, after: str = "", limit: Limit = 20) -> dict[str, Any]:
    """`metadata[KEY]=VALUE` lists those that have it, `metadata=null` those that have none."""
    desk, client = await _asked(request)
    if after:
        desk.jobs.find(client, after)
    given = request.query_params
    pairs = {k[len("metadata[") : -1]: v for k, v in given.items() if k.startswith("metadata[") and k.endswith("]")}
    none = given.get("metadata") == "null"

    def wanted(job: Record) -> bool:
        found = job.about["metadata"]
        return found is None if none else pairs.items() <= (found or {}).items()

    return await _page(desk, _job, JOB, wanted, limit, after=after, asc=False, owner=client.owner)


@router.get("/fine_tuning/jobs/{job_id}")
async def retrieve_job(request: Request, job_id: str) -> dict[str, Any]:
    desk, client = await _asked(request)
    return _job(desk.jobs.find(client, job_id))


@router.post("/fine_tuning/jobs/{job_id}/cancel")
async def cancel_job(request: Request, job_id: str) -> dict[str, Any]:
    desk, client = await _asked(request)
    return _job(await desk.jobs.cancel(client, job_id))


@router.post("/fine_tuning/jobs/{job_id}/pause")
async def pause_job(request: Request, job_id: str) -> dict[str, Any]:
    desk, client = await _asked(request)
    return _job(await desk.jobs.pause(client, job_id))


@router.post("/fine_tuning/jobs/{job_id}/resume")
async def resume_job(request: Request, job_id: str) -> dict[str, Any]:
    desk, client = await _asked(request)
    return _job(await desk.jobs.resume(client, job_id))


@router.get("/fine_tuning/jobs/{job_id}/events")
async def list_events(request: Request, job_id: str, after: str = "", limit: Limit = 20) -> dict[str, Any]:
    return await _below(request, job_id, EVENT, _event, after, limit)


@router.get("/fine_tuning/jobs/{job_id}/checkpoints")
async def list_checkpoints(request: Request, job_id: str, after: str = "", limit: Limit = 10) -> dict[str, Any]:
    return await _below(request, job_id, CHECKPOINT, _checkpoint, after, limit)


@router.get("/models")
async def list_models(request: Request) -> dict[str, Any]:
    desk, client = await _asked(request)
    return {"object": "list", "data": desk.models.list(client)}


@router.get("/models/{name}")
async def retrieve_model(request: Request, name: str) -> dict[str, Any]:
    desk, client = await _asked(request)
    return desk.models.find(client, name)


@router.delete("/models/{name}")
async def delete_model(request: Request, name: str) -> dict[str, Any]:
    return await _deleted(request, Jobs.delete_model, name, "model")


@router.post("/chat/completions")
async def chat_completions(request: Request) -> Response:
    return await _answer(request, "chat/completions")


@router.post("/completions")
async def completions(request: Request) -> Response:
    return await _answer(request, "completions")


async def _answer(request: Request, route: str) -> Response:
    desk, client = await _asked(request)
    try:
        body = orjson.loads(await content_of(request))
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise ApiError(400, "the body is no object: name a model in it")
    return await desk.models.answer(client, route, body)


async def _upload(request: Request) -> tuple[str, str, UploadFile]:
    """The file's name, the purpose and the file, which is on disk where it is large. Raises ApiError (400)."""
    most = door_of(request).service.config.limits.file_mb << 20

    async def bounded() -> AsyncGenerator[bytes, None]:
        size = 0
        async for part in request.stream():
            if (size := size + len(part)) > most + OVERHEAD:
                advice = "send fewer examples, or have limits.file_mb raised"
                raise ApiError(400, f"the file has more than {most >> 20} MB: {advice}", "too_large", "file")
            yield part

    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        raise ApiError(400, "the body is no form: send multipart/form-data with a purpose and a file")
    try:
        form = await MultiPartParser(request.headers, bounded(), max_files=1, max_fields=10).parse()
    except (MultiPartException, KeyError) as error:
        raise ApiError(400, f"the form cannot be read ({error}): send a purpose and one file") from None
    upload, purpose = form.get("file"), form.get("purpose")
    if not isinstance(upload, UploadFile):
        raise ApiError(400, "there is no file in the form: send one", param="file")
    for name in form:
        if name not in ("file", "purpose"):
            raise ApiError(
                400, f"{name} is not kept here: leave it out, and delete files that are done with", param=name
            )
    return upload.filename or "upload.jsonl", str(purpose or ""), upload


async def _deleted(
    request: Request, delete: Callable[[Jobs, Client, str], Awaitable[None]], identity: str, kind: str
) -> dict[str, Any]:
    desk, client = await _asked(request)
    await delete(desk.jobs, client, identity)
    return {"id": identity, "object": kind, "deleted": True}


async def _below(
    request: Request, job_id: str, kind: str, describe: Callable[[Record], dict[str, Any]], after: str, limit: int
) -> dict[str, Any]:
    """The newest first."""
    desk, client = await _asked(request)
    job = desk.jobs.find(client, job_id)
    if after and ((found := desk.jobs.journal.get(kind, after)) is None or found.parent != job.id):
        raise ApiError(404, f"the job has no {after!r}: give the last id of the page before", param="after")
    return await _page(desk, describe, kind, lambda _: True, limit, after=after, asc=False, parent=job.id)


async def _page(
    desk: Desk,
    describe: Callable[[Record], dict[str, Any]],
    kind: str,
    wanted: Callable[[Record], bool],
    limit: int,
    *,
    after: str,
    **of: Any,
) -> dict[str, Any]:
    """A page of OpenAI's: those that are wanted, and whether there are more."""
    page, found = desk.jobs.journal.page, list[Record]()
    while len(found) <= limit:
        more = await asyncio.to_thread(page, kind, after=after, limit=BATCH, **of)
        found += [record for record in more if wanted(record)]
        if len(more) < BATCH:
            break
        after = more[-1].id
    data = [describe(record) for record in found[:limit]]
    ends = {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
    return {"object": "list", "data": data, "has_more": len(found) > limit, **ends}


def _job(record: Record) -> dict[str, Any]:
    about = record.about
    asked = {name: "auto" if value is None else value for name, value in about["hyperparameters"].items()}
    method = {"type": about["method"], about["method"]: {"hyperparameters": asked}}
    ended = about["status"] not in jobs.OPEN
    return {
        "id": record.id,
        "object": "fine_tuning.job",
        "created_at": int(record.made),
        "finished_at": int(about["finished"]) if ended else None,
        "estimated_finish": None,
        "model": about["model"],
        "fine_tuned_model": about["fine_tuned_model"],
        "organization_id": record.owner[:12],
        "status": about["status"],
        "hyperparameters": {name: value for name, value in asked.items() if name != "beta"},
        "method": method,
        "training_file": about["training_file"],
        "validation_file": about["validation_file"],
        "result_files": about["result_files"],
        "trained_tokens": about["at"]["tokens"] if ended else None,
        "error": about["error"],
        "seed": about["seed"],
        "metadata": about["metadata"],
        "integrations": [],
        "user_provided_suffix": about["suffix"],
    }


def _event(record: Record) -> dict[str, Any]:
    about = record.about
    return {
        "id": record.id,
        "object": "fine_tuning.job.event",
        "created_at": int(record.made),
        "level": about["level"],
        "message": about["message"],
        "data": about["data"] or {},
        "type": "message" if about["data"] is None else "metrics",
    }


def _checkpoint(record: Record) -> dict[str, Any]:
    about = record.about
    return {
        "id": record.id,
        "object": "fine_tuning.job.checkpoint",
        "created_at": int(record.made),
        "fine_tuned_model_checkpoint": about["model"],
        "fine_tuning_job_id": record.parent,
        "metrics": about["metrics"],
        "step_number": about["step"],
    }
