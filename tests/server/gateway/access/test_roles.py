"""Roles on the admin port: each route asks for the least one that the table names, before it reads a body."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest

from server.gateway import GatewayConfig
from server.gateway.access import roles
from server.gateway.access.records import ADMIN, INFER, ROLES, Role, granted
from server.gateway.app import build_app, routes_of
from server.gateway.middleware import is_public
from tests.server.gateway.harness import ADMIN_KEY, RunningGateway, get, new_key, post, request, running_gateway


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGateway]:
    with running_gateway(tmp_path_factory.mktemp("roles")) as running:
        yield running


async def status(gateway: RunningGateway, method: str, path: str, header: str) -> tuple[int, str]:
    answer = await gateway.ask(request(method, path, headers=header), admin=True)
    found = orjson.loads(answer.body) if answer.body.startswith(b"{") else {}
    return answer.status, found.get("error", {}).get("code", "")


def test_a_role_has_the_rights_of_the_lower_ones() -> None:
    assert granted((INFER,)) == {INFER}
    assert granted(("operator", INFER)) == {INFER, "operator", "viewer"}
    assert granted((ADMIN,)) == set(ROLES)


def test_the_table_has_every_route_and_no_other(tmp_path: Path) -> None:
    app = build_app(GatewayConfig(store=f"sqlite://{tmp_path}/store.db", model="m"))
    routes = {f"{method} {path}" for method, path in routes_of(app) if path == "/openapi.json" or not is_public(path)}
    assert routes == set(roles.NEEDED)
    assert roles.undeclared([("GET", "/admin/weights"), ("PUT", "/admin/weights")]) == ["PUT /admin/weights"]


@pytest.mark.parametrize(
    ("method", "path", "role"),
    [
        ("GET", "/admin/weights", "viewer"),
        ("POST", "/admin/instances/a b/drain", "operator"),
        ("POST", "/admin/instances/a/b/drain", "admin"),  # there is none
        ("POST", "/admin/keys\n", "admin"),
        ("PUT", "/admin/weights", "admin"),
    ],
)
def test_what_no_route_answers_to_asks_for_the_highest_role(method: str, path: str, role: Role) -> None:
    assert roles.needed(method, path) == role


async def test_a_key_is_admitted_where_its_role_is_enough_and_nowhere_else(gateway: RunningGateway) -> None:
    headers = {}
    for role in ROLES:
        _, headers[role] = await new_key(gateway, scopes=[role])
    examples = {
        "viewer": ("GET", "/admin/weights"),
        "operator": ("POST", "/admin/weights/activate"),
        "publisher": ("POST", "/admin/weights"),
        "admin": ("POST", "/admin/keys"),
    }
    for needed, (method, path) in examples.items():
        for role, header in headers.items():
            enough = ROLES.index(role) >= ROLES.index(needed)
            got = await status(gateway, method, path, header)
            assert (got[1] != "insufficient_scope") == enough, (role, method, path, got)
            assert (got[0] == 403) == (not enough)
    assert await status(gateway, "POST", "/admin/keys%0A", headers["viewer"]) == (403, "insufficient_scope")


async def test_a_key_for_inference_alone_reads_nothing_and_a_role_alone_infers_nothing(gateway: RunningGateway) -> None:
    _, infer = await new_key(gateway)
    _, publisher = await new_key(gateway, scopes=["publisher"])
    assert await status(gateway, "GET", "/admin/weights", infer) == (403, "insufficient_scope")
    assert (await gateway.ask(post(headers=publisher))).status == 403
    assert (await gateway.ask(get("/healthz"), admin=True)).status == 200


async def test_the_admin_key_file_is_an_admin(gateway: RunningGateway) -> None:
    assert (await status(gateway, "POST", "/admin/keys", f"X-Api-Key: {ADMIN_KEY}\r\n"))[1] == "invalid_parameter"


def test_the_document_names_the_role_of_each_route(tmp_path: Path) -> None:
    from server.gateway.openapi import document

    app = build_app(GatewayConfig(store=f"sqlite://{tmp_path}/store.db", model="m"))
    told = orjson.loads(document.admin(app))
    assert told["paths"]["/admin/keys"]["post"]["security"] == [{"bearer": ["admin"]}, {"apiKey": ["admin"]}]
    assert told["paths"]["/healthz"]["get"]["security"] == []
