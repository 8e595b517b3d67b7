"""Facts out of files of public repositories: answers, and the shapes of rows, whose texts become invented ones.

`python -m tests.world.facts DIRECTORY` extracts them anew from the repositories' files at the table's commits, which
lie as DIRECTORY/OWNER/NAME/PATH. Then run `python -m tests.world`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.world import REPOSITORY, facts, rows

KEPT = {"from", "role", "type", "name", "required"}  # keys whose texts are names
SHAPES = 20  # rows of one file, at most
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,40}")
_PLACEHOLDER = re.compile(r"<image>|\{\{\w+\}\}")


def golds(problems: list[dict[str, Any]]) -> list[str]:
    """The answers of problems."""
    return [problem["answer"] for problem in problems]


def said(answers: list[dict[str, Any]], read: dict[tuple[str, str], int]) -> list[tuple[str, str, int | None]]:
    """(gold, a model's answer, what it is worth) of those that have other letters than the gold. The worth is what a
    reader has `read`; None before."""
    pairs = [(found["answer"], found["prediction"]) for found in answers]
    differing = [(gold, answer) for gold, answer in pairs if _letters(answer) != _letters(f"\\boxed{{{gold}}}")]
    return [(gold, answer, read.get((gold, answer))) for gold, answer in differing if len(answer) < 200]


def _letters(text: str) -> str:
    return re.sub(r"\\left|\\right|\s|(?<=\\)d(?=frac)", "", text)


def shapes(found: list[Any]) -> list[Any]:
    """One row for each shape: its keys, roles and types, with invented texts."""
    reduced: dict[str, Any] = {}
    for row in found:
        reduced.setdefault(_shape(row), _invented(row, {}))
    return list(reduced.values())[:SHAPES]


def _shape(value: Any, key: str = "") -> str:
    if isinstance(value, dict):
        return f"{{{','.join(f'{name}:{_shape(part, name)}' for name, part in value.items())}}}"
    if isinstance(value, list):
        return f"[{','.join(_shape(part) for part in value)}]"
    if isinstance(value, str):
        inside = _json(value)
        if key == "tools" and isinstance(inside, list):
            return str(len(inside))
        return value if key in KEPT else f"{type(inside).__name__}{bool(value)}{_PLACEHOLDER.findall(value)[:1]}"
    return repr(value) if isinstance(value, bool) else type(value).__name__


def _invented(value: Any, texts: dict[str, str], key: str = "") -> Any:
    """The value with short texts. Equal ones stay equal."""
    if isinstance(value, dict):
        return {name: _invented(part, texts, name) for name, part in value.items()}
    if isinstance(value, list):
        return [_invented(part, texts, key) for part in value]
    if not isinstance(value, str) or not value or (key in KEPT and _NAME.fullmatch(value)):
        return value
    if (inside := _json(value)) is not None:
        return json.dumps(_invented(inside, texts))
    marks = "".join(dict.fromkeys(_PLACEHOLDER.findall(value)))
    return texts.setdefault(value, f"{marks}Text {len(texts) + 1}.")


def _json(text: str) -> Any:
    """Objects and lists as JSON in a text."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict | list) else None


def extracted(path: Path) -> Iterator[str]:
    """The lines of the facts of a file."""
    text = path.read_text()
    if path.suffix == ".txt":
        yield from (f"Text {number}." for number, _ in enumerate(text.splitlines()[:2], 1))
        return
    found = json.loads(text) if path.suffix == ".json" else [json.loads(line) for line in text.splitlines()]
    if path.stem.endswith("_answers"):
        old = facts(path.name)
        read = {(gold, answer): worth for gold, answer, worth in json.loads(old.read_text())} if old.exists() else {}
        kept: list[Any] = said(found, read)
    else:
        kept = golds(found) if path.stem.endswith("_test") else shapes(found)
    lines = [json.dumps(part, ensure_ascii=False) for part in kept]
    yield from lines if path.suffix == ".jsonl" else ["[", *(f"{line}," for line in lines[:-1]), lines[-1], "]"]


def main(directory: Path) -> None:
    for row in rows():
        if row.package.startswith(REPOSITORY):
            source = directory / row.package.removeprefix(REPOSITORY) / row.path
            facts(row.path).write_text("\n".join(extracted(source)) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
