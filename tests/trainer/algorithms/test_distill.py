"""On-policy distillation against a plain float64 reference, and against the reverse KL itself."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.trainer.algorithms import reference as plain
from tests.trainer.algorithms.batches import BATCH, BEHAVIOUR, SAMPLES, trial
from trainer.algorithms import build_algorithm
from trainer.algorithms.base import ADVANTAGES, BEHAVIOUR_LOGPROBS, ENTROPY
from trainer.algorithms.distill import TEACHER_LOGPROBS
from trainer.batch import MASK
from trainer.config import DistillConfig, TeacherConfig
from trainer.errors import ConfigError

TEACHER = TeacherConfig(url="http://teacher:8000", model="wise")
CONFIGS = {
    "alone": DistillConfig(teacher=TEACHER),
    "unclipped": DistillConfig(teacher=TEACHER, clip_low=1.0, clip_high=100.0, normalize="sequence"),
    "rewarded": DistillConfig(teacher=TEACHER, reward_weight=0.5, samples_per_prompt=5),
}


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_each_token_is_worth_what_the_teacher_thinks_of_it(config: DistillConfig, packed: bool) -> None:
    t = trial(config, packed=packed)
    worth = plain.grpo_advantages(BATCH, scale=True)
    advantages = []
    for sample, reward in zip(SAMPLES, worth, strict=True):
        assert sample.teacher_logprobs is not None
        pairs = zip(sample.teacher_logprobs, sample.logprobs, strict=True)
        row = [config.reward_weight * reward + teacher - mine for teacher, mine in pairs]
        advantages.append(torch.tensor(row, dtype=torch.float32).double().tolist())  # as a batch has it
    output = t.check(plain.policy_loss(dataclasses.asdict(config), t.logprobs, BEHAVIOUR, advantages))
    teacher = [torch.tensor(s.teacher_logprobs, dtype=torch.float32).double() for s in SAMPLES]
    gaps = [(mine.detach() - theirs).sum().item() for mine, theirs in zip(t.logprobs, teacher, strict=True)]
    assert output.sums["teacher_kl"].item() == pytest.approx(sum(gaps))


def test_its_mean_gradient_is_the_reverse_kls() -> None:
    """Over every token that there is, in proportion to how often the policy samples it."""
    generator = torch.Generator().manual_seed(3)
    logits, teacher = (torch.randn(7, generator=generator, dtype=torch.float64) for _ in range(2))
    logits.requires_grad_(True)
    new, theirs = logits.log_softmax(-1), teacher.log_softmax(-1)
    exact = torch.autograd.grad((new.exp() * (new - theirs)).sum(), logits, retain_graph=True)[0]
    algorithm = build_algorithm(DistillConfig(teacher=TEACHER))
    expected = torch.zeros_like(exact)
    for token in range(7):
        behaviour = new[token].detach().reshape(1, 1)
        fields = {
            MASK: torch.ones(1, 1, dtype=torch.float64),
            BEHAVIOUR_LOGPROBS: behaviour,
            TEACHER_LOGPROBS: theirs[token].reshape(1, 1),
            ADVANTAGES: theirs[token].reshape(1, 1) - behaviour,
            ENTROPY: torch.zeros(1, 1, dtype=torch.float64),
        }
        loss = algorithm.loss(new[token].reshape(1, 1), fields).total
        expected += behaviour.exp().item() * torch.autograd.grad(loss, logits, retain_graph=True)[0]
    torch.testing.assert_close(expected, exact, rtol=1e-9, atol=1e-12)


def test_a_key_that_is_missing_is_the_teachers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TEACHER_KEY", raising=False)
    with pytest.raises(ConfigError) as error:
        dataclasses.replace(TEACHER, api_key_env="TEACHER_KEY").api_key()
    assert error.value.key == "algorithm.teacher.api_key_env"
