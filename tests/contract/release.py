"""A release of another project as its contract test asks it: by its sources, installed or not.

Names are written "module:Class.method". Of routes there are those that a server declares, that its clients ask, and
that answer here.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import itertools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from server import api
from server.gateway import GatewayConfig
from server.gateway.app import build_app, routes_of
from tests.packages import unpacked

ROOT = Path(__file__).parents[2]
OURS = ("weightsync", "server", "trainer", "loadtest", "scripts", "tests")


def installed(package: str) -> Path:
    """The folder that holds it."""
    spec = importlib.util.find_spec(package)
    assert spec is not None
    return Path(next(iter(spec.submodule_search_locations or ()))).parent


def sources(package: str, distribution: str, release: str, own: str) -> Sources:
    """`own`: the release that is installed."""
    return Sources(release, installed(package) if release == own else unpacked(distribution, release))


def has(release: Sources, name: str, *texts: str) -> None:
    """Each of `texts` stands in the source of `name`."""
    source = release.source(name)
    assert not [text for text in texts if text not in source], name


def takes(release: Sources, name: str, parameters: str) -> None:
    """A function's parameters are these: "a, b"; "a, b, ..." are its first ones, and "..., a, b" are among them."""
    found, wanted = release.parameters(name), parameters.split(", ")
    if wanted[0] == "...":
        assert set(wanted[1:]) <= set(found), name
    elif wanted[-1] == "...":
        assert found[: len(wanted) - 1] == wanted[:-1], name
    else:
        assert found == wanted, name


@functools.cache
def imported(package: str) -> frozenset[str]:
    """Every name that a program of ours imports from this package of another project."""
    return frozenset(
        f"{node.module}:{alias.name}"
        for path in itertools.chain.from_iterable((ROOT / folder).rglob("*.py") for folder in OURS)
        if f"from {package}" in (text := path.read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == package
        for alias in node.names
    )


class Sources:
    """A release as the folder `root` has its package. Nothing of it is imported.

    A name is found where it is defined: through `from ... import`, and, of a method, in the bases of the class. A name
    that the release has not raises LookupError.
    """

    def __init__(self, version: str, root: Path) -> None:
        self.version, self.root = version, root

    def has(self, name: str) -> bool:
        """Whether there is such a name, or such a module in the package."""
        try:
            self._node(name)
        except LookupError:
            return self._has_module(name.replace(":", "."))
        return True

    def parameters(self, name: str) -> list[str]:
        """Of a function, in order."""
        function = self._node(name)
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            raise LookupError(f"{name} is no function")
        given = function.args
        every = [*given.posonlyargs, *given.args, given.vararg, *given.kwonlyargs, given.kwarg]
        names = [one.arg for one in every if one is not None]
        bound = any("classmethod" in ast.unparse(decorator) for decorator in function.decorator_list)
        return names[1:] if bound else names

    def source(self, name: str) -> str:
        """Of a module ("vllm.x"), a class or a function, as it is written."""
        text = self._file(name.partition(":")[0]).read_text()
        if ":" not in name:
            return text
        where, node = self._located(name)
        found = ast.get_source_segment(self._file(where).read_text(), node)
        assert found is not None
        return found

    def bases(self, name: str) -> list[str]:
        """The names of a class's own bases."""
        node = self._node(name)
        assert isinstance(node, ast.ClassDef), name
        return [ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases]

    def attributes(self, name: str) -> set[str]:
        """Names that a class or a module defines or imports itself."""
        node = self._node(name) if ":" in name else self._module(name)
        assert isinstance(node, ast.ClassDef | ast.Module), name
        return set(_defined(node.body))

    def _node(self, name: str) -> ast.AST:
        return self._located(name)[1]

    def _located(self, name: str) -> tuple[str, ast.AST]:
        """(the module that defines it, its definition)."""
        module, _, path = name.partition(":")
        first, *rest = path.split(".")
        where, node = self._in_module(module, first)
        for part in rest:
            where, node = self._in_class(where, node, part)
        return where, node

    def _in_module(self, module: str, name: str) -> tuple[str, ast.AST]:
        found = _defined(self._module(module).body).get(name)
        if isinstance(found, ast.ImportFrom):
            original = next(alias.name for alias in found.names if (alias.asname or alias.name) == name)
            origin = self._origin(module, found)
            if self._has_module(f"{origin}.{original}"):
                return f"{origin}.{original}", self._module(f"{origin}.{original}")
            return self._in_module(origin, original)
        if found is None:
            raise LookupError(f"{self.version} has no {module}:{name}")
        return module, found

    def _in_class(self, module: str, node: ast.AST, name: str) -> tuple[str, ast.AST]:
        if not isinstance(node, ast.ClassDef):
            raise LookupError(f"{self.version}: {module} has no class for {name!r}")
        if (found := _defined(node.body).get(name)) is not None:
            return module, found
        for base in node.bases:
            plain = ast.unparse(base).partition("[")[0]
            try:
                return self._in_class(*self._in_module(module, plain), name)
            except LookupError:  # the base of another package, or one that has it not
                continue
        raise LookupError(f"{self.version}: {module}:{node.name} has no {name}")

    def _origin(self, module: str, found: ast.ImportFrom) -> str:
        if not found.level:
            return found.module or ""
        package = module.split(".") if self._file(module).name == "__init__.py" else module.split(".")[:-1]
        parts = package[: len(package) - found.level + 1]
        return ".".join([*parts, found.module] if found.module else parts)

    @functools.cache  # noqa: B019 - as long as the tests run
    def _module(self, module: str) -> ast.Module:
        return ast.parse(self._file(module).read_text())

    def _has_module(self, module: str) -> bool:
        try:
            return bool(self._file(module))
        except LookupError:
            return False

    def _file(self, module: str) -> Path:
        path = self.root.joinpath(*module.split("."))
        found = next((f for f in (path.with_suffix(".py"), path / "__init__.py") if f.exists()), None)
        if found is None:
            raise LookupError(f"{self.version} has no module {module}")
        return found


def _defined(body: list[ast.stmt]) -> dict[str, ast.AST]:
    """The names that statements define, in blocks of `if` and `try` too."""
    found: dict[str, ast.AST] = {}
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).partition(".")[0]: node for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id: node for target in targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.If | ast.Try):
            inner = [*node.body, *node.orelse, *(s for h in getattr(node, "handlers", ()) for s in h.body)]
            found = _defined(inner) | found
    return found


# routes: "POST /v1/completions", with their parameters as `{}`

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
    nodes = ast.walk(call.args[0]) if call.args else ()
    texts = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    path = texts[-1] if texts else ""  # of an expression, the last constant, such as a default
    if not path.startswith("/"):
        return
    if verb in METHODS:
        yield f"{verb.upper()} {path}"
    elif verb in ("api_route", "add_api_route"):
        for keyword in call.keywords:
            if keyword.arg == "methods":
                yield from (f"{method} {path}" for method in ast.literal_eval(keyword.value))
