"""A tokenizer, and a cache of its own for every test."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainer.config import AnswersData, ArrowData, CsvData, FileData, HubData, JsonlData, ParquetData, WebDatasetData
from trainer.data.cache import FileDataset
from trainer.data.parse import ANY, Needs
from trainer.data.tokenizer import Tokenizer

KINDS: dict[str, type[FileData]] = {
    "jsonl": JsonlData,
    "csv": CsvData,
    "arrow": ArrowData,
    "hub": HubData,
    "parquet": ParquetData,
    "webdataset": WebDatasetData,
    "answers": AnswersData,
}
Open = Callable[..., FileDataset]


def prompts(data: FileDataset) -> list[str]:
    return [data[i].prompt for i in range(len(data))]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOTSWAP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "records"


@pytest.fixture
def open_data(tokenizer: Tokenizer) -> Open:
    def opener(
        path: object, kind: str = "jsonl", needs: Needs = ANY, tokenizer: Tokenizer = tokenizer, **options: Any
    ) -> FileDataset:
        return FileDataset(KINDS[kind](path=str(path), **options), tokenizer, needs)

    return opener
