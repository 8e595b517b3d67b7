"""The FastAPI side: health and metrics, on the admin port the rest, and a 404 in OpenAI's shape for everything else."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import PlainTextResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.routing import Match

from server.errors import HttpError
from server.gateway.access.roles import undeclared
from server.gateway.admin import (
    adapters_sglang,
    adapters_vllm,
    approvals,
    editions,
    feedback,
    fleet,
    keys,
    listing,
    releases,
    trainers,
    weights,
)
from server.gateway.admin.deps import GatewayDep
from server.gateway.config import GatewayConfig
from server.gateway.console import routes as console
from server.gateway.error_map import to_http
from server.gateway.gateway import Gateway
from server.gateway.middleware import AdminGate, RequestIdMiddleware, error_response, is_public
from server.gateway.openapi import admin as admin_document
from server.gateway.routes import elsewhere
from weightsync.errors import WeightSyncError

PROBE_TIMEOUT_S = 1.0


def build_app(config: GatewayConfig) -> FastAPI:
    """The app of one gateway process; opens the store when the server starts."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[dict[str, Any]]:
        async with Gateway.open(config) as gateway:
            yield {"gateway": gateway}

    app = FastAPI(title="hotswap", lifespan=lifespan, redirect_slashes=False, openapi_url=None)  # it has its own
    app.add_exception_handler(HttpError, _http_error)
    app.add_exception_handler(WeightSyncError, _weightsync_error)
    app.add_exception_handler(HTTPException, _starlette_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_middleware(AdminGate)
    app.add_middleware(RequestIdMiddleware)
    app.router.routes.extend(_routes().routes)
    return app


@functools.cache
def _routes() -> APIRouter:
    """The same for every app: FastAPI takes a twentieth of a second to read their signatures."""
    router = APIRouter()
    _add_probes(router)
    own = (feedback, listing, weights, editions, fleet, trainers, keys, approvals, releases)
    for part in (*own, adapters_vllm, adapters_sglang, console):
        router.include_router(part.router)
    missing = undeclared(pair for pair in routes_of(router) if not is_public(pair[1]))
    assert not missing, f"access/roles.py does not say who may ask {', '.join(missing)}"
    return router


def routes_of(app: FastAPI | APIRouter) -> list[tuple[str, str]]:
    """Every route: method and path template."""
    routes = [route for route in app.routes if isinstance(route, APIRoute)]
    return [(method, route.path) for route in routes for method in sorted(route.methods)]


def _add_probes(app: APIRouter) -> None:
    @app.get("/healthz", tags=["health"])
    async def healthz() -> dict[str, str]:
        """This process is up."""
        return {"status": "ok"}

    @app.get("/readyz", tags=["health"])
    async def readyz(gateway: GatewayDep) -> dict[str, Any]:
        """An instance that serves a committed version answers, and this process is not about to stop."""
        if gateway.leaving:
            raise HttpError(503, "This gateway is about to stop; ask another one.", code="leaving")
        ready = 0
        for model in gateway.models.values():
            able = [i for i in model.fleet.serving if i.record.active_version is not None]
            ready += len(able)
            instance = await model.readiness.find(able, PROBE_TIMEOUT_S) if able else None
            if instance is not None:
                return {"status": "ready", "instance": instance.id, "version": instance.record.active_version}
        if not ready:
            raise gateway.default.fleet.unavailable()
        raise HttpError(
            503, f"{ready} instance(s) are registered, none answers its health check.", code="not_answering"
        )

    @app.get("/health", tags=["health"], response_class=Response)
    @app.get("/ping", tags=["health"], response_class=Response)
    @app.post("/ping", tags=["health"], response_class=Response)
    async def health(gateway: GatewayDep) -> Response:
        """200 when an instance serves, under the names by which vLLM's and SGLang's clients ask; /readyz asks it."""
        if not any(model.fleet.serving for model in gateway.models.values()):
            raise gateway.default.fleet.unavailable()
        return Response()

    @app.get("/load", tags=["health"])
    async def load(gateway: GatewayDep) -> dict[str, int]:
        """Requests that instances work on for this gateway, under vLLM's name for the number."""
        return {
            "server_load": sum(i.working for model in gateway.models.values() for i in model.fleet.instances.values())
        }

    @app.get("/openapi.json", tags=["health"])
    async def openapi(request: Request, gateway: GatewayDep) -> Response:
        """The OpenAPI document of this port."""
        if request.state.admin_port:
            body = await asyncio.to_thread(admin_document, request.app)  # the first takes a tenth of a second
        else:
            body = await gateway.document.get(request.app)
        return Response(body, media_type="application/json")

    @app.get("/metrics", tags=["health"], response_class=PlainTextResponse)
    async def metrics(gateway: GatewayDep) -> Response:
        """Prometheus text format."""
        return Response(await gateway.pages.all(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def _http_error(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, HttpError)
    return error_response(exc, request.scope["path"])


async def _weightsync_error(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, WeightSyncError)
    return error_response(to_http(exc), request.scope["path"])


def _methods_of(request: Request) -> list[str]:
    """Of all routes at this path: Starlette tells of the first one alone."""
    routes = [r for r in request.app.routes if isinstance(r, APIRoute) and r.matches(request.scope)[0] != Match.NONE]
    return sorted({method for route in routes for method in route.methods})


async def _starlette_error(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException)
    path = request.scope["path"]
    if exc.status_code == 405:
        allow = ", ".join(_methods_of(request))
        return error_response(HttpError(405, f"Use {allow} for {path}.", allow=allow), path)
    if exc.status_code == 404:
        return error_response(HttpError(404, elsewhere(path, admin_port=request.state.admin_port)), path)
    return error_response(HttpError(400, str(exc.detail)), path)


async def _validation_error(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, RequestValidationError)
    first = exc.errors()[0]
    where = ".".join(str(part) for part in first["loc"] if part != "body")
    error = HttpError(400, f"{where or 'body'}: {first['msg']}", code="invalid_parameter", param=where or None)
    return error_response(error, request.scope["path"])
