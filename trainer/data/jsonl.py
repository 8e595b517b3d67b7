"""Records from JSON lines: `{"prompt": ..., "target": ...}`, and optionally `"answer"` where it is not the target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trainer.config import JsonlData
from trainer.data.records import Record
from trainer.data.tokenizer import Tokenizer
from trainer.errors import DataError


class JsonlDataset:
    """A file of records, tokenised once. Raises DataError naming the file and line that cannot be used."""

    def __init__(self, config: JsonlData, tokenizer: Tokenizer) -> None:
        self._config, self._tokenizer = config, tokenizer
        self._records = self._read(config.path)
        self.held_out = self._read(config.eval_path) if config.eval_path else []
        if not self._records:
            raise DataError(f"{config.path} has no records. Add at least one line.")

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> Record:
        return self._records[index]

    def _read(self, path: str) -> list[Record]:
        try:
            lines = Path(path).read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"cannot read {path}: {error}. Name a UTF-8 file of JSON lines.") from None
        return [self._record(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]

    def _record(self, path: str, number: int, line: str) -> Record:
        where = f"{path}, line {number}"
        try:
            value = json.loads(line)
        except ValueError as error:
            raise DataError(f"{where} is not JSON ({error}). Write one object a line.") from None
        prompt = _text(value, self._config.prompt_key, where)
        target = _text(value, self._config.target_key, where, default="")
        prompt_ids = self._tokenizer.prompt(prompt)
        if not prompt_ids:
            raise DataError(f"{where}: the prompt has no tokens. Write a prompt.")
        return Record(
            index=number - 1,
            prompt=prompt,
            answer=_text(value, "answer", where, default=target),
            prompt_ids=prompt_ids,
            target_ids=self._tokenizer.continuation(target) if target else (),
        )


def _text(value: Any, key: str, where: str, default: str | None = None) -> str:
    found = value.get(key, default) if isinstance(value, dict) else None
    if not isinstance(found, str):
        raise DataError(f"{where}: {key!r} is not a text. Give every record a text under that key.")
    return found
