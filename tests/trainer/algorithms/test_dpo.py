"""Preferences against a plain float64 reference, packed and unpacked."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.trainer.algorithms import reference as plain
from tests.trainer.algorithms.batches import Trial
from tests.trainer.algorithms.preferences import preferences
from trainer.algorithms.base import REFERENCE_LOGPROBS
from trainer.algorithms.offline import Dpo
from trainer.batch import MASK, share
from trainer.config import DpoConfig
from trainer.data.records import Record
from trainer.errors import ConfigError, DataError

CONFIGS = {
    "dpo": DpoConfig(beta=0.5),
    "conservative": DpoConfig(beta=0.5, label_smoothing=0.2),
    "robust": DpoConfig(beta=0.5, loss="robust", label_smoothing=0.2),
    "ipo": DpoConfig(beta=0.3, loss="ipo"),
}


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_it_equals_the_reference(config: DpoConfig, packed: bool) -> None:
    algorithm = Dpo(config)
    t = Trial(algorithm, algorithm.sequences(preferences(6, seed=2), []), packed=packed)
    ref = t.given[REFERENCE_LOGPROBS]
    output = t.check(plain.dpo_loss(config.loss, config.beta, config.label_smoothing, t.logprobs, ref))
    assert output.denominator == 6
    sums = [(p - r).sum().item() for p, r in zip(t.logprobs, ref, strict=True)]
    right = sum(a > b for a, b in zip(sums[::2], sums[1::2], strict=True))
    assert 0 < right < 6
    assert output.sums["preference_accuracy"] == right
    margins = [a - b for a, b in zip(sums[::2], sums[1::2], strict=True)]
    assert output.sums["reward_margin"].item() == pytest.approx(config.beta * sum(margins))


def test_at_the_reference_the_loss_is_log_two() -> None:
    algorithm = Dpo(DpoConfig(label_smoothing=0.1))
    t = Trial(algorithm, algorithm.sequences(preferences(3, seed=4), []))
    t.given[REFERENCE_LOGPROBS] = [p.detach() for p in t.logprobs]
    output = t.loss()
    assert (output.total / output.denominator).item() == pytest.approx(math.log(2), rel=1e-6)


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize(("ranks", "micro_batch"), [(1, 3), (2, 1), (2, 2), (3, 5)])
def test_ranks_and_micro_batches_change_nothing(ranks: int, micro_batch: int, packed: bool) -> None:
    algorithm = Dpo(DpoConfig(beta=0.5))
    t = Trial(algorithm, algorithm.sequences(preferences(5, seed=2), []), packed=packed)
    whole = t.loss()
    fields = t.fields()
    logprobs = {"logprobs": t.scatter(t.logprobs, fields)}
    unit = 1 if packed else algorithm.rows_together
    shares = [part for rank in range(ranks) for part in share(fields | logprobs, rank, ranks, micro_batch, unit)]
    outputs = [algorithm.loss(part["logprobs"], part) for part in shares]
    assert sum(o.denominator for o in outputs) == 5
    assert torch.stack([o.total for o in outputs]).sum().item() == pytest.approx(whole.total.item(), rel=1e-9)
    assert sum(o.tokens for o in outputs) == fields[MASK].sum()


def test_it_wants_both_answers() -> None:
    with pytest.raises(DataError, match="record 3 has no chosen and rejected"):
        Dpo(DpoConfig()).sequences([Record(3, "", "", (1,), (), (2,), ())], [])


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"beta": 0.0}, "beta"),
        ({"label_smoothing": 0.5}, "label_smoothing"),
        ({"loss": "ipo", "label_smoothing": 0.1}, "label_smoothing"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as error:
        DpoConfig(**changes)
    assert error.value.key == key
