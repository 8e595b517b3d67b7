"""Imports run downward: no circle among modules, none among the folders of weightsync or of server, and packages that
must not know each other do not.

The graph holds every import, at module level and inside functions, except those under
`if TYPE_CHECKING`, which never run. An import of a package's parent is not an edge of its own:
Python runs `a/__init__.py` before `a/b.py` whatever `a/b.py` says.
"""

import ast
import graphlib
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("server", "weightsync", "trainer", "loadtest")
MAY_IMPORT = {"server": {"weightsync"}, "trainer": {"weightsync"}, "weightsync": set[str](), "loadtest": set(PACKAGES)}


def _sources(root: Path) -> dict[str, Path]:
    found = {}
    for path in itertools.chain.from_iterable((root / name).rglob("*.py") for name in PACKAGES):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def _running(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes below `node`, without the bodies of `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            for other in child.orelse:
                yield other
                yield from _running(other)
            continue
        yield child
        yield from _running(child)


def _imported(module: str, path: Path, modules: set[str]) -> set[str]:
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found = set()
    for node in _running(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parts, node.module] if node.module else parts)
            names = {f"{base}.{alias.name}" for alias in node.names}
            found |= names & modules
            if names - modules:
                found.add(base)
    return (found & modules) - {module}


def _graph(root: Path) -> dict[str, set[str]]:
    sources = _sources(root)
    return {module: _imported(module, path, set(sources)) for module, path in sources.items()}


def _folders(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """The graph of folders: a folder of files alone is one thing, and beside folders a file stands for itself."""
    holders = {module.rpartition(".")[0] for module in graph}

    def unit(module: str) -> str:
        folder = module if module in holders else module.rpartition(".")[0]
        return module if any(other.startswith(f"{folder}.") for other in holders) else folder

    found: dict[str, set[str]] = {}
    for module, targets in graph.items():
        found.setdefault(unit(module), set()).update({unit(target) for target in targets} - {unit(module)})
    return found


def _circle(graph: dict[str, set[str]]) -> list[str]:
    """Modules that import each other, in the order in which they do, the first again at the end; empty if none do."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def test_no_circle_of_imports_and_none_of_packages_that_must_not_know_each_other() -> None:
    graph = _graph(ROOT)
    circle = _circle(graph)
    assert not circle, "these modules import each other: " + " <- ".join(circle)
    for module, targets in graph.items():
        package = module.split(".")[0]
        crossings = {target for target in targets if target.split(".")[0] not in MAY_IMPORT[package] | {package}}
        assert not crossings, f"{module} imports {', '.join(sorted(crossings))}"


def test_the_product_never_names_its_benchmarks() -> None:
    """They are another distribution, which a server is without."""
    product = (path for module, path in _sources(ROOT).items() if not module.startswith("loadtest"))
    assert not [path for path in product if "loadtest" in path.read_text()]


@pytest.mark.parametrize("package", ["weightsync", "server"])
def test_no_circle_of_folders(package: str) -> None:
    graph = {module: targets for module, targets in _graph(ROOT).items() if module.split(".")[0] == package}
    circle = _circle(_folders(graph))
    assert not circle, "these folders import each other: " + " <- ".join(circle)


def test_folders_that_import_each_other_by_different_files_are_a_circle() -> None:
    graph = {
        "w.a.one": {"w.b.one"},
        "w.a.two": set[str](),
        "w.b.one": set[str](),
        "w.b.two": {"w.a.two"},
        "w.top": set[str](),
    }
    assert not _circle(graph)
    assert set(_circle(_folders(graph))) == {"w.a", "w.b"}
    graph["w.b.two"] = {"w.top"}
    assert _folders(graph) == {"w.a": {"w.b"}, "w.b": {"w.top"}, "w.top": set()}


def test_the_search_names_a_circle(tmp_path: Path) -> None:
    for package in PACKAGES:
        (tmp_path / package).mkdir()
    (tmp_path / "server" / "a.py").write_text("from server import b\n")
    (tmp_path / "server" / "b.py").write_text("def late():\n    from .c import thing\n")
    (tmp_path / "server" / "c.py").write_text("import server.a\n")
    (tmp_path / "server" / "d.py").write_text(
        "from typing import TYPE_CHECKING\nimport server.a\nif TYPE_CHECKING:\n    import server.e\n"
    )
    (tmp_path / "server" / "e.py").write_text("import server.d\n")
    circle = _circle(_graph(tmp_path))
    assert circle[0] == circle[-1]
    assert sorted(circle[1:]) == ["server.a", "server.b", "server.c"]
