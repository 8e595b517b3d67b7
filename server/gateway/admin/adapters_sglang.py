"""SGLang's weight routes (srt/entrypoints/http_server.py, srt/managers/io_struct.py), as one swap of the whole fleet.

    update_weights_from_disk    publishes a checkpoint and swaps it in
    update_weights_from_tensor  collects buckets of safetensors; the one that completes the model swaps it in
    begin_weight_update, end_weight_update   a session around buckets, whose end swaps them in
    load_lora_adapter, unload_lora_adapter   publish an edition of an adapter, or withdraw it, without a swap
    pause_generation, continue_generation   a pause lease of 120 s

Answers have SGLang's form, {"success", "message"}, and so have refusals (server/errors.py `error_body`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Body, Response
from fastapi.responses import PlainTextResponse
from pydantic import BaseModel, ConfigDict

from server.errors import HttpError
from server.gateway.admin.deps import ByDep, ModelDep
from server.gateway.admin.trainers import (
    LoadAdapter,
    UnloadAdapter,
    active_version,
    check_mode,
    pause_ttl,
    pauses,
    publish,
    publish_update,
    refuse,
    refused,
    room,
)
from server.gateway.admin.weights import model_schema
from server.gateway.models.model import Model
from server.gateway.models.publishing import Publication, WeightUpdate, refused_pickle
from weightsync.format.manifest import Schema

FAMILY = "sglang"
FREEZING = ("in_place", "retract")


router = APIRouter(tags=["sglang"])


class TrainerRequest(BaseModel):
    """The fields that every request of SGLang may carry. Unknown fields are refused; those without a meaning here are
    named."""

    model_config = ConfigDict(extra="forbid")
    rid: Any = None
    http_worker_ipc: Any = None


class Begin(TrainerRequest):
    """BeginWeightUpdateReqInput: which models the buckets of a session are for."""

    selector: Literal["target", "draft", "all"] = "all"


class Update(TrainerRequest):
    """The fields of all updates. `flush_cache` and `torch_empty_cache` mean nothing here: a request reads blocks that
    other weights computed only where it asks for its session's (`kv`)."""

    load_format: str | None = None
    abort_all_requests: bool = False
    weight_version: str | None = None
    flush_cache: bool = True
    torch_empty_cache: bool = False


class FromDisk(Update):
    """UpdateWeightFromDiskReqInput."""

    model_path: str
    is_async: bool = False
    keep_pause: bool = False
    recapture_cuda_graph: bool = False
    token_step: int = 0
    manifest: dict[str, Any] | None = None


class FromTensor(Update, Begin):
    """UpdateWeightsFromTensorReqInput; here `load_format` must be "safetensors" and every item base64 of a file."""

    serialized_named_tensors: list[str]
    disable_draft_model: bool | None = None


class Pause(TrainerRequest):
    """PauseGenerationReqInput, and how long the pause may last."""

    mode: str | None = None
    ttl_s: float | None = None


@router.post("/update_weights_from_disk")
async def update_from_disk(model: ModelDep, by: ByDep, body: FromDisk) -> dict[str, Any]:
    """Publishes the checkpoint in `model_path` and swaps it in."""
    _check(body)
    if body.load_format not in (None, "auto", "safetensors"):
        raise HttpError(501, f"load_format {body.load_format!r}: only safetensors are read.", code="bad_load_format")
    if body.keep_pause or body.manifest is not None:
        raise HttpError(501, "`keep_pause` and `manifest` are not understood here; leave them out.", code="unsupported")
    await pauses(model).renew_all(FAMILY)
    label = body.weight_version or (str(body.token_step) if body.token_step else None)
    report = await publish(model, Publication.model_construct(path=body.model_path), by, label)
    return {**_success(report), "num_paused_requests": 0}


class LoadLora(TrainerRequest, LoadAdapter):
    """LoadLoRAAdapterReqInput: an instance loads an adapter again when it needs it, so all are pinned."""

    pinned: bool = False
    lora_id: str | None = None


@router.post("/load_lora_adapter")
async def load_lora(model: ModelDep, by: ByDep, body: LoadLora) -> dict[str, Any]:
    """Publishes an edition of an adapter, which every instance has loaded when the answer comes."""
    await body.publish(model, by)
    return await _adapter_done(model, f"The adapter {body.lora_name} is loaded.")


@router.post("/unload_lora_adapter")
async def unload_lora(model: ModelDep, by: ByDep, body: UnloadAdapter) -> dict[str, Any]:
    """Withdraws an adapter. Requests that run through it are finished."""
    await body.publish(model, by)
    return await _adapter_done(model, f"The adapter {body.lora_name} is withdrawn.")


@router.post("/begin_weight_update")
async def begin(model: ModelDep, body: Begin | None = None) -> dict[str, Any]:
    """Begins a session of buckets. Buckets of a session that was not completed are dropped."""
    _check_selector(body or Begin())
    if model.updates.find(FAMILY) is not None:
        model.updates.drop()
    model.updates.begin(FAMILY, session=True)
    await pauses(model).renew_all(FAMILY)
    return {"success": True, "message": "Send buckets of safetensors, and then /end_weight_update."}


@router.post("/end_weight_update")
async def end(model: ModelDep, by: ByDep, _: Annotated[dict[str, Any] | None, Body()] = None) -> dict[str, Any]:
    """Publishes the buckets of the session and swaps them in. A session without buckets changes nothing."""
    draft = model.updates.find(FAMILY)
    if draft is None or not draft.session:
        raise HttpError(409, "No session of weights is open: call /begin_weight_update first.", code="no_update")
    await pauses(model).renew_all(FAMILY)
    update = model.updates.take(FAMILY)
    if not update.names:
        return {"success": True, "message": "No tensor was sent in this session: the weights are what they were."}
    if missing := _missing(update, await model_schema(model)):
        refusal = _incomplete("The weights stay what they were", update, missing)
        update.drop()
        raise refusal
    return _success(await publish_update(model, update, update.label, by))


@router.post("/update_weights_from_tensor")
async def update_from_tensor(model: ModelDep, by: ByDep, body: FromTensor) -> dict[str, Any]:
    """Takes in a bucket of tensors. Outside of a session, publishes them all with the last one of the model, and swaps
    them in."""
    _check(body)
    if body.load_format != "safetensors":
        raise refused_pickle()
    _check_selector(body)
    schema = await model_schema(model)
    draft = _round(model, body.weight_version)
    if schema is None and not draft.session:
        model.updates.drop()
        raise HttpError(
            409,
            "There is no version yet to compare with: begin with /begin_weight_update, or publish a checkpoint first.",
            code="no_model",
        )
    for bucket in body.serialized_named_tensors:
        draft = await _add(model, draft, bucket, room(schema))
    await pauses(model).renew_all(FAMILY)
    missing = _missing(draft, schema)
    if missing or draft.session:
        message = f"{len(draft.names)} tensors are here, {missing} to come."
        return {"success": True, "message": message, "missing": missing}
    return _success(await publish_update(model, model.updates.take(FAMILY), body.weight_version, by))


@router.post("/pause_generation")
async def pause(model: ModelDep, body: Pause | None = None) -> dict[str, Any]:
    """Freezes requests until /continue_generation, or until the time is over."""
    body = body or Pause()
    check_mode(body.mode, FREEZING)
    if model.updates.find(FAMILY) is not None:
        model.updates.drop()  # of a trainer that did not come back; this one begins
    record = await pauses(model).take(FAMILY, pause_ttl(body.ttl_s))
    message = f"Generation paused successfully, for {record.ttl_s:g} s at most."
    return {"success": True, "message": message, "status": "ok", "id": record.id, "ttl_s": record.ttl_s}


@router.post("/continue_generation")
async def proceed(model: ModelDep, _: Annotated[dict[str, Any] | None, Body()] = None) -> dict[str, Any]:
    """Ends every pause that came by these routes. Raises HttpError (409) when an update was left incomplete: generation
    goes on with the weights there were."""
    await pauses(model).end_all(FAMILY)
    draft = model.updates.find(FAMILY)
    if draft is not None:
        refusal = _incomplete(
            "Generation goes on with the weights there were", draft, _missing(draft, await model_schema(model))
        )
        model.updates.drop()
        raise refusal
    return {"success": True, "message": "Generation continued successfully.", "status": "ok"}


@router.get("/flush_cache", response_class=PlainTextResponse)
@router.post("/flush_cache", response_class=PlainTextResponse)
async def flush_cache() -> PlainTextResponse:
    """Nothing to do: a request reads what other weights computed only where it asks for its session's (`kv`)."""
    return PlainTextResponse("Cache flushed: blocks belong to a weight version, and no other version reads them.\n")


@router.get("/get_model_info")
@router.get("/model_info")
async def model_info(model: ModelDep) -> dict[str, Any]:
    """The model that is served. Raises HttpError (503) when none is."""
    record = next((i.record for i in model.fleet.serving), None)
    if record is None:
        raise model.fleet.unavailable()
    version = await active_version(model)
    return {
        "model_path": record.model_dir,
        "tokenizer_path": record.model_dir,
        "served_model_name": model.name,
        "is_generation": True,
        "weight_version": str(version) if version is not None else None,
    }


@router.get("/health_generate", response_class=Response)
async def health(model: ModelDep) -> Response:
    """200 when an instance serves, as trainers wait for it; as GET /health."""
    if not model.fleet.serving:
        raise model.fleet.unavailable()
    return Response()


refuse(
    router, "nccl_unsupported", "init_weights_update_group", "destroy_weights_update_group",
    "update_weights_from_distributed", "update_weights_from_ipc", "init_weights_send_group_for_remote_instance",
    "send_weights_to_remote_instance",
)  # fmt: skip
refuse(router, "memory_unsupported", "release_memory_occupation", "resume_memory_occupation", methods=("GET", "POST"))
refuse(router, "abort_unsupported", "abort_request")


@router.post("/update_weight_version")
async def update_weight_version(
    model: ModelDep, new_version: Annotated[str, Body()], abort_all_requests: Annotated[bool, Body()] = True
) -> dict[str, Any]:
    """A version's number comes with its weights; naming the one that serves changes nothing. vLLM has the verb too."""
    version = await active_version(model)
    if new_version != str(version):
        raise HttpError(
            409,
            f"Version {version} serves, and its number comes with its weights: it cannot be renamed {new_version!r}.",
            code="label_follows_weights",
        )
    return {"success": True, "message": f"Version {version} serves.", "new_version": new_version}


def _round(model: Model, label: str | None) -> WeightUpdate:
    """The update of this bucket; outside of a session another `weight_version` than before begins anew."""
    draft = model.updates.find(FAMILY)
    if draft is not None and draft.session:
        draft.label = label or draft.label
    elif draft is not None and draft.label != label:
        model.updates.drop()
        draft = None
    return draft or model.updates.begin(FAMILY, label)


async def _add(model: Model, draft: WeightUpdate, bucket: str, room_for: int | None) -> WeightUpdate:
    """Adds a bucket. No trainer sends a tensor twice in one round: one that comes again with other bytes begins the
    next, and is refused in a session."""
    try:
        await draft.add(bucket, room_for)
    except HttpError as conflict:
        if conflict.code != "duplicate_tensor" or draft.session:
            raise
        model.updates.drop()
        draft = model.updates.begin(FAMILY, draft.label)
        await draft.add(bucket, room_for)
    return draft


async def _adapter_done(model: Model, message: str) -> dict[str, Any]:
    return {"success": True, "message": message, "weight_version": str(await active_version(model))}


def _success(report: dict[str, Any]) -> dict[str, Any]:
    version, epoch = report["version"], report["swap"]["epoch"]
    message = f"Version {version} serves on every instance (epoch {epoch})."
    return {"success": True, "message": message, "weight_version": str(version)}


def _check(body: Update) -> None:
    if body.abort_all_requests:
        raise HttpError(
            400,
            "A swap does not end requests: leave out `abort_all_requests`, and send the requests that it should end "
            "with the header x-hotswap-policy: abort.",
            code="abort_unsupported",
            param="abort_all_requests",
        )


def _check_selector(body: Begin) -> None:
    if body.selector == "draft":
        raise refused("draft_unsupported")


def _incomplete(state: str, update: WeightUpdate, missing: int) -> HttpError:
    return HttpError(
        409,
        f"{state}: the update was given up with {len(update.names)} tensors, {missing} missing. Send every tensor of "
        "the model.",
        code="incomplete_update",
    )


def _missing(draft: WeightUpdate, schema: Schema | None) -> int:
    """How many tensors of the model are still to come."""
    return len(schema.tensors.keys() - draft.names) if schema is not None else 0
