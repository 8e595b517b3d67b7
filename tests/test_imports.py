"""Which module imports which: no circles, and packages that must not know each other do not."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("server", "trainer", "weightsync", "loadtest")
# What a package may import of the others.
MAY = {
    "weightsync": set[str](),
    "trainer": {"weightsync"},
    "server": {"weightsync"},
    "loadtest": {"server", "trainer", "weightsync"},
}


def modules() -> dict[str, Path]:
    found = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(name: str, path: Path, known: dict[str, Path]) -> Iterator[str]:
    """Modules that `name` imports, also inside of functions; not what only a type checker reads."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    todo: list[ast.AST] = [ast.parse(path.read_text())]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            todo += node.orelse
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *filter(None, [base])])
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                if (target := whole if whole in known else base) in known:
                    yield target
        else:
            todo += ast.iter_child_nodes(node)


@functools.cache
def graph() -> dict[str, set[str]]:
    known = modules()
    return {name: set(imported(name, path, known)) - {name} for name, path in known.items()}


def circles() -> list[list[str]]:
    """Strongly connected components of more than one module (Tarjan)."""
    links, index, low = graph(), dict[str, int](), dict[str, int]()
    stack: list[str] = []
    found = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in sorted(links[name]):
            if other not in index:
                visit(other)
            if other in stack:
                low[name] = min(low[name], low[other])
        if low[name] == index[name]:
            at = stack.index(name)
            if len(stack) - at > 1:
                found.append(sorted(stack[at:]))
            del stack[at:]

    for name in sorted(links):
        if name not in index:
            visit(name)
    return found


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert circles() == []


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_only_what_is_below_it(package: str) -> None:
    wrong = {
        f"{name} imports {other}"
        for name, others in graph().items()
        if name.split(".")[0] == package
        for other in others
        if other.split(".")[0] not in MAY[package] | {package}
    }
    assert not wrong
