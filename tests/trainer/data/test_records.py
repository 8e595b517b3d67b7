"""Generated records and the tokenizer."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from trainer.config import ArithmeticData
from trainer.data.problems import Arithmetic
from trainer.data.tokenizer import Tokenizer
from trainer.errors import DataError


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
