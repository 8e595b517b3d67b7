"""Processes that tokenise: the same records as without them, and an end to all when one fails."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from tests.trainer.data.conftest import Open
from tests.trainer.data.writing import as_samples, jsonl, parquet, problems, shard
from trainer.data import cache
from trainer.errors import DataError


def children() -> list[psutil.Process]:
    return [p for p in psutil.Process().children() if "trainer.data.tokenise" in " ".join(p.cmdline())]


def test_any_number_of_them_gives_the_same_records(open_data: Open, tmp_path: Path) -> None:
    records = problems(400)
    for number in range(4):
        part = records[100 * number : 100 * number + 100]
        shard(tmp_path / f"s{number}.tar", as_samples(part))
        parquet(tmp_path / f"p{number}.parquet", part)
    for kind, pattern in (("webdataset", "s{0..3}.tar"), ("parquet", "p*.parquet")):
        alone = open_data(tmp_path / pattern, kind, workers=1, cache_dir=str(tmp_path / "1"))
        many = open_data(tmp_path / pattern, kind, workers=3, cache_dir=str(tmp_path / "3"), extra_keys=())
        assert [many[i] for i in range(400)] == [alone[i] for i in range(400)]
        assert [r["prompt"] for r in records] == [alone[i].prompt for i in range(400)]
        assert many.digest == alone.digest
    assert not children()


def test_the_first_bad_unit_ends_them_all(open_data: Open, tmp_path: Path) -> None:
    for number in range(6):
        jsonl(tmp_path / f"{number}.jsonl", problems(10) if number != 3 else [*problems(4), "no"])
    with pytest.raises(DataError, match=r"3\.jsonl, line 5: it is not an object"):
        open_data(tmp_path / "*.jsonl", workers=2)
    assert not children()


def test_one_that_dies_is_named_with_what_it_read(
    open_data: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        jsonl(tmp_path / f"{number}.jsonl", problems(10))
    original = cache._Process.__call__

    def dying(self: cache._Process, task: cache.Task) -> cache.Done:
        if task.unit.url.endswith("1.jsonl"):
            os.kill(self._process.pid, 9)
        return original(self, task)

    monkeypatch.setattr(cache._Process, "__call__", dying)
    with pytest.raises(DataError, match=r"tokenised .*1\.jsonl ended with status -9.*data\.workers"):
        open_data(tmp_path / "*.jsonl", workers=2)
    assert not children()


def test_small_data_is_not_worth_a_process(open_data: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    monkeypatch.setattr(cache, "_Process", lambda *_: started.append(1))
    for number in range(3):
        jsonl(tmp_path / f"{number}.jsonl", problems(10))
    assert len(open_data(tmp_path / "*.jsonl")) == 30
    assert not started
