"""Which routes a server of another project declares, which ones its clients ask, and which ones answer here.

A route is written "POST /v1/completions", with its parameters as `{}`.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from server import api
from server.gateway import GatewayConfig
from server.gateway.app import build_app, routes_of

METHODS = ("get", "post", "put", "delete", "websocket")


@functools.cache
def answered() -> frozenset[str]:
    """Those of the gateway, on either port."""
    app = build_app(GatewayConfig(store="sqlite:///nowhere/store.db", model="toy"))
    pairs = [*routes_of(app), *((row.method, row.path) for row in api.ROUTES)]
    return frozenset(plain(f"{method} {path}") for method, path in pairs)


def plain(route: str) -> str:
    return re.sub(r"\{[^}]*\}", "{}", route)


def declared(modules: Iterable[Path]) -> set[str]:
    """Those that FastAPI's decorators and `add_api_route` declare in sources."""
    return {plain(route) for path in modules for call in _calls(path) for route in _routes(call)}


def asked(modules: Iterable[Path], prefix: str) -> set[str]:
    """Those below `prefix` that a client's methods named after HTTP's (`get`, `_post`) ask."""
    calls = ((call, _spelt(call.args[0])) for path in modules for call in _calls(path) if call.args)
    return {
        f"{verb.upper()} {path}"
        for call, path in calls
        if isinstance(call.func, ast.Attribute) and (verb := call.func.attr.strip("_")) in METHODS
        if path.startswith(prefix)
    }


def _spelt(node: ast.expr) -> str:
    """A constant text, or one with `{}` for what is put in."""
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in parts)


def _calls(path: Path) -> Iterator[ast.Call]:
    return (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))


def _routes(call: ast.Call) -> Iterator[str]:
    """Of one call, if it declares any: a path that is no constant is not known."""
    verb = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    path = _constant(call.args[0]) if call.args else None
    if path is None or not path.startswith("/"):
        return
    if verb in METHODS:
        yield f"{verb.upper()} {path}"
    elif verb in ("api_route", "add_api_route"):
        for keyword in call.keywords:
            if keyword.arg == "methods":
                yield from (f"{method} {path}" for method in ast.literal_eval(keyword.value))


def _constant(node: ast.AST) -> str | None:
    """A text, or the last constant in an expression that makes one, such as a default."""
    found = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str)]
    return found[-1] if found else None
