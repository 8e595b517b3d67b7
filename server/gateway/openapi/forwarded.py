"""The forwarded routes of a document: of what an instance tells of vLLM's, the public ones, and what is added here."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from server.gateway.openapi.parts import EVERY, RATE_LIMITS, Json, error_responses, header_refs, parameters
from server.gateway.proxy.routes import Route, public_routes

_REF = re.compile(r"#/components/schemas/(.+)")
# What the instance calls a route whose path has a parameter.
_AT_INSTANCE = {
    "/v1/responses/{id}": "/v1/responses/{response_id}",
    "/v1/responses/{id}/cancel": "/v1/responses/{response_id}/cancel",
}
_FAILS = (*EVERY, "401", "403", "409", "422", "429", "501", "502", "504")
_TAGS = {
    "/v1/messages": "anthropic",
    "/v1/messages/count_tokens": "anthropic",
    "/generate": "tokens",
    "/tokenize": "tokens",
    "/detokenize": "tokens",
    "/tokenizer_info": "tokens",
    "/generative_scoring": "tokens",
    "/version": "health",
}
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


def paths(instance: Json) -> tuple[Json, Json]:
    """Paths and the schemas they need, of the public routes that `instance` (its own document) has."""
    found: Json = {}
    definitions: Json = dict(instance["components"]["schemas"])
    for route in public_routes():
        told = instance["paths"].get(_AT_INSTANCE.get(route.name, route.name), {}).get(_method(route))
        if told is not None:
            found.setdefault(route.name, {})[_method(route)] = _operation(route, told, definitions)
    return found, _reachable(found, definitions)


def _method(route: Route) -> str:
    return route.method.decode().lower()


def _operation(route: Route, told: Json, definitions: Json) -> Json:
    operation: Json = {
        "operationId": _identifier(route),
        "tags": [_TAGS.get(route.name, "openai")],
        "parameters": _parameters(route),
        "responses": {"200": _answer(told["responses"]["200"]), **error_responses(_FAILS)},
    }
    if route.json_body:
        operation["requestBody"] = told["requestBody"]
        _add_wish(told["requestBody"]["content"]["application/json"]["schema"], definitions)
    return operation


def _identifier(route: Route) -> str:
    """`post_v1_chat_completions`."""
    return _method(route) + re.sub(r"[^a-z]+", "_", route.name).rstrip("_")


def _parameters(route: Route) -> list[Json]:
    listed = [*([_RESPONSE_ID] if "{id}" in route.name else []), *(_RESPONSE_QUERY if route.takes_query else [])]
    if route.method == b"POST":
        listed += [{"$ref": f"#/components/parameters/{name}"} for name in parameters()]
    return listed


def _answer(told: Json) -> Json:
    headers = header_refs("x-request-id", "x-hotswap-weight-version", *RATE_LIMITS)
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
