"""No role below `admin` has the gateway open a file, ask an address or say a secret of the client's choice.

The walk takes every route of the admin port from its declaration, and every text that the route takes from its schema,
so that a new route or field is walked by itself. The kernel (inotify) says whether any process opened the canary.
"""

from __future__ import annotations

import ast
import ctypes
import functools
import inspect
import itertools
import os
import re
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import msgspec
import orjson
import pytest
from fastapi.routing import APIRoute

from server import api
from server.gateway import GatewayConfig
from server.gateway.access import roles
from server.gateway.app import build_app
from server.gateway.config import ROLES, NamedSettings
from server.gateway.middleware import is_public
from server.gateway.models.publishing import Pusher
from server.gateway.release.policy import Policy
from tests.server.gateway.admin.test_admin import SETTINGS, checkpoint
from tests.server.gateway.harness import ADMIN, CONFIG, KEYS, RunningGateway, ask, new_key, request, running_gateway
from tests.server.gateway.upstream import Received, answering, upstream
from weightsync import ensure_arena
from weightsync.control.records import VersionRecord

SECRET = "canary-3f9a1c7e5b"
IN_ACCESS, IN_OPEN = 0x1, 0x20
# A route whose texts act with another request: what has to come before, and what after.
AROUND = {"/update_weights": ("/start_weight_update", "/finish_weight_update")}
Schema = dict[str, Any]


# every way to put a text into what a route takes


class Form:
    """A JSON schema, with the definitions that it refers to. `words`: what free objects may have as fields; `usual`: a
    text that the gateway takes in most places, so that it looks at the others too."""

    def __init__(self, definitions: dict[str, Schema], words: list[str], usual: str = "a") -> None:
        self._definitions, self._words, self._usual = definitions, words, usual

    def plain(self, schema: Schema) -> Any:
        """The least that the schema admits."""
        schema = self._resolved(schema)
        if "const" in schema or "enum" in schema:
            return schema.get("const", schema.get("enum", [None])[0])
        match schema.get("type"):
            case "string":
                return "a" * 8 if "pattern" in schema else self._usual
            case "integer" | "number":
                return max(1, schema.get("minimum", 1))
            case "array":
                return [self.plain(schema.get("items", {}))] * max(1, schema.get("minItems", 1))
            case "object":
                fields = schema.get("properties", {})
                wanted = {"path", *schema.get("required", ())}  # a push looks at nothing without a path
                return {name: self.plain(field) for name, field in fields.items() if name in wanted}
        return schema.get("type") == "boolean"

    def with_text(self, schema: Schema, text: str) -> Iterator[Any]:
        """The same with `text` in each place that may have one: all of them, one after the other."""
        schema = self._resolved(schema)
        if "anyOf" in schema:
            yield from itertools.chain(*(self.with_text(one, text) for one in schema["anyOf"]))
        elif schema.get("type", "string") == "string" and not schema.keys() & {"const", "enum"}:
            yield text
        elif schema.get("type") == "array":
            yield from ([one] for one in self.with_text(schema.get("items", {}), text))
        elif schema.get("type") == "object":
            plain, fields = self.plain(schema), schema.get("properties", {})
            for name, field in fields.items():
                yield from ({**plain, name: one} for one in self.with_text(field, text))
            within = schema.get("additionalProperties", not fields)
            if isinstance(within, dict):
                for name in ("draft", "lora/x", text):
                    yield from ({**plain, name: one} for one in self.with_text(within, text))
            elif within:
                yield from ({word: text} for word in self._words)

    def _resolved(self, schema: Schema) -> Schema:
        if "$ref" in schema:
            return self._resolved(self._definitions[schema["$ref"].rpartition("/")[2]])
        first = [one for one in schema.get("anyOf", ()) if one.get("type") != "null"]
        return self._resolved(first[0]) if len(first) == 1 else schema


@functools.cache
def words_of(module: str) -> list[str]:
    """The texts in a module's code that may be names of fields."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    texts = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return sorted({text for text in texts if isinstance(text, str) and re.fullmatch("[a-z][a-z_]{2,39}", text)})


def policies(text: str) -> Iterator[str]:
    """Release policies as YAML with `text` in each of their places, and in the sections of an older release."""
    (_,), definitions = msgspec.json.schema_components([Policy])
    form = Form(definitions, [])
    plain = {"steps": [{"traffic": 100, "for": "1s"}]}
    yield from (orjson.dumps(plain | one).decode() for one in form.with_text(definitions["Policy"], text))
    judged = {"steps": [{"traffic": 50, "for": 0, "conditions": [{"metric": f"reward/{text}", "min": 0.5}]}]}
    for named in ({text: {}}, {text: {"url": text}}, {text: {"key_file": text}}):
        yield orjson.dumps(judged | {"rewards": named}).decode()
        for name in ("name", "file"):
            asked = [{name: text, "by": text, "min": 0.1}]
            yield orjson.dumps(judged | {"rewards": named, "evaluation": asked}).decode()


@functools.cache
def declared() -> tuple[dict[str, Any], dict[tuple[str, str], Callable[..., Any]]]:
    """The document of the admin port, and the function of each method and path."""
    app = build_app(GatewayConfig(store="sqlite:///nowhere/store.db", model="toy"))
    routes = [route for route in app.routes if isinstance(route, APIRoute)]
    return app.openapi(), {(method, route.path): route.endpoint for route in routes for method in route.methods}


class Walk:
    """Every route of the admin port with every request that has a canary in one place, and `usual` in the others."""

    def __init__(self, canaries: list[str], usual: str) -> None:
        self._document, self._endpoints = declared()
        self._canaries, self._usual = canaries, usual
        self.routes = sorted(pair for pair in self._endpoints if not is_public(pair[1]))
        self.forwarded = [(row.method, row.path) for row in api.ROUTES if row.admin]

    def requests(self, method: str, path: str) -> Iterator[tuple[str, bytes]]:
        """Targets and bodies."""
        if (method, path) in self.forwarded:
            for canary in self._canaries:
                for body in ({"prompt": canary}, {"messages": [{"role": "user", "content": _media(canary)}]}):
                    yield path, orjson.dumps({"model": "toy", **body})
            return
        operation = self._document["paths"].get(path, {}).get(method.lower(), {})
        words = words_of(inspect.unwrap(self._endpoints[method, path]).__module__)
        form = Form(self._document["components"]["schemas"], words, self._usual)
        content = operation.get("requestBody", {}).get("content", {})
        schema = content.get("application/json", {}).get("schema")
        names = [p["name"] for p in operation.get("parameters", ()) if p["in"] == "query"]
        plain = orjson.dumps(form.plain(schema)) if schema else b"{}"
        for canary in self._canaries:
            target = re.sub(r"\{\w+\}", lambda _, text=canary: quote(text, safe=""), path)
            yield target, plain
            yield from ((f"{target}?{urlencode({name: canary})}", plain) for name in names)
            if schema is None:
                yield from ((target, orjson.dumps({word: canary})) for word in ("path", "url", "file"))
                continue
            for text in (canary, *(policies(canary) if path.startswith("/admin/releases") else ())):
                yield from ((target, orjson.dumps(body)) for body in form.with_text(schema, text))


def _media(url: str) -> list[dict[str, Any]]:
    return [{"type": kind, kind: {"url": url}} for kind in ("image_url", "audio_url", "video_url")]


# what the canaries see


class Watched:
    """Whether any process opens or reads these files and directories."""

    def __init__(self, *paths: Path) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._fd = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        for path in paths:
            assert libc.inotify_add_watch(self._fd, os.fsencode(path), IN_ACCESS | IN_OPEN) >= 0

    def opened(self) -> bool:
        try:
            return bool(os.read(self._fd, 1 << 16))
        except BlockingIOError:
            return False

    def close(self) -> None:
        os.close(self._fd)


@asynccontextmanager
async def traps(directory: Path) -> AsyncIterator[tuple[list[str], Watched, Callable[[], int]]]:
    """A checkpoint and a file that nobody may read, and an address that nobody may ask; `connections` of it."""
    (canary := directory / "canary").mkdir(mode=0o700)
    checkpoint(canary, **{SECRET: (2,)})
    secret = canary / "secret"
    secret.touch(0o600)
    secret.write_text(SECRET)
    async with upstream() as listener:
        with closing(Watched(canary, *canary.iterdir())) as watched:
            yield [str(secret), str(canary), listener.address], watched, lambda: listener.connections


@pytest.fixture
def usual(tmp_path: Path) -> str:
    """A checkpoint that keys may name."""
    return checkpoint(tmp_path / "usual")


@pytest.fixture
def gateway(tmp_path: Path, usual: str, arena: Path) -> Iterator[RunningGateway]:
    (home := tmp_path / "gateway").mkdir()
    with running_gateway(home, upstream=SETTINGS, swap_deadline_s=0.05, checkpoints=(usual,)) as running:
        running.store.run(ensure_arena(running.store.store, arena))
        for version in (1, 2):
            ready = VersionRecord(version, "ready", "", 0, "", None, None, "t", 1, 0.0, "", 0)
            running.store.put(KEYS.version(version), ready.to_json())
        yield running


async def send(gateway: RunningGateway, method: str, target: str, body: bytes, key: str) -> tuple[int, str]:
    answer = await gateway.ask(request(method, target, body, key), admin=True)
    return answer.status, answer.body.decode(errors="replace")


def in_store(gateway: RunningGateway) -> str:
    items, _ = gateway.store.list("")
    return "".join(item.value.decode(errors="replace") for item in items)


def sent(requests: list[Received]) -> str:
    return b"".join(one.raw_head + one.body for one in requests).decode(errors="replace")


@pytest.mark.parametrize("role", [role for role in ROLES if role != "admin"])
async def test_no_route_opens_what_a_request_names(
    gateway: RunningGateway, tmp_path: Path, usual: str, caplog: pytest.LogCaptureFixture, role: str
) -> None:
    _, key = await new_key(gateway, scopes=[role])
    reached = set()
    async with gateway.instance(answering(CONFIG)) as instance, traps(tmp_path) as (canaries, watched, connections):
        walk = Walk(canaries, usual)
        for method, path in (*walk.routes, *walk.forwarded):
            needed = roles.NEEDED.get(f"{method} {path}", roles.FORWARDED)
            may = ROLES.index(role) >= ROLES.index(needed)
            for target, body in itertools.islice(walk.requests(method, path), None if may else 1):
                before, after = AROUND.get(path, ("", "")) if may else ("", "")
                if before:
                    await send(gateway, "POST", before, b"", key)
                status, said = await send(gateway, method, target, body, key)
                assert (status == 403) >= (not may), (method, target)
                if after and status == 200:
                    said += (await send(gateway, "POST", after, b"", key))[1]
                    await send(gateway, "POST", "/shutdown_weight_transfer_engine", b"", key)
                assert SECRET not in said, (method, target, body)
                assert not watched.opened(), (method, target, body)
                if status < 300:
                    reached.add(path)
        assert not connections()
        assert SECRET not in in_store(gateway) + caplog.text + sent(instance.requests)
        assert "/admin/weights" in reached  # the walk gets past the gate


@pytest.mark.parametrize("text", ["\xa0", "\0", "a/b", "a" * 600, ""], ids=["space", "null", "slash", "long", "empty"])
async def test_no_text_is_a_fault_of_the_server(gateway: RunningGateway, usual: str, text: str) -> None:
    """A request with a text that fits nowhere gets what it asks for, or an error of the client's, from each route."""
    async with gateway.instance(answering(CONFIG)):
        walk = Walk([text], usual)
        for method, path in walk.routes:
            for target, body in walk.requests(method, path):
                status, said = await send(gateway, method, target, body, ADMIN)
                late = '"code":"swap_timeout"' in said  # a busy machine stages nothing in time
                assert status < 500 or status == 501 or late, (method, target, body, said)


@pytest.mark.parametrize(
    ("guard", "path", "canary"),
    [
        ("paths", "/admin/weights", 1),
        ("paths", "/update_weights_from_disk", 1),
        ("paths", "/update_weights", 1),
        ("names", "/admin/weights", 0),
    ],
)
async def test_the_walk_finds_a_door(
    gateway: RunningGateway,
    tmp_path: Path,
    usual: str,
    monkeypatch: pytest.MonkeyPatch,
    guard: str,
    path: str,
    canary: int,
) -> None:
    """The canary is opened where a guard is taken out: each route that takes a path, and a name that is no name."""
    if guard == "paths":
        monkeypatch.setattr(Pusher, "_permitted", lambda _, named: named)
    else:
        monkeypatch.setattr(NamedSettings, "find", lambda _, flag, name: name)
    _, key = await new_key(gateway, scopes=["publisher"])
    async with traps(tmp_path) as (canaries, watched, _):
        for target, body in Walk(canaries[canary : canary + 1], usual).requests("POST", path):
            before, after = AROUND.get(path, ("", ""))
            if before:
                await send(gateway, "POST", before, b"", key)
            await send(gateway, "POST", target, body, key)
            if after:
                await send(gateway, "POST", after, b"", key)
                await send(gateway, "POST", "/shutdown_weight_transfer_engine", b"", key)
            if watched.opened():
                return
    pytest.fail("nothing opened the canary")


@pytest.mark.parametrize("way", ["beside", "above", "link", "draft", "twice"])
async def test_a_path_outside_of_the_checkpoints_is_for_the_admin(
    gateway: RunningGateway, tmp_path: Path, usual: str, way: str
) -> None:
    """By another path, by `..`, by a symbolic link, as a second part and as the same part again."""
    outside = checkpoint(tmp_path / "outside")
    (Path(usual) / "link").symlink_to(outside)
    paths = {"beside": outside, "above": f"{usual}/../outside", "link": f"{usual}/link"}
    parts = {"draft": {"draft": outside}, "twice": {"": outside}}.get(way, {})
    wanted = {"path": paths.get(way, usual), "parts": parts, "activate": False}
    _, key = await new_key(gateway, scopes=["publisher"])
    status, said = await ask(gateway, "POST", "/weights", key, **wanted)
    assert (status, said["code"]) == (403, "path_not_allowed")
    assert (await ask(gateway, "POST", "/weights", key, path=usual, activate=False))[0] == 200
    if way in paths:
        assert (await ask(gateway, "POST", "/weights", ADMIN, **wanted))[0] == 200
