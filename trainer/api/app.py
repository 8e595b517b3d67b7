"""The routes of the training API, as the tinker SDK asks for them."""

from __future__ import annotations

import asyncio
import datetime
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import zstandard
from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from trainer.api import wire
from trainer.api.errors import ApiError
from trainer.api.journal import Answer, Record
from trainer.api.queue import LONG_POLL_S
from trainer.api.sampling import Client, Gateway, Sampler
from trainer.api.service import (
    MODEL,
    SAMPLER,
    SAMPLER_WEIGHTS,
    SAVE,
    SAVE_FOR_SAMPLER,
    SESSION,
    STEP,
    Service,
)
from trainer.errors import RolloutError, TrainerError

B = TypeVar("B", bound=wire.Body)
router = APIRouter(prefix="/api/v1")
KEEP_SAMPLES_S = 600.0


class Door:
    """The objects that the routes share: the gateway to ask about clients, the service, and the samples under way."""

    def __init__(self, service: Service, gateway: Gateway, sampler: Sampler) -> None:
        self.service, self.gateway, self.sampler = service, gateway, sampler
        self._samples: dict[str, tuple[str, asyncio.Task[Answer]]] = {}  # (owner, task) by request

    async def client(self, request: Request) -> Client:
        """Raises ApiError (401, 503)."""
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        return await self.gateway.client(request.headers.get("x-api-key") or bearer)

    def begin_sample(self, client: Client, identity: str, asked: wire.SampleRequest, record: Record) -> None:
        """One that has begun already goes on. Raises ApiError (429)."""
        if identity in self._samples:
            return
        most = self.service.config.limits.pending
        if sum(owner == client.owner and not task.done() for owner, task in self._samples.values()) >= most:
            raise ApiError(429, f"{most} samples of this key are under way: wait for answers, then go on")
        task = asyncio.create_task(self._sampled(client, asked, record.about["directory"]))
        self._samples[identity] = client.owner, task
        task.add_done_callback(
            lambda _: asyncio.get_running_loop().call_later(KEEP_SAMPLES_S, self._samples.pop, identity, None)
        )

    async def sample(self, client: Client, identity: str) -> Answer | None:
        """None while it is under way. Raises ApiError (410)."""
        owner, task = self._samples.get(identity, ("", None))
        if task is None or owner != client.owner:
            raise ApiError(410, f"the sample {identity} is not known here, perhaps after a restart: ask for it again")
        await asyncio.wait([task], timeout=LONG_POLL_S)
        if not task.done():
            return None
        if task.cancelled():
            raise ApiError(410, f"the sample {identity} was cancelled")
        return task.result()

    def cancel_sample(self, client: Client, identity: str) -> None:
        owner, task = self._samples.get(identity, ("", None))
        if task is not None and owner == client.owner:
            task.cancel()

    async def close(self) -> None:
        tasks = [task for _, task in self._samples.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _sampled(self, client: Client, asked: wire.SampleRequest, directory: str | None) -> Answer:
        try:
            snapshot = None if directory is None else Path(directory)
            return Answer(await self.sampler.sample(client, asked, snapshot), wire.PROTOBUF)
        except TrainerError as error:
            refused = isinstance(error, RolloutError) and 400 <= error.status < 500
            user = refused or (isinstance(error, ApiError) and error.user)
            return Answer.json({"error": str(error), "category": "user" if user else "server"}, failed=True)


def build_app(door: Door, start: Callable[[], Any], stop: Callable[[], Any]) -> FastAPI:
    """The application; `start` and `stop` are awaited around its life."""

    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        await start()
        yield
        await stop()

    app = FastAPI(title="Hotswap training API", lifespan=life, docs_url=None, redoc_url=None)
    app.state.door = door
    app.include_router(router)
    app.add_exception_handler(TrainerError, _refused)
    app.add_exception_handler(HTTPException, _unknown)
    app.add_exception_handler(RequestValidationError, _misread)
    return app


async def _refused(_: Request, error: Exception) -> Response:
    known = error if isinstance(error, ApiError) else ApiError(500, str(error))
    return JSONResponse(known.body(), status_code=known.status)


async def _unknown(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    status = 404 if error.status_code == 404 else 400
    message = f"{request.method} {request.url.path}: {error.detail}. See docs/trainer/api.md for what there is"
    return JSONResponse(ApiError(status, message).body(), status_code=error.status_code, headers=error.headers)


async def _misread(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    name = str(first["loc"][-1])
    return JSONResponse(ApiError(400, f"{name}: {first['msg']}", param=name).body(), status_code=400)


def door_of(request: Request) -> Door:
    door: Door = request.app.state.door
    return door


async def _asked(request: Request) -> tuple[Door, Client]:
    """Raises ApiError (401, 503)."""
    door = door_of(request)
    return door, await door.client(request)


async def content_of(request: Request) -> bytes:
    """The body, decompressed. Raises ApiError (400)."""
    most = door_of(request).service.config.limits.body_mb << 20
    parts, size = [], 0
    async for part in request.stream():
        parts.append(part)
        if (size := size + len(part)) > most:
            raise ApiError(400, f"the body has more than {most >> 20} MB: send fewer sequences at once", "too_large")
    content = b"".join(parts)
    if request.headers.get("content-encoding") != "zstd":
        return content
    try:
        reader = zstandard.ZstdDecompressor().stream_reader(content)
        content = reader.read(most + 1)
    except zstandard.ZstdError as error:
        raise ApiError(400, f"the body is not zstd: {error}") from None
    if len(content) > most:
        raise ApiError(400, f"the body has more than {most >> 20} MB: send fewer sequences at once", "too_large")
    return content


async def body_of(request: Request, kind: type[B]) -> B:
    """Raises ApiError (400)."""
    try:
        return kind.model_validate_json(await content_of(request) or b"{}")
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        name = ".".join(str(part) for part in first["loc"]) or "body"
        raise ApiError(400, f"{name}: {first['msg']}", param=name) from None


def _future(model: str, seq: int) -> dict[str, Any]:
    return {"request_id": f"{model}:{seq}", "model_id": model}


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    return {"status": "ok"}


@router.post("/client/config")
async def client_config(request: Request) -> dict[str, Any]:
    """The SDK's own defaults; it compresses what it sends."""
    await door_of(request).client(request)
    return {"proto_compress_fwdbwd": True}


@router.post("/client/dynamic_config")
async def client_dynamic_config(request: Request) -> dict[str, Any]:
    await door_of(request).client(request)
    return {"sample_cancel_enabled": True}


@router.get("/get_server_capabilities")
async def capabilities(request: Request) -> dict[str, Any]:
    door, client = await _asked(request)
    longest = min(client.context, door.service.tenants.shape.max_positions)
    model = {"model_name": door.service.config.name, "max_context_length": longest}
    return {"supported_models": [model | {"trainable": True, "sampleable": True}]}


@router.post("/telemetry")
async def telemetry() -> dict[str, str]:
    """The SDK's reports about itself are not kept."""
    return {"status": "accepted"}


@router.post("/create_session")
async def create_session(request: Request) -> dict[str, Any]:
    door, client = await _asked(request)
    body = await body_of(request, wire.CreateSession)
    about = {"user_metadata": body.user_metadata, "display_name": body.display_name, "tags": body.tags}
    made = Record(SESSION, str(uuid.uuid4()), client.owner, about=about)
    await asyncio.to_thread(door.service.journal.put, made)
    door.service.heard(made.id)
    return {"type": "create_session", "session_id": made.id}


@router.post("/session_heartbeat")
async def session_heartbeat(request: Request) -> dict[str, Any]:
    door, client = await _asked(request)
    door.service.heard(door.service.record(SESSION, (await body_of(request, wire.SessionId)).session_id, client).id)
    return {"type": "session_heartbeat"}


@router.post("/sessions/{session_id}/finish", status_code=204)
async def finish_session(request: Request, session_id: str) -> None:
    """The models and checkpoints that a session has made stay until they are deleted."""
    door = door_of(request)
    door.service.heard(door.service.record(SESSION, session_id, await door.client(request)).id, over=True)


@router.get("/sessions/{session_id}")
async def session(request: Request, session_id: str) -> dict[str, Any]:
    door = door_of(request)
    found = door.service.record(SESSION, session_id, await door.client(request))
    below = door.service.journal.below
    return {
        "training_run_ids": [record.id for record in below(MODEL, session_id)],
        "sampler_ids": [record.id for record in below(SAMPLER, session_id)],
        "user_metadata": found.about["user_metadata"],
        "display_name": found.about["display_name"],
    }


@router.post("/create_model")
async def create_model(request: Request) -> dict[str, Any]:
    door, client = await _asked(request)
    return _future(await door.service.create(client, await body_of(request, wire.CreateModel)), 0)


@router.post("/load_weights")
async def load_weights(request: Request) -> dict[str, Any]:
    door, client = await _asked(request)
    return _future(*await door.service.load(client, await body_of(request, wire.LoadWeights)))


@router.post("/forward_backward")
async def forward_backward(request: Request) -> dict[str, Any]:
    door, client = await _asked(request)
    return _future(*await door.service.batch(client, await content_of(request)))


@router.post("/optim_step")
async def optim_step(request: Request) -> dict[str, Any]:
    door, client = await _asked(request)
    return _future(*await door.service.numbered(client, STEP, await body_of(request, wire.OptimStep)))


@router.post("/save_weights")
async def save_weights(request: Request) -> dict[str, Any]:
    door, client = await _asked(request)
    return _future(*await door.service.numbered(client, SAVE, await body_of(request, wire.SaveWeights)))


@router.post("/save_weights_for_sampler")
async def save_weights_for_sampler(request: Request) -> dict[str, Any]:
    door, client = await _asked(request)
    body = await body_of(request, wire.SaveForSampler)
    return _future(*await door.service.numbered(client, SAVE_FOR_SAMPLER, body))


@router.post("/get_info")
async def get_info(request: Request) -> dict[str, Any]:
    door, client = await _asked(request)
    found = door.service.record(MODEL, (await body_of(request, wire.ModelId)).model_id, client)
    c = door.service.config
    return {
        "type": "get_info",
        "model_data": {
            "arch": door.service.tenants.shape.family,
            "model_name": c.name,
            "tokenizer_id": c.tokenizer or c.model.path,
        },
        "model_id": found.id,
        **_adapter(found.about["lora"]),
        "model_name": c.name,
    }


@router.post("/create_sampling_session")
async def create_sampling_session(request: Request) -> dict[str, Any]:
    door, client = await _asked(request)
    made = door.service.sampler(client, await body_of(request, wire.CreateSampler))
    return {"type": "create_sampling_session", "sampling_session_id": made}


@router.get("/samplers/{sampler_id}")
async def sampler(request: Request, sampler_id: str) -> dict[str, Any]:
    door = door_of(request)
    found = door.service.record(SAMPLER, sampler_id, await door.client(request))
    name, path = door.service.config.name, found.about["model_path"]
    return {"sampler_id": found.id, "base_model": name, "model_path": path}


@router.post("/asample")
async def asample(request: Request) -> dict[str, Any]:
    door, client = await _asked(request)
    body = await body_of(request, wire.SampleRequest)
    if body.sampling_session_id is None or body.seq_id is None:
        raise ApiError(400, "a sample needs sampling_session_id and seq_id: create a sampling client first")
    record = door.service.record(SAMPLER, body.sampling_session_id, client)
    identity = f"{record.id}:{body.seq_id}"
    door.begin_sample(client, identity, body, record)
    return {"request_id": identity, "sample_sequence_ids": [f"{identity}:{i}" for i in range(body.num_samples)]}


@router.post("/cancel_future", status_code=204)
async def cancel_future(request: Request) -> None:
    """Of a sample; a training client's requests are executed."""
    door, client = await _asked(request)
    door.cancel_sample(client, (await body_of(request, wire.RequestId)).request_id)


@router.post("/retrieve_future")
async def retrieve_future(request: Request) -> Response:
    """The result, once it is there; 408, which the SDK asks again after, if it is not within half a minute."""
    door, client = await _asked(request)
    identity = (await body_of(request, wire.RequestId)).request_id
    of, _, number = identity.rpartition(":")
    if not number.isdecimal():
        raise ApiError(404, f"{identity!r} is no request of this server")
    if ":sample:" in of:
        answer = await door.sample(client, identity)
    else:
        answer = await door.service.result(client, of, int(number))
    if answer is None:
        return JSONResponse({"type": "try_again", "request_id": identity, "queue_state": "active"}, status_code=408)
    return Response(answer.content, media_type=answer.type)


@router.post("/weights_info")
async def weights_info(request: Request) -> dict[str, Any]:
    door, client = await _asked(request)
    path = (await body_of(request, wire.TinkerPath)).tinker_path
    lora = door.service.lora_of_checkpoint(client, path)
    return {
        "base_model": door.service.config.name,
        **_adapter(lora),
        "train_unembed": lora is None,
        "train_mlp": lora is None or "up_proj" in lora["targets"],
        "train_attn": lora is None or "q_proj" in lora["targets"],
    }


@router.get("/training_runs")
async def training_runs(request: Request, limit: int = 20, offset: int = 0) -> dict[str, Any]:
    door, client = await _asked(request)
    found, cursor = _page(door.service.journal.of_owner(MODEL, client.owner), limit, offset)
    return {"training_runs": [_run(door, record) for record in found], "cursor": cursor}


@router.get("/training_runs/{run_id}")
async def training_run(request: Request, run_id: str) -> dict[str, Any]:
    door = door_of(request)
    return _run(door, door.service.record(MODEL, run_id, await door.client(request)))


@router.delete("/training_runs/{run_id}", status_code=204)
async def delete_training_run(request: Request, run_id: str) -> None:
    door = door_of(request)
    await door.service.delete_model(door.service.record(MODEL, run_id, await door.client(request)))


@router.get("/sessions")
async def sessions(request: Request, limit: int = 20, offset: int = 0) -> dict[str, Any]:
    door, client = await _asked(request)
    found, _ = _page(door.service.journal.of_owner(SESSION, client.owner), limit, offset)
    return {"sessions": [record.id for record in found]}


@router.get("/checkpoints")
async def user_checkpoints(request: Request, limit: int = 100, offset: int = 0) -> dict[str, Any]:
    """Of all training runs of the key, the newest first."""
    door, client = await _asked(request)
    found, cursor = _page(door.service.checkpoints_of(client), limit, offset)
    return {"checkpoints": [_checkpoint(record) for record in found], "cursor": cursor}


@router.put("/training_runs/{run_id}/checkpoints/{kind}/{name}/ttl", status_code=204)
async def keep_checkpoint(request: Request, run_id: str, kind: str, name: str) -> None:
    door, client = await _asked(request)
    body = await body_of(request, wire.TimeToLive)
    door.service.keep_checkpoint(client, f"tinker://{run_id}/{kind}/{name}", body.ttl_seconds)


@router.get("/training_runs/{run_id}/checkpoints")
async def checkpoints(request: Request, run_id: str) -> dict[str, Any]:
    door = door_of(request)
    found = door.service.record(MODEL, run_id, await door.client(request))
    return {"checkpoints": [_checkpoint(record) for record in door.service.checkpoints(found.id)]}


@router.delete("/training_runs/{run_id}/checkpoints/{kind}/{name}", status_code=204)
async def delete_checkpoint(request: Request, run_id: str, kind: str, name: str) -> None:
    door = door_of(request)
    door.service.delete_checkpoint(await door.client(request), f"tinker://{run_id}/{kind}/{name}")


def _page(records: Sequence[Record], limit: int, offset: int) -> tuple[Sequence[Record], dict[str, int]]:
    """Some of the records, which are given oldest first, newest first; and the SDK's cursor."""
    cursor = {"offset": offset, "limit": limit, "total_count": len(records)}
    return records[::-1][offset : offset + limit], cursor


def _adapter(lora: Mapping[str, Any] | None) -> dict[str, Any]:
    return {"is_lora": lora is not None, "lora_rank": lora and lora["rank"]}


def _run(door: Door, record: Record) -> dict[str, Any]:
    found = [_checkpoint(checkpoint) for checkpoint in door.service.checkpoints(record.id)]
    last = {kind: [c for c in found if c["checkpoint_type"] == kind][-1:] for kind in ("training", "sampler")}
    metadata = record.about["user_metadata"]
    return {
        "training_run_id": record.id,
        "base_model": door.service.config.name,
        "model_owner": record.owner[:12],
        **_adapter(record.about["lora"]),
        "last_request_time": _time(record.made),
        "last_checkpoint": next(iter(last["training"]), None),
        "last_sampler_checkpoint": next(iter(last["sampler"]), None),
        "user_metadata": metadata and {name: str(value) for name, value in metadata.items()},
    }


def _checkpoint(record: Record) -> dict[str, Any]:
    _, _, model_and_kind = record.id.partition("tinker://")
    kind, name = model_and_kind.split("/")[1:]
    expires = record.about["expires"]
    return {
        "checkpoint_id": f"{kind}/{name}",
        "checkpoint_type": "sampler" if kind == SAMPLER_WEIGHTS else "training",
        "time": _time(record.made),
        "tinker_path": record.id,
        "size_bytes": record.about["bytes"],
        "user_metadata": record.about["user_metadata"],
        "expires_at": None if expires is None else _time(expires),
    }


def _time(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat()
