"""`POST /admin/weights/upload`: a version sent by a `RemotePublisher` on another host, as a delta or in full.

The body (weightsync/delta/format.py) goes to an unnamed file in the arena, which the kernel frees with the last process
that has it open: a connection lost half-way, or a gateway killed half-way, leaves nothing. Only when it has arrived
whole does a publication begin, in a process of its own (push.py); it is checked there, not here.
"""

from __future__ import annotations

import errno
import os
import tempfile
from typing import Annotated, Any, BinaryIO, Literal

from fastapi import APIRouter, Query, Request
from starlette.requests import ClientDisconnect

from server.errors import BadRequest, InsufficientStorage, PayloadTooLarge
from server.gateway.admin.push import Prepared
from server.gateway.deps import GatewayDep
from server.gateway.gateway import Gateway
from weightsync.ledger import ensure_arena
from weightsync.manifest import Schema
from weightsync.records import ActiveRecord, Keys, OnLost, TargetRecord
from weightsync.swap import activation

router = APIRouter(prefix="/admin", tags=["admin"])
SLACK = 64 << 20  # over the bytes of the tensors: the header, and a few bytes a block
FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

UploadId = Annotated[str, Query(pattern="^[A-Za-z0-9_-]{8,64}$", description="the same id again, the same version")]
Deadline = Annotated[float | None, Query(gt=0, le=3600, description="seconds to stage everywhere")]
Drain = Annotated[float | None, Query(ge=0, le=3600, description="for streams to end; rolling 30, else 0")]

Lost = Annotated[OnLost, Query(description="when an instance dies before the commit")]


@router.post("/weights/upload")
async def upload(
    gateway: GatewayDep,
    request: Request,
    upload_id: UploadId,
    activate: bool = False,
    mode: Literal["together", "rolling"] = "together",
    drain_s: Drain = None,
    deadline_s: Deadline = None,
    on_lost: Lost = "abort",
) -> dict[str, Any]:
    """Publishes what the body holds; with `activate`, asks for its swap and does not wait for it."""
    if request.headers.get("content-type") != "application/octet-stream":
        raise BadRequest("Send the version as application/octet-stream.", code="bad_content_type")

    async def then(answer: dict[str, Any]) -> dict[str, Any]:
        if activate:
            within_s = deadline_s or gateway.config.swap_deadline_s
            wish = activation.new_target(
                int(answer["version"]), "upload", within_s, mode=mode, drain_s=drain_s, on_lost=on_lost
            )
            await _ask_for(gateway, wish)
        return answer

    return await gateway.pusher.push_delta(await _received(gateway, request, upload_id), then)


async def _received(gateway: Gateway, request: Request, upload_id: str) -> Prepared:
    """The whole body, in an unnamed file, and the process that is to publish it. Raises HttpError."""
    arena = await ensure_arena(gateway.store)
    most = await _most(gateway, arena.free_nbytes())
    if int(request.headers.get("content-length", 0)) > most:
        raise _too_large(most)
    file = tempfile.TemporaryFile(dir=arena.directory, buffering=0)  # noqa: SIM115 - `Prepared` closes it
    prepared = await gateway.pusher.prepare(file, upload_id)
    try:
        await _copy(request, file, most)
    except BaseException as error:
        await prepared.discard()
        if isinstance(error, ClientDisconnect):
            raise BadRequest("The connection was lost half-way; nothing was kept.", code="upload_cut_off") from None
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
            raise InsufficientStorage(
                f"The arena has no room for the upload ({done:,} bytes so far): retire versions nobody needs, or "
                "enlarge it (--shm-size, or a larger emptyDir).",
                code="arena_full",
            ) from error


def _too_large(most: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"The upload has over {most:,} bytes, more than a version of this model takes.")


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


async def _most(gateway: Gateway, free: int) -> int:
    """Bytes an upload may have: what a version of the model takes in full; before the first, what there is room for."""
    found = await gateway.store.get(Keys(gateway.config.model).schema)
    if found is None:
        return free
    return sum(spec.nbytes for spec in Schema.from_json(found.value).tensors.values()) * 17 // 16 + SLACK


async def _ask_for(gateway: Gateway, wish: TargetRecord) -> None:
    """Write the target, unless the version is active already: it may have been sent a second time."""
    keys = Keys(gateway.config.model)
    found = await gateway.store.get(keys.active)
    if found is None or ActiveRecord.from_json(found.value).version != wish.version:
        await activation.request(gateway.store, keys, wish)
