"""Trainers on the admin port: their reports of steps, and what the routes of other systems' trainers have in common.

`/admin/training/metrics` is where a trainer reports, `/admin/series` has the curves of the console. The routes of other
systems are in adapters_vllm.py and adapters_sglang.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, RootModel, model_validator

from server.errors import HttpError
from server.gateway.access.records import By
from server.gateway.admin import editions, weights
from server.gateway.admin.deps import ModelDep
from server.gateway.admin.fleet import MAX_TTL_S, PauseLeases
from server.gateway.admin.weights import SwapOptions
from server.gateway.models.model import Model
from server.gateway.models.publishing import Edition, Publication, WeightUpdate
from weightsync.control.parts import LORA
from weightsync.format.manifest import Schema

router = APIRouter(prefix="/admin", tags=["admin"])

MAX_FIELDS = 64
LARGEST_STEP = 2**53  # above it a JSON number is no exact integer to a browser

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_./-]{0,63}$")]


class StepMetrics(RootModel[Annotated[dict[Name, FiniteFloat], Field(min_length=2, max_length=MAX_FIELDS)]]):
    """Numbers by name; `step` is one of them, `reward`, `loss`, `accuracy` and `version` are what the console draws."""

    @model_validator(mode="after")
    def _has_a_step(self) -> StepMetrics:
        step = self.root.get("step")
        if step is None or step != int(step) or not 0 <= step <= LARGEST_STEP:
            raise ValueError(f"`step` must be there, a whole number from 0 to {LARGEST_STEP}")
        if "time" in self.root:
            raise ValueError("`time` is set by the gateway; leave it out")
        return self


@router.post("/training/metrics")
async def report(model: ModelDep, body: StepMetrics) -> dict[str, Any]:
    """Keeps what a trainer reports of one step; several requests of the same step are put together."""
    return {"point": await model.training.add(body.root)}


@router.get("/series")
async def series(model: ModelDep) -> dict[str, Any]:
    """Throughput of the fleet over the last ten minutes, and the training's last steps."""
    return {
        "model": model.name,
        "throughput": [asdict(sample) for sample in model.throughput.samples],
        "training": model.training.points,
    }


PAUSE_TTL_S = 120.0  # these trainers never renew: a longer pause than this ends by itself


class LoadAdapter(BaseModel):
    """The fields that vLLM's LoadLoRAAdapterRequest and SGLang's LoadLoRAAdapterReqInput have in common."""

    model_config = ConfigDict(extra="forbid", strict=True)
    lora_name: Annotated[str, Field(max_length=190)]
    lora_path: Annotated[
        str, Field(min_length=1, max_length=4096, description="a directory in PEFT's layout on the gateway's host")
    ]

    async def publish(self, model: Model, by: By) -> None:
        """As an edition that all instances have loaded, in the place of one of this name. Raises HttpError,
        PublishError."""
        edition = Edition.model_construct(name=self.lora_name, path=self.lora_path, keep=1)
        await editions.published(model, edition, by)


class UnloadAdapter(BaseModel):
    """UnloadLoRAAdapterRequest and UnloadLoRAAdapterReqInput; the numbers of both mean nothing here."""

    model_config = ConfigDict(extra="forbid", strict=True)
    lora_name: Annotated[str, Field(max_length=190)]
    lora_int_id: int | None = None
    lora_id: str | None = None
    rid: Any = None
    http_worker_ipc: Any = None

    async def publish(self, model: Model, by: By) -> None:
        """Withdraws the editions of this name, and takes a part of the active version away by a swap. Raises HttpError,
        also if there is neither."""
        gone = await editions.withdrawn(model, self.lora_name, by)
        if gone and self.lora_name not in model.fleet.adapters:
            return
        try:
            await publish(model, Publication.model_construct(without=[LORA + self.lora_name]), by)
        except HttpError as error:
            if not gone or error.code != "bad_part":  # a version that was before may have had it
                raise


async def publish(
    model: Model, what: Publication, by: By, label: str | None = None, *, collected: bool = False
) -> dict[str, Any]:
    """Publishes `what` and swaps it in: its version and the report. Raises HttpError, SwapError, PublishError.

    `label` is the trainer's own name for its weights, noted as the version's step if it is a number. `collected`: see
    Pusher.push.
    """

    async def then(version: int) -> dict[str, Any]:
        swap = await weights.swap_in(model, version, SwapOptions(), by)
        if "pending" in swap:
            asked = f"It is published; `hotswap approve {swap['pending']['id']}` by somebody else swaps it in"
            raise HttpError(409, f"Version {version} waits. {asked}.", code="approval_required", details=swap)
        return {"version": version, "swap": swap}

    return await model.pusher.push(what, then, by, step=_step(label), collected=collected)


async def publish_update(model: Model, update: WeightUpdate, label: str | None, by: By) -> dict[str, Any]:
    """The same for what was collected, which is dropped whatever becomes of it."""

    async def work() -> dict[str, Any]:
        try:
            what = Publication.model_construct(path=str(update.seal()))
            return await publish(model, what, by, label, collected=update.collected)
        finally:
            update.drop()

    return await model.pusher.keep(work())


def room(schema: Schema | None) -> int | None:
    """Bytes that an update may have."""
    return None if schema is None else sum(spec.nbytes for spec in schema.tensors.values()) + weights.SLACK


async def active_version(model: Model) -> int | None:
    """The committed version, if there is one."""
    record = await weights.active_record(model)
    return record.version if record is not None else None


def pauses(model: Model) -> PauseLeases:
    """The pauses of the served model."""
    return PauseLeases(model.store, model.name)


def pause_ttl(ttl_s: float | None) -> float:
    """Seconds a trainer's pause may last. Raises HttpError (400)."""
    if ttl_s is None:
        return PAUSE_TTL_S
    if not 1 <= ttl_s <= MAX_TTL_S:
        raise HttpError(
            400, f"`ttl_s` must be between 1 and {MAX_TTL_S:g} seconds.", code="invalid_parameter", param="ttl_s"
        )
    return ttl_s


def check_mode(mode: str | None, freezing: tuple[str, ...]) -> None:
    """A pause freezes requests in flight; what else a trainer may want of it is refused. Raises HttpError (501)."""
    if mode is not None and mode not in freezing:
        raise HttpError(
            501,
            f"Pausing with mode {mode!r} is not done here: a pause freezes requests, which go on with the new weights. "
            f"Use {' or '.join(freezing)}; to end requests at a swap, send them with x-hotswap-policy: abort.",
            code="pause_mode_unsupported",
        )


# Refusals, by code: what these trainers may ask of others, and what to do here instead.
REFUSALS = {
    "nccl_unsupported": "{verb}: there is no NCCL group and no shared device memory between trainer and engines here. "
    "Write weights with weightsync.Publisher on this host, or weightsync.RemotePublisher from another one; or save a "
    "checkpoint and run `hotswap weights push DIR`, or send its path or its safetensors to the routes of "
    "docs/adapters.md.",
    "memory_unsupported": "Instances keep their memory: versions are staged beside the one that serves, so nothing "
    "need be released.",
    "abort_unsupported": "Requests are ended by their clients: close the connection, or send them with "
    "x-hotswap-policy: abort.",
    "draft_unsupported": "The draft model is a part of a version here: publish it with weightsync.Publisher.",
    "collective_rpc_unsupported": "Methods of the workers are not called from outside: publish weights with start, "
    "update and finish, or with weightsync.Publisher.",
}


def refused(code: str, verb: str = "") -> HttpError:
    """One of REFUSALS; "nccl_unsupported" answers what needs a communication group or shared device memory."""
    return HttpError(501, REFUSALS[code].format(verb=verb), code=code)


def refuse(router: APIRouter, code: str, *verbs: str, methods: Sequence[str] = ("POST",)) -> None:
    """Has the routes of these names answer with a refusal."""

    async def answer(request: Request) -> None:
        raise refused(code, request.url.path.removeprefix("/"))

    for verb in verbs:
        for method in methods:
            router.add_api_route(f"/{verb}", answer, methods=[method])


def _step(label: str | None) -> int | None:
    return int(label) if label is not None and label.isascii() and label.isdigit() and len(label) < 19 else None
