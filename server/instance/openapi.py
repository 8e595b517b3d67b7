"""The OpenAPI document of one instance: vLLM's routes as vLLM describes them, with the answers it leaves undescribed.

vLLM declares what its routes take, but not what most of them answer, and nothing of what is added here. The gateway
shows the public part of this document on its port (server/gateway/openapi.py).

`GET /hotswap/config` has those settings of vLLM's that the gateway tells on its admin port (`GET /server_info`). vLLM's
own route of that name would tell the environment too.
"""

from __future__ import annotations

import asyncio
import importlib
from functools import lru_cache
from typing import Any, Literal

import orjson
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, Field, TypeAdapter

from server import api

from .generate import GenerateRequest
from .inflight import Problem
from .provenance import problem_body

PROTOCOL = "vllm.entrypoints."
ANSWERS = {route.at_instance: route.answer for route in api.ROUTES if route.answer is not None}
SETTINGS = {  # parts of VllmConfig, and what is told of them
    "model_config": ("dtype", "logprobs_mode", "max_logprobs", "max_model_len"),
    "lora_config": ("max_lora_rank", "max_loras"),  # None: vLLM was started without --enable-lora
    "parallel_config": ("data_parallel_size", "pipeline_parallel_size", "tensor_parallel_size"),
}
STREAMS = frozenset(route.path for route in api.ROUTES if route.stream)
# Where `weight_versions` and `prompt_weight_versions` stand in whole answers (provenance.py).
ANNOTATED = (
    "CompletionResponseChoice",
    "ChatCompletionResponseChoice",
    "ResponsesResponse",
    "AnthropicMessagesResponse",
)


# A field of vLLM's, from 0.33 on, which is here with 0.32 too; and what a span then is.
WANTED = {
    "type": "boolean",
    "default": False,
    "description": "Spans as vLLM has them: versions as text; in streams `weight_versions` on last chunks alone.",
}
LABELLED = {
    "type": "object",
    "properties": {"version": {"type": "string"}, "start": {"type": "integer"}, "end": {"type": "integer"}},
    "required": ["version", "start", "end"],
}


class VllmVersion(BaseModel):
    """The answer of /version."""

    version: str


class WeightSpan(BaseModel):
    """Tokens `start` to `end` (exclusive) were computed by version `version` of the weights."""

    version: int = Field(ge=1)
    start: int = Field(ge=0)
    end: int = Field(ge=0)


class GeneratedChoice(BaseModel):
    """One sample of /generate."""

    index: int
    finish_reason: str | None
    text: str
    token_ids: list[int]
    logprobs: list[float] | None
    weight_versions: list[WeightSpan]
    prompt_weight_versions: list[WeightSpan]


class GenerateUsage(BaseModel):
    """Tokens of a request and its answer."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class GenerateResponse(BaseModel):
    """The whole answer of /generate, with `"stream": false`."""

    id: str
    model: str
    choices: list[GeneratedChoice]
    usage: GenerateUsage


router = APIRouter(include_in_schema=False)


@router.get("/hotswap/openapi.json")
async def openapi(request: Request) -> Response:
    """The document; half a second's work, once, and on a thread so that streams go on."""
    return Response(await asyncio.to_thread(_document_bytes, request.app), media_type="application/json")


@router.get("/hotswap/config")
async def config(request: Request) -> Response:
    """SETTINGS of the engine, as vLLM's `GET /server_info?config_format=json` has them: dtypes are text."""
    whole = request.app.state.vllm_config
    parts = {part: getattr(whole, part) for part in SETTINGS}
    told = {p: found and {name: getattr(found, name) for name in SETTINGS[p]} for p, found in parts.items()}
    return Response(orjson.dumps(told, default=str), media_type="application/json")


def add_missing(app: FastAPI) -> None:
    """Answer the routes of the gateway that vLLM leaves out for this model, or that it was not told to have."""
    there = {(method, route.path) for route in app.routes if isinstance(route, APIRoute) for method in route.methods}
    for route in api.ROUTES:
        if (route.method, route.at_instance) not in there:
            app.add_api_route(route.at_instance, _not_served, methods=[route.method], include_in_schema=False)


async def _not_served(request: Request) -> Response:
    path = request.url.path
    problem = Problem(
        f"The served model does not answer {path}, which vLLM has for other models or with another option: choose "
        "another route, or serve another model.",
        status=404,
        code="route_not_served",
    )
    return Response(orjson.dumps(problem_body(problem, path)), status_code=404, media_type="application/json")


@lru_cache(maxsize=1)
def _document_bytes(app: FastAPI) -> bytes:
    return orjson.dumps(document(app))


def document(app: FastAPI) -> dict[str, Any]:
    """`paths` and `components` of the routes of `app` that are described here; needs no engine.

    Not FastAPI's own: that builds validators of every answer anew, which takes seconds.
    """
    routes = [route for route in app.routes if isinstance(route, APIRoute) and route.path in ANSWERS]
    routes = [route for route in routes if route.endpoint is not _not_served]
    asked = {route.path: _request_type(route) for route in routes} | {"/generate": GenerateRequest}
    answered = {route.path: _answer_type(route.path) for route in routes} | {"/generate": GenerateResponse}
    schemas, definitions = _schemas(asked, answered)
    paths: dict[str, Any] = {}
    for path, method in [*((route.path, min(route.methods).lower()) for route in routes), ("/generate", "post")]:
        paths[path] = {method: _operation(path, schemas)}
    for name in ANNOTATED:
        if name in definitions:
            _annotate(definitions[name])
    for kind in ("ChatCompletion", "Completion"):
        if f"{kind}Request" in definitions:
            definitions[f"{kind}Request"]["properties"]["return_weight_versions"] = WANTED
            spans = definitions[f"{kind}ResponseChoice"]["properties"]["weight_versions"]
            spans["items"] = {"anyOf": [spans["items"], LABELLED]}
    return {"paths": paths, "components": {"schemas": definitions}}


def _request_type(route: APIRoute) -> Any:
    return route.body_field.field_info.annotation if route.body_field is not None else None


def _answer_type(path: str) -> Any:
    module, _, name = ANSWERS[path].partition(":")
    if not name:
        return VllmVersion
    return getattr(importlib.import_module(PROTOCOL + module), name)


Side = Literal["validation", "serialization"]


def _schemas(asked: dict[str, Any], answered: dict[str, Any]) -> tuple[dict[tuple[str, Side], Any], dict[str, Any]]:
    """A schema for each path and side, and the definitions they share, named so that no two clash."""
    wanted: list[tuple[str, Side, TypeAdapter[Any]]] = []
    wanted += [(path, "validation", TypeAdapter(of)) for path, of in asked.items() if of is not None]
    wanted += [(path, "serialization", TypeAdapter(of)) for path, of in answered.items()]
    found, shared = TypeAdapter.json_schemas(wanted, ref_template="#/components/schemas/{model}")
    definitions: dict[str, Any] = shared["$defs"]
    return dict(found), definitions


def _operation(path: str, schemas: dict[tuple[str, Side], Any]) -> dict[str, Any]:
    content = {"application/json": {"schema": schemas[path, "serialization"]}}
    if path in STREAMS:
        content["text/event-stream"] = {}  # its events differ by route; docs/api.md has them
    operation: dict[str, Any] = {"responses": {"200": {"description": "The answer", "content": content}}}
    if (path, "validation") in schemas:
        body = {"application/json": {"schema": schemas[path, "validation"]}}
        operation["requestBody"] = {"required": True, "content": body}
    return operation


def _annotate(schema: dict[str, Any]) -> None:
    spans = {"type": "array", "items": {"$ref": "#/components/schemas/WeightSpan"}}
    where = {
        "weight_versions": "Which weights wrote which tokens of the answer.",
        "prompt_weight_versions": "Which weights computed the prompt's keys and values.",
    }
    schema["properties"] |= {name: {**spans, "description": text} for name, text in where.items()}
