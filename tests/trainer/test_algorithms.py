"""Losses and gradients against a plain float64 reference, token by token."""

from __future__ import annotations

import math
import random

import pytest
import torch

from trainer.algorithms import Grpo, Sft
from trainer.batch import MASK, TOKENS, Sequence, collate, share
from trainer.config import GrpoConfig, SftConfig
from trainer.data import Record
from trainer.errors import DataError
from trainer.rewards import Score
from trainer.rollout import Group, Sample

VOCAB = 11


def groups(count: int, samples: int, seed: int) -> list[Group]:
    rng = random.Random(seed)
    made = []
    for _ in range(count):
        answers = []
        for _ in range(samples):
            length = rng.randint(1, 6)
            ids = tuple(rng.randrange(VOCAB) for _ in range(length))
            answers.append(Sample(ids, tuple(-3 * rng.random() for _ in ids), "stop", ()))
        scores = tuple(Score(float(rng.random() < 0.5)) for _ in answers)
        made.append(Group(tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, 4))), tuple(answers), scores))
    return made


def reference(
    config: GrpoConfig, batch: list[Group], logits: list[torch.Tensor], kl_to: list[torch.Tensor]
) -> torch.Tensor:
    """Written from the paper's formula, one token at a time, in float64. `logits[i]` [tokens, V] of sample i."""
    total, tokens, index = torch.zeros((), dtype=torch.float64), 0, 0
    for group in batch:
        rewards = [score.total for score in group.scores]
        mean = sum(rewards) / len(rewards)
        std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))
        for sample, reward in zip(group.samples, rewards, strict=True):
            advantage = (reward - mean) / (std + 1e-4) if config.scale_rewards else reward - mean
            for t, token in enumerate(sample.token_ids):
                row = logits[index][t]
                logprob = row[token] - torch.logsumexp(row, 0)
                ratio = torch.exp(logprob - sample.logprobs[t])
                low, high = 1 - config.clip_low, 1 + config.clip_high
                clipped = torch.clamp(ratio, low, high)
                total = total - torch.minimum(ratio * advantage, clipped * advantage)
                if config.kl_coef:
                    d = kl_to[index][t] - logprob
                    total = total + config.kl_coef * (torch.exp(d) - d - 1)
                tokens += 1
            index += 1
    return total / tokens


@pytest.mark.parametrize(
    "config",
    [
        GrpoConfig(),
        GrpoConfig(clip_low=0.1, clip_high=0.1),
        GrpoConfig(scale_rewards=False),
        GrpoConfig(kl_coef=0.2),
    ],
    ids=["default", "tight", "dr_grpo", "kl"],
)
def test_grpo_equals_the_reference(config: GrpoConfig) -> None:
    batch = groups(4, 6, seed=1)
    algorithm = Grpo(config)
    fields = {k: v.double() if v.is_floating_point() else v for k, v in collate(algorithm.sequences([], batch)).items()}
    generator = torch.Generator().manual_seed(2)
    rows, width = fields[MASK].shape
    logits = torch.randn(rows, width, VOCAB, generator=generator, dtype=torch.float64, requires_grad=True)
    kl_to = torch.randn(rows, width, generator=generator, dtype=torch.float64) - 2
    logprobs = logits.log_softmax(-1).gather(-1, fields[TOKENS][:, 1:, None])[..., 0]
    output = algorithm.loss(logprobs, fields | {"reference_logprobs": kl_to})
    (mine,) = torch.autograd.grad(output.total / output.tokens, logits, retain_graph=True)

    samples = [(group, sample) for group in batch for sample in group.samples]
    spans = [(len(g.prompt_ids) - 1, len(g.prompt_ids) - 1 + len(s.token_ids)) for g, s in samples]
    per_sample = [logits[i, a:b] for i, (a, b) in enumerate(spans)]
    expected = reference(config, batch, per_sample, [kl_to[i, a:b] for i, (a, b) in enumerate(spans)])
    (theirs,) = torch.autograd.grad(expected, logits)

    assert (output.total / output.tokens).item() == pytest.approx(expected.item(), abs=1e-6)
    assert torch.allclose(mine, theirs, atol=1e-6)
    assert 0 < output.sums["clip_ratio"] < output.tokens
    assert mine.abs().sum() > 0


def test_equal_rewards_teach_nothing_but_count() -> None:
    algorithm = Grpo(GrpoConfig())
    assert algorithm.credit([1.0, 1.0, 1.0]) == [0.0, 0.0, 0.0]
    assert sum(algorithm.credit([0.0, 1.0, 1.0])) == pytest.approx(0, abs=1e-9)


def test_the_logprob_gap_is_between_engine_and_trainer() -> None:
    algorithm = Grpo(GrpoConfig())
    fields = collate(algorithm.sequences([], groups(2, 3, seed=3)))
    output = algorithm.loss(fields["behaviour_logprobs"] + 0.5 * fields[MASK], fields)
    assert output.maxima["logprob_gap_max"].item() == pytest.approx(0.5, abs=1e-5)
    assert (output.sums["logprob_gap_mean"] / output.tokens).item() == pytest.approx(0.5, abs=1e-5)


def test_sft_is_cross_entropy_on_the_target() -> None:
    records = [Record(0, "", "", (1, 2, 3), (4, 5)), Record(1, "", "", (6,), (7, 8, 9))]
    for on_prompt, tokens in ((False, 5), (True, 7)):
        algorithm = Sft(SftConfig(on_prompt=on_prompt))
        fields = collate(algorithm.sequences(records, []))
        logits = torch.randn(2, fields[MASK].shape[1], VOCAB, generator=torch.Generator().manual_seed(0))
        labels = fields[TOKENS][:, 1:]
        output = algorithm.loss(logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0], fields)
        ignored = labels.masked_fill(fields[MASK] == 0, -100)
        expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ignored.flatten())
        assert output.tokens == tokens
        assert (output.total / output.tokens).item() == pytest.approx(expected.item(), rel=1e-5)


def test_sft_wants_targets() -> None:
    with pytest.raises(DataError, match="record 3"):
        Sft(SftConfig()).sequences([Record(3, "", "", (1,), ())], [])


def test_collate_aligns_fields_with_the_tokens_they_speak_about() -> None:
    fields = collate([Sequence((1, 2), (3, 4), {"x": [0.3, 0.4]}), Sequence((5,), (6, 7, 8), {"x": [0.6, 0.7, 0.8]})])
    assert fields[TOKENS].tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert fields[MASK].tolist() == [[0, 1, 1], [1, 1, 1]]
    assert fields["x"].tolist() == [[0, pytest.approx(0.3), pytest.approx(0.4)], pytest.approx([0.6, 0.7, 0.8])]


@pytest.mark.parametrize(("rows", "ranks", "size"), [(7, 2, 2), (1, 2, 8), (8, 2, 4), (5, 1, 2), (3, 4, 1)])
def test_shares_hold_every_row_once(rows: int, ranks: int, size: int) -> None:
    fields = {MASK: torch.ones(rows, 3), TOKENS: torch.arange(rows * 4).reshape(rows, 4)}
    shares = [share(fields, rank, ranks, size) for rank in range(ranks)]
    assert len({len(s) for s in shares}) == 1
    assert len({part[MASK].shape for s in shares for part in s}) == 1
    trained = torch.cat([part[TOKENS][part[MASK][:, 0] > 0] for s in shares for part in s])
    assert torch.equal(trained, fields[TOKENS])
