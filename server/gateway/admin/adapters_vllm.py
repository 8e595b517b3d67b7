"""vLLM's RL routes (vllm/entrypoints/rl/online/api_router.py), as one swap of the whole fleet.

    start_weight_update   a draft begins
    update_weights        collects: {"checkpoint_path": DIR} or {"safetensors": BASE64}, or a list of such
    finish_weight_update  publishes the draft and swaps it in; answers when every instance has it
    pause, resume         a pause lease of 120 s
    v1/load_lora_adapter, v1/unload_lora_adapter   publish an edition of an adapter, or withdraw it, without a swap;
                                                   skyrl/v1/load_lora_adapter is SkyRL's name of the first

    server_info           those settings of the instances that clients read; a NCCL group is refused where it is formed

Nothing a trainer does between start and finish touches an engine, so it need not pause.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal, TypedDict

import msgspec
from fastapi import APIRouter, Body, Query
from fastapi.responses import PlainTextResponse

from server.errors import HttpError
from server.gateway.admin.adapters_sglang import model_info
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
from server.gateway.fleet.instance import Instance
from server.gateway.fleet.scrape import fetch
from server.gateway.models.model import Model
from server.gateway.models.publishing import Publication, WeightUpdate, refused_pickle

router = APIRouter(tags=["vllm"])

FAMILY = "vllm"
FREEZING = ("keep",)
TIMEOUT_S = 2.0  # for an instance to tell its settings
_GROUP_FIELDS = frozenset({"master_address", "master_port", "rank_offset", "world_size"})
_TENSOR_FIELDS = frozenset({"names", "dtype_names", "shapes", "num_updates_list"})
_PICKLES = frozenset({"ipc_handles", "ipc_handles_pickled"})


@router.post("/init_weight_transfer_engine")
async def init(model: ModelDep, init_info: Annotated[dict[str, Any], Body(embed=True)]) -> dict[str, str]:
    """A trainer that begins anew: what it may have left half-way is given up."""
    if _GROUP_FIELDS & init_info.keys():
        raise refused("nccl_unsupported", "init_weight_transfer_engine with an address")
    if init_info:
        raise _unknown("init_info", init_info)
    model.updates.drop()
    return {"message": "Weight transfer initialized"}


@router.post("/shutdown_weight_transfer_engine")
async def shutdown(model: ModelDep) -> dict[str, str]:
    """Gives up a draft that was not finished."""
    model.updates.drop()
    return {"message": "Weight transfer shut down"}


@router.post("/start_weight_update")
async def start(model: ModelDep) -> dict[str, str]:
    """Begins a draft."""
    model.updates.begin(FAMILY)
    await pauses(model).renew_all(FAMILY)
    return {"message": "Weight update started"}


@router.post("/update_weights")
async def update(
    model: ModelDep,
    by: ByDep,
    update_info: Annotated[dict[str, Any] | list[dict[str, Any]] | None, Body()] = None,
    weight_dir: Annotated[str | None, Body(min_length=1, max_length=4096, description="prime-rl's: all of it")] = None,
) -> dict[str, str]:
    """Adds weights to the draft. With prime-rl's `weight_dir` there is none: the checkpoint is swapped in."""
    if weight_dir is not None and update_info is None:
        await pauses(model).renew_all(FAMILY)
        report = await publish(model, Publication.model_construct(path=weight_dir), by)
        return {"message": "Weights updated", "status": "ok", "weight_version": str(report["version"])}
    if weight_dir is not None or update_info is None:
        raise _unknown("update_info", {"weight_dir": weight_dir} if weight_dir is not None else {})
    draft = model.updates.find(FAMILY)
    if draft is None:
        raise HttpError(409, "No weight update is under way here: call start_weight_update first.", code="no_update")
    for info in update_info if isinstance(update_info, list) else [update_info]:
        await _collect(model, draft, info)
    await pauses(model).renew_all(FAMILY)
    return {"message": "Weights updated"}


@router.post("/finish_weight_update")
async def finish(
    model: ModelDep, by: ByDep, weight_version: Annotated[str | None, Body(embed=True)] = None
) -> dict[str, Any]:
    """Publishes the draft and swaps it in."""
    await pauses(model).renew_all(FAMILY)  # first: if the store is away, the draft stays for another try
    report = await publish_update(model, model.updates.take(FAMILY), weight_version, by)
    return {"message": "Weight update finished", "weight_version": str(report["version"])}


class LoadLora(LoadAdapter):
    """LoadLoRAAdapterRequest: an adapter is always replaced, with or without `load_inplace`."""

    load_inplace: bool = False
    is_3d_lora_weight: Literal[False] = False


@router.post("/v1/load_lora_adapter", response_class=PlainTextResponse)
@router.post("/skyrl/v1/load_lora_adapter", response_class=PlainTextResponse)
async def load_lora(model: ModelDep, by: ByDep, body: LoadLora) -> str:
    """Publishes an edition of an adapter, which every instance has loaded when the answer comes."""
    await body.publish(model, by)
    return f"Success: LoRA adapter '{body.lora_name}' added successfully."


@router.post("/v1/unload_lora_adapter", response_class=PlainTextResponse)
async def unload_lora(model: ModelDep, by: ByDep, body: UnloadAdapter) -> str:
    """Withdraws an adapter. Requests that run through it are finished."""
    await body.publish(model, by)
    return f"Success: LoRA adapter '{body.lora_name}' removed successfully."


@router.post("/pause")
async def pause(
    model: ModelDep,
    mode: Annotated[str | None, Query()] = None,
    clear_cache: Annotated[bool, Query()] = True,
    ttl_s: Annotated[float | None, Query()] = None,
) -> dict[str, Any]:
    """Freezes requests until /resume, or until the time is over. Nothing is read from blocks of other weights, so
    there is no cache to clear: `clear_cache` means nothing here."""
    check_mode(mode, FREEZING)
    record = await pauses(model).take(FAMILY, pause_ttl(ttl_s))
    return {"status": "paused", "id": record.id, "ttl_s": record.ttl_s}


@router.post("/resume")
async def resume(model: ModelDep) -> dict[str, str]:
    """Ends every pause that came by these routes."""
    await pauses(model).end_all(FAMILY)
    return {"status": "resumed"}


@router.get("/is_paused")
async def is_paused(model: ModelDep) -> dict[str, bool]:
    """Whether anybody's pause holds."""
    return {"is_paused": bool(await pauses(model).holding())}


@router.get("/weight_info")
async def weight_info(model: ModelDep) -> dict[str, str | None]:
    """The committed version's number."""
    version = await active_version(model)
    return {"weight_version": str(version) if version is not None else None}


@router.get("/get_world_size")
async def world_size(model: ModelDep, include_dp: Annotated[bool, Query()] = True) -> dict[str, int]:
    """How many instances there are; 1 without data parallelism, of which each instance counts as one rank."""
    return {"world_size": max(1, len(model.fleet.instances)) if include_dp else 1}


@router.get("/server_info")
async def server_info(
    model: ModelDep, config_format: Annotated[Literal["text", "json"], Query()] = "text"
) -> dict[str, Any]:
    """The served model in SGLang's words, and in `vllm_config` the settings that all its instances have: a text, or an
    object with `config_format=json`. Raises HttpError: 503 when none tells them, 409 when they differ."""
    about = await model_info(model)
    del about["is_generation"]  # which SGLang tells on /model_info alone
    serving = list(model.fleet.serving)
    found = zip(serving, await asyncio.gather(*map(_settings, serving)), strict=True)
    told = {instance.id: settings for instance, settings in found if settings is not None}
    if not told:
        raise HttpError(503, "No instance tells its settings; try again.", code="not_answering")
    config, *others = told.values()
    if any(other != config for other in others):
        raise HttpError(
            409,
            f"The instances of {model.name} have different settings; start all with the same options of vLLM.",
            code="instances_differ",
            details={"instances": told},
        )
    names = {"model": about["model_path"], "tokenizer": about["tokenizer_path"], "served_model_name": model.name}
    # TRL's init_communicator ends at this null. Else it would wait for a group that no instance joins.
    whole = {**config, "model_config": names | config["model_config"], "weight_transfer_config": None}
    return about | {"vllm_config": whole if config_format == "json" else str(whole)}


@router.post("/reset_prefix_cache")
async def reset_prefix_cache() -> dict[str, bool]:
    """Nothing to do: a request reads what other weights computed only where it asks for its session's (`kv`)."""
    return {"success": True}


refuse(router, "draft_unsupported", "start_draft_weight_update")
refuse(router, "abort_unsupported", "abort_requests")
refuse(router, "collective_rpc_unsupported", "collective_rpc")


class Settings(TypedDict):
    """The settings that an instance tells of its engine (server/instance/openapi.py)."""

    model_config: dict[str, Any]
    lora_config: dict[str, Any] | None
    parallel_config: dict[str, Any]


async def _settings(instance: Instance) -> Settings | None:
    """None: it does not answer, or is of an older release."""
    try:
        status, body = await fetch(instance, b"/hotswap/config", TIMEOUT_S)
        return msgspec.json.decode(body, type=Settings) if status == 200 else None
    except (HttpError, TimeoutError, ValueError):
        return None


async def _collect(model: Model, draft: WeightUpdate, info: dict[str, Any]) -> None:
    if _PICKLES & info.keys():
        raise refused_pickle()
    if _TENSOR_FIELDS & info.keys():
        raise refused("nccl_unsupported", "update_weights with names and shapes")
    match info:
        case {"checkpoint_path": str(path), **rest} if not rest:
            draft.use(path)
        case {"safetensors": str(encoded), **rest} if not rest:
            await draft.add(encoded, room(await model_schema(model)))
        case _:
            raise _unknown("update_info", info)


def _unknown(field: str, info: dict[str, Any]) -> HttpError:
    return HttpError(
        400,
        f"{field} with {', '.join(sorted(info)) or 'nothing'} is not understood here; update_info takes "
        "`checkpoint_path` (an absolute path on the gateway's host) or `safetensors` (base64), init_info nothing.",
        code="invalid_parameter",
        param=field,
    )
