"""`GET /openapi.json` of both ports: the document of the public port, and that of the admin port.

The public one tells of the forwarded routes what an instance tells of them in its own document, and what the gateway
adds: the wishes, the keys, the errors. It is made when it is first asked for, and kept while that instance is there.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import orjson
from fastapi import FastAPI

from server import api
from server.answers.feedback import FeedbackRequest
from server.api import Forwarded
from server.errors import HttpError
from server.gateway.access.keys import KeyRing
from server.gateway.access.roles import needed
from server.gateway.fleet.instance import Instance
from server.gateway.fleet.scrape import fetch
from server.gateway.fleet.view import Fleet
from server.gateway.metrics import release
from server.gateway.middleware import FEEDBACK, is_public
from server.gateway.models.directory import Directory
from server.gateway.terms import Wish
from server.key_limits import RATE_HEADERS

log = logging.getLogger("hotswap.gateway")

PATH = b"/hotswap/openapi.json"  # of an instance: server/instance/openapi.py
TIMEOUT_S = 10.0
RETRY_S = 1.0  # an instance that gave no document is not asked again at once
Json = dict[str, Any]
EVERY = ("400", "404", "405", "408", "413", "431", "500", "503")  # statuses of every route


class PublicDocument:
    """The document as bytes. Made by one request at a time, on a thread: it takes tens of milliseconds."""

    def __init__(self, directory: Directory, keys: KeyRing) -> None:
        self._directory = directory
        self._keys = keys
        self._making = asyncio.Lock()
        self._source: tuple[str, str, bool] | None = None
        self._bytes = b""
        self._failed_at = float("-inf")

    @property
    def _fleet(self) -> Fleet:
        """All models have the same routes."""
        return self._directory.main.fleet

    async def get(self, app: FastAPI) -> bytes:
        """The document. Raises HttpError (503) when no instance tells what it serves."""
        async with self._making:
            if not self._is_current():
                await self._make(app)
            return self._bytes

    def _is_current(self) -> bool:
        """An instance that is gone has perhaps made way for another vLLM; none at all is no reason to ask anew."""
        if self._source is None or self._source[2] != (not self._keys.open_inference):
            return False
        there = {(i.id, i.record.address) for i in self._fleet.instances.values()}
        return self._source[:2] in there or not self._fleet.serving

    async def _make(self, app: FastAPI) -> None:
        if not self._fleet.serving:
            raise self._fleet.unavailable()
        key_required = not self._keys.open_inference
        if time.monotonic() - self._failed_at > RETRY_S:
            for instance in list(self._fleet.serving):
                told = await _ask(instance)
                if told is not None:
                    self._bytes = await asyncio.to_thread(_build, app, told, key_required)
                    self._source = (instance.id, instance.record.address, key_required)
                    return
            self._failed_at = time.monotonic()
        raise HttpError(503, "No instance tells what its routes are; try again.", code="not_answering")


async def _ask(instance: Instance) -> bytes | None:
    try:
        status, body = await fetch(instance, PATH, TIMEOUT_S)
    except (HttpError, TimeoutError) as failure:
        log.warning("%s did not tell its OpenAPI document: %s", instance.id, failure or "it took too long")
        return None
    return body if status == 200 else None


def _build(app: FastAPI, told: bytes, key_required: bool) -> bytes:
    return orjson.dumps(public(app, orjson.loads(told), key_required=key_required))


_ADMIN_FAILS = (*EVERY, "401", "403", "409", "422", "501", "504", "507")


def public(app: FastAPI, instance: Json, *, key_required: bool) -> Json:
    """The document of the public port. `instance` is an instance's own one, `app` has the routes not forwarded."""
    own = app.openapi()
    paths = {path: _operations(item, _fails(path)) for path, item in own["paths"].items() if is_public(path)}
    routes, schemas = _forwarded(instance)
    keys: list[Json] = [{"bearer": []}, {"apiKey": []}]
    for item in (*routes.values(), paths[FEEDBACK]):
        for operation in item.values():
            operation["security"] = keys if key_required else [{}, *keys]
    return _document("Inference, health and metrics.", {**routes, **paths}, schemas)


def admin(app: FastAPI) -> bytes:
    """The document of the admin port, as bytes. Routes that are forwarded from there too are in the public one."""
    own = app.openapi()
    paths: Json = {}
    for path, item in own["paths"].items():
        paths[path] = _operations(item, _fails(path))
        for method, operation in paths[path].items():
            role = [] if is_public(path) else [needed(method.upper(), path)]
            keyless = is_public(path) and path != FEEDBACK
            operation["security"] = [] if keyless else [{"bearer": role}, {"apiKey": role}]
    description = "Weights, swaps, keys, the fleet; and the routes of other systems' trainers."
    return orjson.dumps(_document(description, paths, own["components"]["schemas"]))


def _fails(path: str) -> tuple[str, ...]:
    if path == FEEDBACK:
        return (*EVERY, "401", "403", "429")
    return EVERY if is_public(path) else _ADMIN_FAILS


def _document(description: str, paths: Json, schemas: Json) -> Json:
    shared = components()
    shared["schemas"] = {**schemas, **shared["schemas"]}
    info = {"title": "hotswap", "version": release(), "description": description}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": shared}


def _operations(item: Json, fails: tuple[str, ...]) -> Json:
    """The app's operations, with the errors it really answers: FastAPI's 422 is a 400 here."""
    return {method: _operation(operation, fails) for method, operation in item.items()}


def _operation(operation: Json, fails: tuple[str, ...]) -> Json:
    answers = {status: _answer(told) for status, told in operation["responses"].items() if status < "400"}
    return {**operation, "responses": {**answers, **error_responses(fails)}}


def _answer(told: dict[str, Any]) -> Json:
    return {**told, "headers": {**told.get("headers", {}), **header_refs("x-request-id")}}


_REF = re.compile(r"#/components/schemas/(.+)")
_FAILS = (*EVERY, "401", "403", "409", "422", "429", "501", "502", "504")
_RESPONSE_ID: Json = {
    "name": "id",
    "in": "path",
    "required": True,
    "schema": {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,128}$"},
}
_RESPONSE_QUERY: list[Json] = [
    {"name": "starting_after", "in": "query", "schema": {"type": "integer"}},
    {"name": "stream", "in": "query", "schema": {"type": "boolean", "default": False}},
]


def _forwarded(instance: Json) -> tuple[Json, Json]:
    """Paths and the schemas they need, of the public routes that `instance` (its own document) has."""
    found: Json = {}
    definitions: Json = dict(instance["components"]["schemas"])
    for route in (route for route in api.ROUTES if not route.admin):
        method = route.method.lower()
        told = instance["paths"].get(route.at_instance, {}).get(method)
        if told is not None:
            found.setdefault(route.path, {})[method] = _forwarded_operation(route, told, definitions)
    return found, _reachable(found, definitions)


def _forwarded_operation(route: Forwarded, told: Json, definitions: Json) -> Json:
    operation: Json = {
        "operationId": route.method.lower() + re.sub(r"[^a-z]+", "_", route.path).rstrip("_"),
        "tags": [route.tag],
        "parameters": _parameters(route),
        "responses": {"200": _forwarded_answer(told["responses"]["200"]), **error_responses(_FAILS)},
    }
    if route.method == "POST" and route.body:
        operation["requestBody"] = told["requestBody"]
        _add_wish(told["requestBody"]["content"]["application/json"]["schema"], definitions)
    return operation


def _parameters(route: Forwarded) -> list[Json]:
    listed = [*([_RESPONSE_ID] if "{id}" in route.path else []), *(_RESPONSE_QUERY if route.query else [])]
    if route.method == "POST":
        listed += [{"$ref": f"#/components/parameters/{name}"} for name in parameters()]
    return listed


def _forwarded_answer(told: Json) -> Json:
    headers = header_refs("x-request-id", "x-hotswap-weight-version", *RATE_HEADERS)
    return {**told, "headers": headers}


def _add_wish(schema: Json, definitions: Json) -> None:
    """The body's field `hotswap`, to every form a body may have."""
    for each in schema.get("anyOf") or schema.get("oneOf") or [schema]:
        name = _named(each)
        if name is not None:
            definition = definitions[name]
            wish = {"$ref": "#/components/schemas/Wish"}
            definitions[name] = {**definition, "properties": {**definition["properties"], "hotswap": wish}}


def _named(schema: Json) -> str | None:
    match = _REF.fullmatch(schema.get("$ref", ""))
    return match[1] if match else None


def _reachable(used: Any, definitions: Json) -> Json:
    """Those of `definitions` that are referred to, directly or not."""
    found: Json = {}
    to_do = list(_references(used))
    while to_do:
        name = to_do.pop()
        if name not in found and name in definitions:
            found[name] = definitions[name]
            to_do += _references(definitions[name])
    return found


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str) and (name := _named(value)) is not None:
            yield name
        for each in value.values():
            yield from _references(each)
    elif isinstance(value, list):
        for each in value:
            yield from _references(each)


# parts that routes share: errors, headers, keys

ERROR: Json = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type"],
            "properties": {
                "message": {"type": "string", "description": "What is wrong, and what to do about it."},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"], "description": "The field or header to blame."},
                "code": {
                    "type": ["string", "integer", "null"],
                    "description": "A word where the gateway answers, the status where vLLM does.",
                },
            },
        }
    },
}
STATUSES = {
    "400": "The request is not what HTTP or the route allows.",
    "401": "No key, or one that is not known, has expired or was revoked.",
    "403": "A good key that may not do this.",
    "404": "There is no such thing here: route, model, response, version, pause, instance or key.",
    "405": "The path is served with other methods; `Allow` names them.",
    "408": "The request did not arrive in time.",
    "409": "The state of the fleet does not allow it, or the weights changed under an answer that was not to see it.",
    "413": "The body is too large.",
    "422": "Well formed, but it cannot be done.",
    "429": "This key asks for more than it may.",
    "431": "The head is too large.",
    "500": "A fault of the server; it is in its log.",
    "501": "The served model, or this server, does not do this.",
    "502": "The instance answered nonsense, or died before its first byte.",
    "503": "No instance can take the request now.",
    "504": "Its turn, a version or an answer did not come in time.",
    "507": "No room for one more version.",
}
RETRY_AFTER = ("429", "503", "504")
HEADERS: dict[str, Json] = {
    "x-request-id": {
        "required": True,
        "description": "The client's own if it is 1 to 128 characters of `A-Za-z0-9._-`, else a new one.",
        "schema": {"type": "string", "pattern": "^[A-Za-z0-9._-]{1,128}$"},
    },
    "x-hotswap-weight-version": {
        "description": "The version of the weights when the answer began.",
        "schema": {"type": "integer", "minimum": 1},
    },
    "retry-after": {"description": "Seconds.", "schema": {"type": "integer", "minimum": 0}},
    "www-authenticate": {"schema": {"type": "string"}},
    "allow": {"schema": {"type": "string"}},
    **{
        name: {
            "description": f"Of this key: {limit.help}.",
            "schema": {"type": "string" if name.startswith("x-ratelimit-reset-") else "integer"},
        }
        for name, limit in RATE_HEADERS.items()
    },
}


def header_refs(*names: str) -> Json:
    """References to some of HEADERS."""
    return {name: {"$ref": f"#/components/headers/{name}"} for name in names}


def error_responses(statuses: tuple[str, ...]) -> Json:
    """References to the answers with these statuses."""
    return {status: {"$ref": f"#/components/responses/Error{status}"} for status in sorted(statuses)}


def components() -> Json:
    """Everything the references here point at."""
    header = "As Anthropic's clients do; `api-key`, as Azure's clients send it, is the same."
    security = {
        "bearer": {"type": "http", "scheme": "bearer", "description": "`Authorization: Bearer KEY`"},
        "apiKey": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": header},
    }
    _, bodies = msgspec.json.schema_components([FeedbackRequest, Wish], ref_template="#/components/schemas/{name}")
    return {
        "schemas": {**bodies, "Error": ERROR},
        "responses": {f"Error{status}": _error(status, text) for status, text in STATUSES.items()},
        "headers": HEADERS,
        "parameters": parameters(),
        "securitySchemes": security,
    }


def parameters() -> dict[str, Json]:
    """Request headers of every forwarded POST route, by name."""
    found = {}
    for field, told in msgspec.json.schema_components([Wish])[1]["Wish"]["properties"].items():
        name = "x-hotswap-" + field.replace("_", "-")
        found[name] = {"name": name, "in": "header", "description": told["description"], "schema": told["anyOf"][0]}
    session = "Requests with the same word go to the same instance while it has room."
    found["x-session-id"] = {"name": "x-session-id", "in": "header", "description": session}
    found["x-session-id"]["schema"] = {"type": "string"}
    return found


def _error(status: str, text: str) -> Json:
    names = ["x-request-id"]
    names += ["retry-after"] if status in RETRY_AFTER else []
    names += ["www-authenticate"] if status == "401" else []
    names += ["allow"] if status == "405" else []
    names += RATE_HEADERS if status == "429" else []
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {"description": text, "headers": header_refs(*names), "content": content}
