"""POST /v1/feedback: what a client says of an answer that it got (server/answers/feedback.py)."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any, Final

from fastapi import APIRouter, Request

from server.answers.feedback import LARGEST, PASS_ON_S, FeedbackRequest, read_posted
from server.errors import HttpError
from server.gateway.access.keys import Principal
from server.gateway.access.records import ADMIN, INFER
from server.gateway.admin.deps import GatewayDep
from server.gateway.gateway import Gateway
from server.gateway.middleware import FEEDBACK
from server.gateway.wire.bodies import NONE

LOOK_UPS: Final = 8  # of one key at a time: each is a lease, a record and a watch in the store, for seconds
router = APIRouter(tags=["feedback"])
_BODY: dict[str, Any] = {
    "required": True,
    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/FeedbackRequest"}}},
}


@router.post(FEEDBACK, openapi_extra={"requestBody": _BODY})
async def rate(request: Request, gateway: GatewayDep) -> dict[str, Any]:
    """Takes a rating, a score or a correction of a recent answer. A later one replaces it."""
    principal = principal_of(request, gateway)
    body = await request.body()
    if len(body) > LARGEST:
        raise HttpError(413, f"Feedback may have {LARGEST} bytes.", code="feedback_too_large")
    posted = read_posted(body)
    _admit(gateway, principal)
    admin = ADMIN in principal.scopes
    taken_by = "this" if await _taken_here(gateway, posted, principal, admin=admin) else "another"
    return {"id": posted.id, "status": "accepted", "gateway": taken_by}


def principal_of(request: Request, gateway: Gateway) -> Principal:
    """The owner of the request. An admin key is an owner even where inference asks for no key."""
    key = request.state.key
    if gateway.keys.open_inference:
        origin = request.headers.get("origin")
        if origin is not None:
            host, listening = request.headers.get("host", ""), (request.scope["server"] or ("", 0))[0]
            gateway.origins.check(origin.encode("latin-1"), host.encode("latin-1"), listening)
        if key:
            try:
                return gateway.keys.authorize(key, ADMIN)
            except HttpError as error:
                if error.status != 401:  # any key, or none, does there
                    raise
    return gateway.keys.authorize(key, INFER)


def _admit(gateway: Gateway, principal: Principal) -> None:
    """Counts as one request of the key, which costs no tokens. Raises HttpError (429)."""
    grant = gateway.limits.admit(principal, NONE, FEEDBACK, b"")
    if grant is not None:
        grant.settle(None, 400)


async def _passed_on(gateway: Gateway, posted: FeedbackRequest, digest: bytes | None) -> bool:
    """Whether another gateway knows the answer, of whichever model it is. Raises HttpError (429)."""
    if gateway.look_ups[digest] >= LOOK_UPS:
        message = (
            f"{LOOK_UPS} answers of this key are being looked for at other gateways; try again in {PASS_ON_S:g} s."
        )
        raise HttpError(429, message, code="feedback_busy", retry_after_s=math.ceil(PASS_ON_S))
    gateway.look_ups[digest] += 1
    try:
        for model in gateway.models.values():
            if await model.passing.pass_on(posted, digest):
                return True
        return False
    finally:
        gateway.look_ups[digest] -= 1
        gateway.look_ups += Counter()  # without those at zero


async def _taken_here(gateway: Gateway, posted: FeedbackRequest, principal: Principal, *, admin: bool) -> bool:
    """Whether this gateway gave the answer; else another one has taken what is said of it. Raises HttpError (404)."""
    digest = None if admin else principal.digest
    by: Any = "admin" if admin else "key"
    recent = gateway.desk.recent
    try:
        try:
            known = recent.find(posted.id, digest)
        except HttpError as error:
            if error.code != "unknown_answer":
                raise
            await gateway.desk.settled()  # an answer that says its id itself may still have to be read
            known = recent.find(posted.id, digest)
    except HttpError as error:
        if error.code == "unknown_answer" and await _passed_on(gateway, posted, digest):
            return False
        raise
    gateway.desk.rate(known.rated(posted, by=by), known.principal)
    return True
