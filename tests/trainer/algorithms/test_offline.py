"""Fine-tuning is cross-entropy on the targets; preferences against a plain float64 reference; packed and unpacked."""

from __future__ import annotations

import pytest
import torch

from tests.trainer.algorithms import reference as plain
from tests.trainer.algorithms.batches import VOCAB, Trial, preferences
from trainer.algorithms.base import REFERENCE_LOGPROBS
from trainer.algorithms.offline import Dpo, Sft
from trainer.batch import MASK, TOKENS, collate, share
from trainer.config import DpoConfig, SftConfig
from trainer.data.records import Record
from trainer.errors import DataError

CONFIGS = {
    "dpo": DpoConfig(beta=0.5),
    "conservative": DpoConfig(beta=0.5, label_smoothing=0.2),
    "robust": DpoConfig(beta=0.5, loss="robust", label_smoothing=0.2),
    "ipo": DpoConfig(beta=0.3, loss="ipo"),
}


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_preferences_equal_the_reference(config: DpoConfig, packed: bool) -> None:
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


RECORDS = [Record(0, "", "", (1, 2, 3), (4, 5)), Record(1, "", "", (6,), (7, 8, 9))]


@pytest.mark.parametrize(("on_prompt", "tokens"), [(False, 5), (True, 7)])
def test_fine_tuning_is_cross_entropy(on_prompt: bool, tokens: int) -> None:
    algorithm = Sft(SftConfig(on_prompt=on_prompt))
    fields = collate(algorithm.sequences(RECORDS, []))
    logits = torch.randn(2, fields[MASK].shape[1], VOCAB, generator=torch.Generator().manual_seed(0))
    labels = fields[TOKENS][:, 1:]
    output = algorithm.loss(logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0], fields)
    ignored = labels.masked_fill(fields[MASK] == 0, -100)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ignored.flatten())
    assert output.tokens == tokens
    assert (output.total / output.tokens).item() == pytest.approx(expected.item(), rel=1e-5)


def test_a_record_without_answers_is_named() -> None:
    with pytest.raises(DataError, match="record 3 has no chosen and rejected"):
        Dpo(DpoConfig()).sequences([Record(3, "", "", (1,), (), (2,), ())], [])
    with pytest.raises(DataError, match="record 3"):
        Sft(SftConfig()).sequences([Record(3, "", "", (1,), ())], [])
