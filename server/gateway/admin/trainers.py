"""What the routes of other systems' trainers have in common (adapters_vllm.py, adapters_sglang.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from server.errors import BadRequest, Unsupported
from server.gateway.admin import swaps
from server.gateway.admin.pause import MAX_TTL_S, PauseLeases
from server.gateway.admin.swaps import SwapOptions
from server.gateway.admin.updates import WeightUpdate
from server.gateway.gateway import Gateway
from weightsync.manifest import Schema
from weightsync.records import ActiveRecord, Keys

PAUSE_TTL_S = 120.0  # these trainers never renew: a longer pause than this ends by itself
SLACK = 64 << 20  # over the bytes of the tensors, for headers


async def publish(gateway: Gateway, path: Path, label: str | None) -> dict[str, Any]:
    """Publishes the checkpoint in `path` and swaps it in: its version and the report. Raises HttpError, SwapAborted.

    `label` is the trainer's own name for its weights, noted as the version's step if it is a number.
    """

    async def then(version: int) -> dict[str, Any]:
        return {"version": version, "swap": await swaps.activate(gateway, version, SwapOptions())}

    return await gateway.pusher.push(path, then, step=_step(label))


async def publish_update(gateway: Gateway, update: WeightUpdate, label: str | None) -> dict[str, Any]:
    """The same for what was collected, which is dropped whatever becomes of it."""

    async def work() -> dict[str, Any]:
        try:
            return await publish(gateway, update.seal(), label)
        finally:
            update.drop()

    return await gateway.pusher.keep(work())


async def model_schema(gateway: Gateway) -> Schema | None:
    """The tensors that every version must have; None before the first version."""
    found = await gateway.store.get(Keys(gateway.config.model).schema)
    return Schema.from_json(found.value) if found is not None else None


def room(schema: Schema | None) -> int | None:
    """Bytes that an update may have."""
    return None if schema is None else sum(spec.nbytes for spec in schema.tensors.values()) + SLACK


async def active_version(gateway: Gateway) -> int | None:
    """The committed version, if there is one."""
    found = await gateway.store.get(Keys(gateway.config.model).active)
    return ActiveRecord.from_json(found.value).version if found is not None else None


def pauses(gateway: Gateway) -> PauseLeases:
    """The pauses of the served model."""
    return PauseLeases(gateway.store, gateway.config.model)


def pause_ttl(ttl_s: float | None) -> float:
    """Seconds a trainer's pause may last. Raises BadRequest."""
    if ttl_s is None:
        return PAUSE_TTL_S
    if not 1 <= ttl_s <= MAX_TTL_S:
        raise BadRequest(
            f"`ttl_s` must be between 1 and {MAX_TTL_S:g} seconds.", code="invalid_parameter", param="ttl_s"
        )
    return ttl_s


def check_mode(mode: str | None, freezing: tuple[str, ...]) -> None:
    """A pause freezes requests in flight; what else a trainer may want of it is refused. Raises Unsupported."""
    if mode is not None and mode not in freezing:
        raise Unsupported(
            f"Pausing with mode {mode!r} is not done here: a pause freezes requests, which go on with the new weights. "
            f"Use {' or '.join(freezing)}; to end requests at a swap, send them with x-hotswap-policy: abort.",
            code="pause_mode_unsupported",
        )


def refused_group(verb: str) -> Unsupported:
    """The answer to what needs a communication group, or shared device memory, with the trainer."""
    return Unsupported(
        f"{verb}: there is no NCCL group and no shared device memory between trainer and engines here. Write weights "
        "with weightsync.Publisher on this host, or weightsync.RemotePublisher from another one; or save a checkpoint "
        "and run `hotswap weights push DIR`, or send its path or its safetensors to the routes of docs/adapters.md.",
        code="nccl_unsupported",
    )


def _step(label: str | None) -> int | None:
    return int(label) if label is not None and label.isascii() and label.isdigit() and len(label) < 19 else None
