"""`/openapi.json` of both ports, without an engine; live/test_openapi.py has vLLM's part."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import orjson
import pytest

from server.gateway import UpstreamSettings
from server.gateway.openapi import PATH
from server.gateway.routes import public_names
from tests.schemathesis.run import schemathesis
from tests.server.gateway.harness import ADMIN, CONFIG, RunningGateway, get, request, running_gateway
from tests.server.gateway.upstream import Link, Received, answering

COMPLETION = {
    "type": "object",
    "properties": {"prompt": {"type": "string"}, "more": {"$ref": "#/components/schemas/M"}},
}
TOLD: dict[str, Any] = {
    "paths": {
        "/v1/completions": {
            "post": {
                "requestBody": {
                    "required": True,
                    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Completion"}}},
                },
                "responses": {"200": {"description": "The answer", "content": {"application/json": {"schema": {}}}}},
            }
        },
        "/v1/responses/{response_id}": {"get": {"responses": {"200": {"description": "The answer"}}}},
        "/collective_rpc": {"post": {"responses": {"200": {"description": "Anything"}}}},
    },
    "components": {"schemas": {"Completion": COMPLETION, "M": {"type": "object"}, "Unused": {"type": "object"}}},
}


@pytest.fixture
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGateway]:
    settings = UpstreamSettings(scrape_interval_s=3600.0)
    with running_gateway(tmp_path_factory.mktemp("openapi"), upstream=settings) as g:
        yield g


async def tell(link: Link, received: Received) -> None:
    """An instance that has a document and settings, and is well."""
    await link.json(orjson.dumps(TOLD) if received.target == PATH.decode() else CONFIG)


async def document(gateway: RunningGateway) -> dict[str, Any]:
    answer = await gateway.ask(get("/openapi.json"))
    assert answer.status == 200, answer.body
    assert answer.headers["content-type"] == "application/json"
    return dict(orjson.loads(answer.body))


def references(value: Any) -> Iterator[str]:
    """Every `$ref` in a document."""
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for each in value.values():
            yield from references(each)
    elif isinstance(value, list):
        for each in value:
            yield from references(each)


def follow(document: Any, reference: str) -> Any:
    for step in reference.removeprefix("#/").split("/"):
        document = document[step]
    return document


async def test_the_public_document_has_public_routes_alone(gateway: RunningGateway) -> None:
    async with gateway.instance(tell):
        told = await document(gateway)
    own = {"/healthz", "/readyz", "/health", "/ping", "/load", "/metrics", "/openapi.json", "/v1/feedback"}
    own |= {"/console", "/console/{name}"}
    assert set(told["paths"]) == own | {"/v1/completions", "/v1/responses/{id}"}
    assert {"/v1/completions", "/v1/responses/{id}"} <= set(public_names())
    for reference in references(told):
        follow(told, reference)
    schemas = told["components"]["schemas"]
    assert {"Completion", "M", "Error", "Wish"} <= set(schemas)
    assert "Unused" not in schemas
    assert schemas["Completion"]["properties"]["hotswap"] == {"$ref": "#/components/schemas/Wish"}
    post = told["paths"]["/v1/completions"]["post"]
    assert {"400", "401", "403", "404", "405", "408", "409", "413", "429", "431", "502", "503", "504"} <= set(
        post["responses"]
    )
    assert "#/components/parameters/x-hotswap-version" in references(post["parameters"])


async def test_it_is_made_once_for_an_instance(gateway: RunningGateway) -> None:
    async with gateway.instance(tell) as up:
        first = await asyncio.gather(*(document(gateway) for _ in range(5)))
        assert all(each == first[0] for each in first)
        assert [r.target for r in up.requests].count(PATH.decode()) == 1
        gateway.unregister()
        assert await document(gateway) == first[0]  # nobody can be asked, and nothing says that it has changed


async def test_without_an_instance_there_is_nothing_to_tell(gateway: RunningGateway) -> None:
    assert (await gateway.ask(get("/openapi.json"))).refusal == (503, "no_instance")


async def test_an_instance_that_tells_nothing_is_not_pressed(gateway: RunningGateway) -> None:
    async with gateway.instance(answering(b"{}", b"404 Not Found")) as up:
        for _ in range(5):
            assert (await gateway.ask(get("/openapi.json"))).refusal == (503, "not_answering")
        assert 1 <= [r.target for r in up.requests].count(PATH.decode()) <= 5


async def test_the_admin_document_is_behind_the_key(gateway: RunningGateway) -> None:
    assert (await gateway.ask(get("/openapi.json"), admin=True)).status == 401
    answer = await gateway.ask(get("/openapi.json", ADMIN), admin=True)
    told = orjson.loads(answer.body)
    assert {"/admin/weights", "/admin/keys", "/pause"} <= set(told["paths"])
    for reference in references(told):
        follow(told, reference)
    assert told["paths"]["/admin/weights"]["get"]["security"]
    assert "422" in told["paths"]["/admin/weights"]["post"]["responses"]
    assert "HTTPValidationError" not in str(told["paths"])


async def test_allow_names_the_methods_of_all_routes_at_a_path(gateway: RunningGateway) -> None:
    answer = await gateway.ask(request("PUT", "/admin/weights", headers=ADMIN), admin=True)
    assert (answer.status, answer.headers["allow"]) == (405, "GET, POST")


@pytest.mark.broad
async def test_schemathesis_finds_nothing_on_the_admin_port(gateway: RunningGateway) -> None:
    """Every control route, with data that breaks the rules and data that does not: the store is empty, but for one
    instance."""
    async with gateway.instance(tell):
        url, key = f"{gateway.admin_url}/openapi.json", ("--header", ADMIN.strip())
        report = await asyncio.to_thread(
            schemathesis, url, "admin.toml", *key, "--phases", "coverage,fuzzing", "--max-examples", "3"
        )
    assert " passed" in report
