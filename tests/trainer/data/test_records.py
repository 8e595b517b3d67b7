"""Generated records, the order in which records are used, and how a run finds its place again; the tokenizer."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tests.trainer.data.conftest import Open
from tests.trainer.data.writing import as_samples, jsonl, problems, shard
from trainer.config import ArithmeticData
from trainer.data import records
from trainer.data.problems import Arithmetic
from trainer.data.records import Contents, take
from trainer.data.tokenizer import Tokenizer
from trainer.errors import DataError, ResumeError


def test_text_goes_there_and_back(tokenizer: Tokenizer) -> None:
    ids = tokenizer.continuation("12+3=15")
    assert ids[-1] == tokenizer.eos_id
    assert tokenizer.decode(ids) == "12+3=15"
    assert tokenizer.prompt("12") == ids[:2]


def test_a_missing_tokenizer_says_where_to_put_it(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"tokenizer\.json"):
        Tokenizer(tmp_path)


def test_held_out_problems_are_never_trained_on(tokenizer: Tokenizer) -> None:
    config = ArithmeticData(operands=3, largest=5, held_out=40)
    data = Arithmetic(config, tokenizer, seed=0)
    held_out = {record.prompt for record in data.held_out}
    assert len(held_out) == 40
    assert held_out.isdisjoint({data[i].prompt for i in range(len(data))})
    assert data.held_out == Arithmetic(config, tokenizer, seed=9).held_out
    assert all(record.answer == f"{sum(map(int, record.prompt[:-1].split('+'))):02d}" for record in data.held_out)


@pytest.mark.parametrize(("mistake", "wrong"), [("off_by_one", lambda s: s + 1), ("carry", lambda s: s % 10)])
def test_mistakes_are_made_as_often_as_asked(tokenizer: Tokenizer, mistake: str, wrong: object) -> None:
    assert callable(wrong)
    data = Arithmetic(ArithmeticData(mistake=mistake, noise=0.6), tokenizer, seed=0)  # type: ignore[arg-type]
    hard = [r for r in (data[i] for i in range(len(data))) if wrong(int(r.answer)) != int(r.answer)]
    said = Counter(tokenizer.decode(r.target_ids) == f"{wrong(int(r.answer)):02d}" for r in hard)
    assert 0.57 < said[True] / len(hard) < 0.63
    assert all(tokenizer.decode(r.target_ids) in (r.answer, f"{wrong(int(r.answer)):02d}") for r in hard)


def test_a_record_depends_on_seed_and_index_only(tokenizer: Tokenizer) -> None:
    config = ArithmeticData(noise=0.5)
    data = Arithmetic(config, tokenizer, seed=4)
    assert [data[i] for i in range(50)] == [Arithmetic(config, tokenizer, seed=4)[i] for i in range(50)]
    assert [data[i] for i in range(50)] != [Arithmetic(config, tokenizer, seed=5)[i] for i in range(50)]


def test_the_order_is_a_function_of_the_seed_alone() -> None:
    whole = take(10, seed=1, start=0, count=35)
    pieces = [i for start in range(0, 35, 7) for i in take(10, seed=1, start=start, count=7)]
    assert pieces == whole
    assert whole != take(10, seed=2, start=0, count=35)


def test_every_epoch_uses_every_record_once_in_another_order() -> None:
    epochs = [take(10, seed=1, start=start, count=10) for start in (0, 10, 20)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


@pytest.mark.parametrize("size", [1, 2, 3, 10, 1000, 4097])
def test_a_shuffle_too_large_for_a_table_is_one_too(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "LARGEST_TABLE", 0)
    whole = take(size, seed=1, start=0, count=2 * size)
    assert sorted(whole[:size]) == sorted(whole[size:]) == list(range(size))
    assert [i for start in range(0, 2 * size, 7) for i in take(size, 1, start, 7)][: 2 * size] == whole
    if size >= 1000:
        assert whole[:size] != whole[size:]
        assert whole != take(size, seed=2, start=0, count=2 * size)
        # Neighbours are no likelier to stay near each other than in numpy's shuffle, whose mean distance is size / 3.
        assert np.abs(np.diff(whole[:size])).mean() == pytest.approx(size / 3, rel=0.1)


def test_a_large_shuffle_reaches_every_place_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "LARGEST_TABLE", 0)
    firsts = Counter(take(8, seed, 0, 1)[0] for seed in range(2000))
    assert all(190 < firsts[i] < 310 for i in range(8))


def test_the_order_of_ten_billion_records_is_at_hand() -> None:
    size = 10**10
    found = take(size, seed=3, start=size - 5, count=10)
    assert all(0 <= i < size for i in found)
    assert found[:5] == take(size, 3, size - 5, 5)
    assert found[5:] == take(size, 3, size, 5)


def test_a_cursor_into_other_records_is_refused(open_data: Open, tmp_path: Path) -> None:
    records = problems(20)
    saved = Contents(open_data(jsonl(tmp_path / "a.jsonl", records))).state_dict()
    assert saved["records"] == 20
    shard(tmp_path / "0.tar", as_samples(records[:13]))
    shard(tmp_path / "1.tar", as_samples(records[13:]))
    for path, kind in ((jsonl(tmp_path / "copy.jsonl", records), "jsonl"), (tmp_path / "{0,1}.tar", "webdataset")):
        Contents(open_data(path, kind)).load_state_dict(saved)
    records[3]["target"] = "0"
    for name, changed in (("changed", records), ("shorter", records[:-1])):
        other = Contents(open_data(jsonl(tmp_path / f"{name}.jsonl", changed)))
        with pytest.raises(ResumeError, match="Restore its files"):
            other.load_state_dict(saved)


def test_generated_records_are_known_by_their_number(tokenizer: Tokenizer) -> None:
    saved = Contents(Arithmetic(ArithmeticData(), tokenizer, seed=0)).state_dict()
    Contents(Arithmetic(ArithmeticData(), tokenizer, seed=0)).load_state_dict(saved)
    with pytest.raises(ResumeError, match="records"):
        Contents(Arithmetic(ArithmeticData(held_out=5), tokenizer, seed=0)).load_state_dict(saved)
