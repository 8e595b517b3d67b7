"""The two documents: of the public port, and of the admin port."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from server.gateway.middleware import is_public
from server.gateway.observe.metrics import release
from server.gateway.openapi import forwarded
from server.gateway.openapi.parts import EVERY, Json, components, error_responses, header_refs

_ADMIN_FAILS = (*EVERY, "401", "403", "409", "422", "501", "504", "507")


def public(app: FastAPI, instance: Json, *, key_required: bool) -> Json:
    """Of the public port. `instance` is an instance's own document, `app` has the routes that are not forwarded."""
    own = app.openapi()
    paths = {path: _operations(item, EVERY) for path, item in own["paths"].items() if is_public(path)}
    routes, schemas = forwarded.paths(instance)
    document = _document("Inference, health and metrics.", {**routes, **paths}, schemas)
    keys: list[Json] = [{"bearer": []}, {"apiKey": []}]
    for item in routes.values():
        for operation in item.values():
            operation["security"] = keys if key_required else [{}, *keys]
    return document


def admin(app: FastAPI) -> Json:
    """Of the admin port. What is forwarded from there too is told of on the public one."""
    own = app.openapi()
    paths: Json = {}
    for path, item in own["paths"].items():
        paths[path] = _operations(item, EVERY if is_public(path) else _ADMIN_FAILS)
        for operation in paths[path].values():
            operation["security"] = [] if is_public(path) else [{"bearer": []}, {"apiKey": []}]
    description = "Weights, swaps, keys, the fleet; and the routes of other systems' trainers."
    return _document(description, paths, own["components"]["schemas"])


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
