"""The extent of the code: lines, files and error classes of each package, and the words of the documentation.

`python scripts/extent.py` counts the tracked files: lines as `wc -l` does, and the classes that derive from an
exception, over other classes too.
"""

from __future__ import annotations

import ast
import builtins
import re
import subprocess
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("weightsync", "server", "trainer", "loadtest", "client", "tests", "scripts")


def tracked(pattern: str) -> list[Path]:
    """The tracked files that match a pathspec of git."""
    found = subprocess.run(["git", "ls-files", "-z", pattern], cwd=ROOT, check=True, capture_output=True, text=True)
    return [ROOT / name for name in found.stdout.split("\0") if name]


def bases_of(node: ast.ClassDef) -> set[str]:
    """The last names of a class's bases, as they are imported."""
    return {ast.unparse(base).rpartition(".")[2] for base in node.bases}


def errors_of(trees: dict[Path, ast.Module]) -> dict[Path, list[str]]:
    """The classes of each file that derive from an exception."""
    bases: dict[str, set[str]] = defaultdict(set)
    classes = {
        path: [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)] for path, tree in trees.items()
    }
    for nodes in classes.values():
        for node in nodes:
            bases[node.name] |= bases_of(node)

    def is_error(name: str, seen: frozenset[str] = frozenset()) -> bool:
        if name in bases and name not in seen:
            return any(is_error(base, seen | {name}) for base in bases[name])
        built_in = getattr(builtins, name, None)
        return (isinstance(built_in, type) and issubclass(built_in, BaseException)) or name == "HTTPException"

    return {
        path: [node.name for node in nodes if any(map(is_error, bases_of(node)))] for path, nodes in classes.items()
    }


def main() -> None:
    rows = []
    trees = {path: ast.parse(path.read_text()) for package in PACKAGES for path in tracked(f"{package}/*.py")}
    errors = errors_of(trees)
    for package in PACKAGES:
        paths = [path for path in trees if path.is_relative_to(ROOT / package)]
        lines = sum(path.read_bytes().count(b"\n") for path in paths)
        rows.append((package, lines, len(paths), sum(len(errors[path]) for path in paths)))
    print(f"{'package':12}{'lines':>9}{'files':>7}{'errors':>8}")
    for name, lines, files, classes in rows:
        print(f"{name:12}{lines:>9,}{files:>7}{classes:>8}")
    words = sum(len(re.findall(r"\S+", path.read_text())) for path in tracked("docs/*.md"))
    print(f"\nwords of docs/: {words:,}")


if __name__ == "__main__":
    main()
