"""Fine-tuning is cross-entropy on the targets."""

from __future__ import annotations

import pytest
import torch

from tests.trainer.algorithms.batches import VOCAB, Trial
from trainer.algorithms.offline import Sft
from trainer.batch import MASK, TOKENS, collate
from trainer.config import SftConfig
from trainer.data.records import Record
from trainer.errors import DataError

RECORDS = [Record(0, "", "", (1, 2, 3), (4, 5)), Record(1, "", "", (6,), (7, 8, 9))]


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
def test_it_equals_the_sum_over_tokens(packed: bool) -> None:
    algorithm = Sft(SftConfig())
    t = Trial(algorithm, algorithm.sequences(RECORDS, []), packed=packed)
    output = t.check(torch.cat([-p for p in t.logprobs]).sum() / 5)
    assert output.tokens == 5


@pytest.mark.parametrize(("on_prompt", "tokens"), [(False, 5), (True, 7)])
def test_it_is_cross_entropy(on_prompt: bool, tokens: int) -> None:
    algorithm = Sft(SftConfig(on_prompt=on_prompt))
    fields = collate(algorithm.sequences(RECORDS, []))
    logits = torch.randn(2, fields[MASK].shape[1], VOCAB, generator=torch.Generator().manual_seed(0))
    labels = fields[TOKENS][:, 1:]
    output = algorithm.loss(logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0], fields)
    ignored = labels.masked_fill(fields[MASK] == 0, -100)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ignored.flatten())
    assert output.tokens == tokens
    assert (output.total / output.tokens).item() == pytest.approx(expected.item(), rel=1e-5)


def test_it_wants_targets() -> None:
    with pytest.raises(DataError, match="record 3"):
        Sft(SftConfig()).sequences([Record(3, "", "", (1,), ())], [])
