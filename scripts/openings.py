"""Names sentences of the packages and of docs/ that begin with a word that is no subject: `make check` runs it.

Looked at are docstrings, comments and paragraphs. The exit status is 1 if there is one.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("weightsync", "server", "trainer", "loadtest", "scripts", "examples", "tests")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
GENERATED = ("docs/options.md", "docs/reference")
OPENING = re.compile(r"(?:^|(?<=[.!] ))(?:What|Which|Who|Whoever|Whatever|Nobody|Somebody)\b[^.?]*\.?(?!\?)")


def in_source(text: str) -> Iterator[tuple[int, str]]:
    """The line and the text of each docstring, and of each block of comments."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, DOCUMENTED) and (said := ast.get_docstring(node)):
            yield node.body[0].lineno, said
    block: list[str] = []
    began = last = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            if block and token.start[0] != last + 1:
                yield began, " ".join(block)
                block = []
            began, last = (token.start[0] if not block else began), token.start[0]
            block.append(token.string.lstrip("# "))
    if block:
        yield began, " ".join(block)


def in_page(text: str) -> Iterator[tuple[int, str]]:
    """The line and the text of each paragraph, list item and cell; code and headings are none."""
    plain = re.sub(r"^```.*?^```", lambda code: "\n" * code[0].count("\n"), text, flags=re.MULTILINE | re.DOTALL)
    for number, line in enumerate(plain.splitlines(), 1):
        if not line.startswith("#"):
            for cell in line.strip("| ").split(" | "):
                yield number, re.sub(r"^(?:[-*]|\d+\.) ", "", cell)


def main() -> int:
    """The exit status."""
    found = 0
    for path in [*(p for name in PACKAGES for p in (ROOT / name).rglob("*.py")), *(ROOT / "docs").rglob("*.md")]:
        name = str(path.relative_to(ROOT))
        if name.startswith(GENERATED):
            continue
        text = path.read_text()
        for line, said in in_source(text) if path.suffix == ".py" else in_page(text):
            for opening in OPENING.finditer(" ".join(said.split())):
                found += 1
                print(f"{name}:{line}: begin with a noun: {opening[0][:80]}")
    return min(found, 1)


if __name__ == "__main__":
    sys.exit(main())
