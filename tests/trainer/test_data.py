"""Data sets, sampler, tokenizer: what is learned from, in which order."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from trainer.config import ArithmeticData, JsonlData
from trainer.data import Arithmetic, JsonlDataset, Tokenizer, take
from trainer.errors import DataError


@pytest.fixture(scope="module")
def tokenizer(tiny_model: str) -> Tokenizer:
    return Tokenizer(tiny_model)


def test_text_goes_there_and_back(tokenizer: Tokenizer) -> None:
    ids = tokenizer.continuation("12+3=15")
    assert ids[-1] == tokenizer.eos_id
    assert tokenizer.decode(ids) == "12+3=15"
    assert tokenizer.prompt("12") == ids[:2]


def test_a_missing_tokenizer_says_where_to_put_it(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"tokenizer\.json"):
        Tokenizer(tmp_path)


def test_the_order_is_a_function_of_the_seed_alone() -> None:
    whole = take(10, seed=1, start=0, count=35)
    pieces = [i for start in range(0, 35, 7) for i in take(10, seed=1, start=start, count=7)]
    assert pieces == whole
    assert whole != take(10, seed=2, start=0, count=35)


def test_every_epoch_uses_every_record_once_in_another_order() -> None:
    epochs = [take(10, seed=1, start=start, count=10) for start in (0, 10, 20)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


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


def write(path: Path, *records: object) -> str:
    path.write_text("\n".join(json.dumps(record) for record in records))
    return str(path)


def test_records_from_json_lines(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"q": "1+1=", "a": "2"}, {"q": "2+2=", "a": "5", "answer": "4"}, {"q": "3="})
    data = JsonlDataset(JsonlData(path=path, eval_path=path, prompt_key="q", target_key="a"), tokenizer)
    assert [record.answer for record in data.held_out] == ["2", "4", ""]
    assert tokenizer.decode(data[1].target_ids) == "5"
    assert data[2].target_ids == ()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "line 1 is not JSON"),
        ('{"prompt": "1"}\n\n[1]', "line 3: 'prompt' is not a text"),
        ('{"prompt": 3}', "'prompt' is not a text"),
        ('{"prompt": ""}', "no tokens"),
        ("", "no records"),
    ],
)
def test_bad_records_are_named(tokenizer: Tokenizer, tmp_path: Path, text: str, complaint: str) -> None:
    (tmp_path / "bad.jsonl").write_text(text)
    with pytest.raises(DataError, match=complaint):
        JsonlDataset(JsonlData(path=str(tmp_path / "bad.jsonl")), tokenizer)


def test_a_missing_file_is_named(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"absent\.jsonl"):
        JsonlDataset(JsonlData(path=str(tmp_path / "absent.jsonl")), tokenizer)
