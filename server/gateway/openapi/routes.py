"""`GET /openapi.json`: on the public port for everybody, on the admin port behind the key, as all there."""

from __future__ import annotations

import asyncio

import orjson
from fastapi import APIRouter, FastAPI, Request, Response

from server.gateway.deps import GatewayDep
from server.gateway.openapi import document

router = APIRouter(tags=["health"])


@router.get("/openapi.json")
async def openapi(request: Request, gateway: GatewayDep) -> Response:
    """The OpenAPI document of this port."""
    if request.state.admin_port:
        body = await asyncio.to_thread(_admin, request.app)  # the first takes a tenth of a second
    else:
        body = await gateway.document.get(gateway, request.app)
    return Response(body, media_type="application/json")


def _admin(app: FastAPI) -> bytes:
    return orjson.dumps(document.admin(app))
