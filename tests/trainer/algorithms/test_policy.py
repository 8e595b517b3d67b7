"""The policy gradients and distillation against a plain float64 reference: loss and gradient, packed and unpacked."""

from __future__ import annotations

import itertools
from statistics import fmean, stdev
from typing import Any

import msgspec
import pytest
import torch

from tests.trainer.algorithms import reference as plain
from tests.trainer.algorithms.batches import BATCH, BEHAVIOUR, LONGEST, SAMPLES, Trial, trial
from tests.trainer.rollouts.trajectories import answer
from trainer.algorithms import build_algorithm
from trainer.algorithms.advantages import length_rewards, over_group
from trainer.algorithms.base import (
    ADVANTAGES,
    BEHAVIOUR_LOGPROBS,
    ENTROPY,
    OLD_LOGPROBS,
    REFERENCE_LOGPROBS,
    VALUES,
    VERSION_LAG,
    ActorCritic,
)
from trainer.algorithms.correction import correct
from trainer.algorithms.distill import TEACHER_LOGPROBS
from trainer.algorithms.policy import Grpo, Rloo
from trainer.batch import MASK, lay_out
from trainer.config import (
    AlgorithmConfig,
    CorrectionConfig,
    DistillConfig,
    GrpoConfig,
    KimiConfig,
    PolicyConfig,
    PpoConfig,
    ReinforceConfig,
    RlooConfig,
    TeacherConfig,
)
from trainer.rewards import Score
from trainer.trajectory import TrajectoryGroup


def constant(advantages: list[float]) -> list[list[float]]:
    """The same on every token, in the single precision that batches have."""
    singles = torch.tensor(advantages, dtype=torch.float32).tolist()
    return [[a] * len(b) for a, b in zip(singles, BEHAVIOUR, strict=True)]


def per_token_rewards(t: Trial, kl_coef: float, rewards: list[float]) -> list[list[float]]:
    singles = torch.tensor(rewards, dtype=torch.float32).tolist()
    result = []
    for old, ref, reward in zip(t.given[OLD_LOGPROBS], t.given[REFERENCE_LOGPROBS], singles, strict=True):
        row = (-kl_coef * (old - ref)).tolist()
        result.append([*row[:-1], row[-1] + reward])
    return result


GRPO = {
    "grpo": GrpoConfig(normalize="sequence"),
    "tokens": GrpoConfig(clip_low=0.1, clip_high=0.1),
    "kl": GrpoConfig(kl_coef=0.2, normalize="sequence"),
    "unbiased_kl": GrpoConfig(kl_coef=0.2, kl_unbiased=True),
    "dr_grpo": GrpoConfig(scale_rewards=False, normalize="length"),
    "dapo": GrpoConfig(clip_high=0.28),
    "dual_clip": GrpoConfig(dual_clip=1.5),
    "gspo": GrpoConfig(ratio="sequence", normalize="sequence", clip_low=0.2, clip_high=0.3, minibatches=2),
    "entropy": GrpoConfig(entropy_coef=0.3),
    "entropy_of_answers": GrpoConfig(entropy_coef=0.3, kl_coef=0.2, normalize="sequence"),
    "trajectory": GrpoConfig(ratio="trajectory", normalize="sequence", minibatches=2),
    "cispo": GrpoConfig(objective="cispo", clip_high=0.5),
}


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("config", GRPO.values(), ids=GRPO)
def test_grpo_and_its_descendants(config: GrpoConfig, packed: bool) -> None:
    t = trial(config, packed=packed)
    expected = plain.policy_loss(
        msgspec.to_builtins(config),
        t.logprobs,
        BEHAVIOUR if config.ratio == "token" else t.given[OLD_LOGPROBS],
        constant(plain.grpo_advantages(BATCH, scale=config.scale_rewards)),
        reference=t.given[REFERENCE_LOGPROBS] if config.kl_coef else None,
        behaviour=BEHAVIOUR if config.kl_unbiased else None,
        logits=t.logits if config.entropy_coef else None,
        max_tokens=LONGEST,
    )
    output = t.check(expected)
    assert output.sums["entropy"].item() == pytest.approx(sum(h.sum().item() for h in t.entropies))
    assert 0 < output.sums["clip_ratio"] < output.tokens
    assert output.sums["clip_ratio"] == output.sums["clip_ratio_low"] + output.sums["clip_ratio_high"]
    assert (output.sums["clip_ratio_low"] == 0) == (config.objective == "cispo")
    assert output.tokens == sum(len(b) for b in BEHAVIOUR)


def test_kernels_that_differ_stop_no_answer_of_gspo() -> None:
    """Its clip range is narrower than what the engine's log-probs of an answer are off the trainer's."""
    config = GrpoConfig(ratio="sequence", normalize="sequence", clip_low=3e-4, clip_high=4e-4)
    t = trial(config)
    output = t.loss()
    assert output.sums["clip_ratio"] == 0
    advantages = plain.grpo_advantages(BATCH, scale=True)
    gradients = torch.autograd.grad(output.total, t.logits)
    assert [g.any().item() for g in gradients] == [a != 0 for a in advantages]
    further = build_algorithm(msgspec.structs.replace(config, minibatches=4), LONGEST)
    assert OLD_LOGPROBS in further.needs


def test_the_unbiased_estimate_is_kl_whoever_sampled() -> None:
    """Over every token that there is, in proportion to how often another policy samples it: the estimate's mean is the
    current policy's KL to the reference, and the gradient of that mean is the KL's. Without the weight neither is."""
    generator = torch.Generator().manual_seed(3)
    logits, reference, sampler = (torch.randn(7, generator=generator, dtype=torch.float64) for _ in range(3))
    logits.requires_grad_(True)
    new, ref, behaviour = (x.log_softmax(-1)[None] for x in (logits, reference, sampler))
    fields = {MASK: torch.ones(1, 7).double(), REFERENCE_LOGPROBS: ref, BEHAVIOUR_LOGPROBS: behaviour}
    exact = (new.exp() * (new - ref)).sum()
    gradient = torch.autograd.grad(exact, logits, retain_graph=True)[0]
    for unbiased in (True, False):
        algorithm = Grpo(GrpoConfig(kl_coef=1.0, kl_unbiased=unbiased))
        estimate = (behaviour.exp() * algorithm._kl(new, fields)).sum()
        assert torch.allclose(estimate, exact) == unbiased
        assert torch.allclose(torch.autograd.grad(estimate, logits, retain_graph=True)[0], gradient) == unbiased


CORRECTIONS = {
    "tis": CorrectionConfig("truncated", "token", 0.0, 1.5),
    "tis_both_sides": CorrectionConfig("truncated", "token", 0.5, 1.5),
    "tis_sequence": CorrectionConfig("truncated", "sequence", 0.0, 2.0),
    "icepop": CorrectionConfig("masked", "token", 0.5, 2.0),
    "mis_sequence": CorrectionConfig("masked", "sequence", 0.1, 4.0),
    "mis_geometric": CorrectionConfig("masked", "geometric", 0.7, 2.0),
    "old_tokens": CorrectionConfig("none", "token", max_lag=1),
    "old_answers": CorrectionConfig("truncated", "sequence", high=3.0, max_lag=1),
    "decay": CorrectionConfig("truncated", "token", high=3.0, lag_decay=0.5),
    "decay_alone": CorrectionConfig("none", "geometric", lag_decay=0.7),
}


@pytest.mark.parametrize("normalize", ["token", "sequence", "length"])
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("correction", CORRECTIONS.values(), ids=CORRECTIONS)
def test_importance_correction(correction: CorrectionConfig, packed: bool, normalize: Any) -> None:
    config = GrpoConfig(normalize=normalize, minibatches=2, correction=correction)
    t = trial(config, packed=packed, step=5)
    corrected = correction.kind != "none"
    assert (OLD_LOGPROBS in t.algorithm.needs) == corrected
    lags = [sample.lags(5) for sample in SAMPLES]
    behaviour = [tuple(b.tolist()) for b in BEHAVIOUR]
    old = t.given[OLD_LOGPROBS] if corrected else t.logprobs
    weights, kept = plain.correction_weights(msgspec.to_builtins(correction), old, behaviour, lags)
    rejected = sum(not k for row in kept for k in row)
    expected = plain.policy_loss(
        msgspec.to_builtins(config),
        t.logprobs,
        t.given[OLD_LOGPROBS] if corrected else BEHAVIOUR,
        constant(plain.grpo_advantages(BATCH, scale=True)),
        weights=weights,
        kept=kept,
        max_tokens=LONGEST,
    )
    output = t.check(expected)
    assert output.sums["rejected"] == rejected
    assert (rejected > 0) == (correction.kind == "masked" or correction.max_lag is not None)
    if normalize == "token":
        assert output.denominator == sum(len(b) for b in BEHAVIOUR) - rejected


def test_in_the_only_update_the_current_policy_is_the_old_one() -> None:
    config = GrpoConfig(correction=CorrectionConfig("truncated", high=1.2))
    t = trial(config)
    assert t.algorithm.needs == frozenset()
    now = [p.detach() for p in t.logprobs]
    behaviour = [tuple(b.tolist()) for b in BEHAVIOUR]
    nothing = [[0.0] * len(b) for b in BEHAVIOUR]
    weights, kept = plain.correction_weights(msgspec.to_builtins(config.correction), now, behaviour, nothing)
    advantages = constant(plain.grpo_advantages(BATCH, scale=True))
    t.check(plain.policy_loss(msgspec.to_builtins(config), t.logprobs, now, advantages, weights=weights, kept=kept))


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize(
    "config",
    [
        RlooConfig(),
        RlooConfig(epochs=2),
        RlooConfig(kl_coef=0.3),
        RlooConfig(kl_coef=0.3, ratio="token", normalize_advantages=True),
    ],
    ids=["plain", "epochs", "kl", "normalized"],
)
def test_rloo(config: RlooConfig, packed: bool) -> None:
    t = trial(config, packed=packed)
    assert (OLD_LOGPROBS in t.algorithm.needs) == (config.epochs > 1 or config.kl_coef > 0)
    given = zip(t.given[OLD_LOGPROBS], t.given[REFERENCE_LOGPROBS], strict=True)
    penalties = [config.kl_coef * (old - ref).sum().item() for old, ref in given]
    advantages = plain.rloo_advantages(BATCH, penalties)
    if config.normalize_advantages:
        middle, std = fmean(advantages), stdev(advantages)
        advantages = [(a - middle) / (std + 1e-4) for a in advantages]
    exact = [[a] * len(b) for a, b in zip(advantages, BEHAVIOUR, strict=True)]
    proximal = t.given[OLD_LOGPROBS] if OLD_LOGPROBS in t.algorithm.needs else [p.detach() for p in t.logprobs]
    expected = plain.policy_loss(msgspec.to_builtins(config), t.logprobs, proximal, exact)
    t.check(expected, rtol=1e-5, atol=1e-7)  # the rewards' part of the advantages travelled in single precision


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize(
    "config",
    [
        ReinforceConfig(kl_coef=0.1, samples_per_prompt=5),
        ReinforceConfig(kl_coef=0.1, samples_per_prompt=5, gamma=0.9),
        ReinforceConfig(kl_coef=0.1, samples_per_prompt=5, baseline=True),
    ],
    ids=["plain", "discounted", "baseline"],
)
def test_reinforce_plus_plus(config: ReinforceConfig, packed: bool) -> None:
    t = trial(config, packed=packed)
    rewards = [s.total - (fmean(g.rewards) if config.baseline else 0.0) for g in BATCH for s in g.scores]
    by_token = per_token_rewards(t, config.kl_coef, rewards)
    returns = [
        [sum(config.gamma ** (u - i) * row[u] for u in range(i, len(row))) for i in range(len(row))] for row in by_token
    ]
    t.check(plain.policy_loss(msgspec.to_builtins(config), t.logprobs, BEHAVIOUR, plain.normalize(returns)))


PPO = {
    "plain": PpoConfig(samples_per_prompt=5, epochs=2),
    "kl": PpoConfig(samples_per_prompt=5, kl_coef=0.1, gamma=0.97, lam=0.9),
    "unclipped": PpoConfig(samples_per_prompt=5, kl_coef=0.1, value_clip=None, normalize_advantages=False),
}


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("config", PPO.values(), ids=PPO)
def test_ppo(config: PpoConfig, packed: bool) -> None:
    t = trial(config, packed=packed)
    assert t.algorithm.needs >= {VALUES}
    by_token = per_token_rewards(t, config.kl_coef, [s.total for g in BATCH for s in g.scores])
    values = [v.tolist() for v in t.given[VALUES]]
    raw = [plain.gae(r, v, config.gamma, config.lam) for r, v in zip(by_token, values, strict=True)]
    advantages = plain.normalize(raw) if config.normalize_advantages else raw
    t.check(plain.policy_loss(msgspec.to_builtins(config), t.logprobs, BEHAVIOUR, advantages))

    returns = [[a + v for a, v in zip(*pair, strict=True)] for pair in zip(raw, values, strict=True)]
    generator = torch.Generator().manual_seed(9)
    new = [torch.randn(len(v), generator=generator, dtype=torch.float64, requires_grad=True) for v in values]
    fields = t.fields()
    assert isinstance(t.algorithm, ActorCritic)
    output = t.algorithm.critic_loss(t.scatter(new, fields), fields)
    expected = plain.value_loss(new, t.given[VALUES], returns, config.value_clip)
    torch.testing.assert_close(output.total / output.denominator, expected, rtol=1e-9, atol=1e-10)
    mine, theirs = (torch.autograd.grad(x, new) for x in (output.total / output.denominator, expected))
    torch.testing.assert_close(torch.cat(mine), torch.cat(theirs), rtol=1e-7, atol=1e-10)
    assert (output.sums["value_clip_ratio"] > 0) == (config.value_clip is not None)


@pytest.mark.parametrize(
    "config", [GrpoConfig(mask_truncated=True), PpoConfig(mask_truncated=True)], ids=["grpo", "ppo"]
)
def test_truncated_answers_are_left_out(config: PolicyConfig) -> None:
    t = trial(config)  # type: ignore[arg-type]
    output, whole = t.loss(), [s.finish_reason != "length" for s in SAMPLES]
    assert output.denominator == sum(len(s.token_ids) for s in itertools.compress(SAMPLES, whole))
    gradients = torch.autograd.grad(output.total, t.logits)
    assert not any(gradient.any() for gradient, kept in zip(gradients, whole, strict=True) if not kept)
    assert not all(whole)


def test_answers_near_the_limit_lose_reward() -> None:
    config = GrpoConfig(overlong_buffer=4, overlong_penalty=0.5, scale_rewards=False)
    samples = tuple(answer((1,) * n, (-1.0,) * n, "stop", ()) for n in (6, 7, 8, 10, 12))
    group = TrajectoryGroup((1,), samples, tuple(Score(1.0) for _ in samples))
    rewards = [1.0, 0.875, 0.75, 0.5, 0.5]  # 6 tokens are free, 10 are the limit
    sequences = Grpo(config, max_tokens=10).sequences([], [group])
    middle = sum(rewards) / 5
    assert [s.per_token["advantages"][0] for s in sequences] == pytest.approx([r - middle for r in rewards])


def test_groups_that_teach_nothing_are_sampled_again_if_wanted() -> None:
    sample = answer((1,), (-1.0,), "stop", ())
    same, differ = (TrajectoryGroup((1,), (sample,) * 2, (Score(1.0), Score(other))) for other in (1.0, 0.0))
    wanted = Grpo(GrpoConfig(drop_zero_std=True))
    assert [wanted.keep_group(same), wanted.keep_group(differ)] == [False, True]
    assert Grpo(GrpoConfig()).keep_group(same)


@pytest.mark.parametrize("rewards", [[1.0, 1.0, 1.0], [0.5, 0.5], [1.0]], ids=["equal", "pair", "alone"])
def test_rewards_that_compare_with_nothing_teach_nothing_but_count(rewards: list[float]) -> None:
    assert Grpo(GrpoConfig()).credit(rewards) == Rloo(RlooConfig()).credit(rewards) == [0.0] * len(rewards)


def test_a_sequence_alone_in_its_group_has_no_baseline_and_no_value() -> None:
    values, numbers = torch.tensor([[3.0, 5.0], [7.0, 9.0]]), torch.tensor([[1.0, 1.0], [2.0, 0.0]])
    real = torch.tensor([[True, True], [True, False]])  # the last slot is empty
    assert over_group(values, numbers, real).tolist() == [[-2.0, 2.0], [0.0, 0.0]]


def test_groups_are_told_apart_whoever_hands_them_in() -> None:
    """The loop may ask for the sequences of one group at a time."""
    config = RlooConfig(kl_coef=0.3)
    whole = trial(config)
    one_by_one = Rloo(config)
    apart = Trial(one_by_one, [s for group in BATCH for s in one_by_one.sequences([], [group])])
    assert apart.loss().total.item() == pytest.approx(whole.loss().total.item(), rel=1e-9)


def test_groups_are_told_apart_late_in_a_run_and_in_long_answers() -> None:
    """In single precision the mean of a large number over many tokens is another number, and which one depends on how
    many there are."""

    def advantages(first: int) -> torch.Tensor:
        algorithm = Rloo(RlooConfig(kl_coef=0.3))
        algorithm._number = itertools.count(first)
        fields = lay_out(algorithm.sequences([], batch), [[i] for i in range(4)], packed=False)
        given = torch.Generator().manual_seed(0)
        for name in (OLD_LOGPROBS, REFERENCE_LOGPROBS):
            fields[name] = torch.randn(fields[MASK].shape, generator=given) * fields[MASK]
        return algorithm.prepare(fields)[ADVANTAGES]

    answers = [answer((1,) * n, (-1.0,) * n, "stop", ()) for n in (700, 1400, 900, 2000)]
    batch = [TrajectoryGroup((1,), tuple(answers[i : i + 2]), (Score(0.0), Score(1.0))) for i in (0, 2)]
    torch.testing.assert_close(advantages(5_000_001), advantages(0))


def test_an_empty_answer_is_no_sequence() -> None:
    empty, full = answer((), (), "stop", ()), answer((1, 2), (-1.0, -1.0), "stop", ())
    group = TrajectoryGroup((1,), (empty, full), (Score(0.0), Score(1.0)))
    for config in (GrpoConfig(), PpoConfig(), ReinforceConfig(), RlooConfig(kl_coef=1.0)):
        assert [s.continuation for s in build_algorithm(config).sequences([], [group])] == [(1, 2)]


def test_the_logprob_gap_is_between_engine_and_trainer() -> None:
    algorithm = Grpo(GrpoConfig())
    t = Trial(algorithm, algorithm.sequences([], BATCH))
    fields = t.fields()
    entropies = {ENTROPY: torch.zeros_like(fields[MASK])}
    output = algorithm.loss(fields["behaviour_logprobs"] + 0.5 * fields[MASK], fields | entropies)
    assert output.maxima["logprob_gap_max"].item() == pytest.approx(0.5, abs=1e-5)
    assert (output.sums["logprob_gap_mean"] / output.tokens).item() == pytest.approx(0.5, abs=1e-5)


def test_a_batch_of_rejected_tokens_moves_nothing() -> None:
    t = trial(GrpoConfig(correction=CorrectionConfig(max_lag=0)), step=9)
    output = t.loss()
    assert output.denominator == 0
    assert output.sums["rejected"] == output.tokens
    assert t.gradient(output.total).abs().sum() == 0


@pytest.mark.parametrize("config", [PpoConfig(), GrpoConfig(), RlooConfig(), ReinforceConfig()], ids=lambda c: c.name)
def test_those_that_ask_for_values_and_no_others_train_a_critic(config: AlgorithmConfig) -> None:
    algorithm = build_algorithm(config, LONGEST)
    assert isinstance(algorithm, ActorCritic) == (VALUES in algorithm.needs) == (config.name == "ppo")


def test_a_token_as_old_as_the_bound_is_kept() -> None:
    fields = {MASK: torch.ones(1, 3), VERSION_LAG: torch.tensor([[1.0, 2.0, 3.0]])}
    found = correct(CorrectionConfig(max_lag=2, lag_decay=0.5), torch.zeros(1, 3), fields)
    assert found.kept.tolist() == [[1.0, 1.0, 0.0]]
    assert found.weights.tolist() == [[0.5, 0.25, 0.0]]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("minibatches", [1, 2])
def test_kimi_k15(packed: bool, minibatches: int) -> None:
    """By trajectory: -A log pi(y) + tau / 2 (log pi(y) - log pi_i(y))^2, A = r - mean r of the group."""
    t = trial(KimiConfig(tau=0.3, minibatches=minibatches, reset_optimizer=minibatches > 1), packed=packed)
    assert (OLD_LOGPROBS in t.algorithm.needs) == (minibatches > 1)
    old = t.given[OLD_LOGPROBS] if minibatches > 1 else [p.detach() for p in t.logprobs]
    advantages = torch.tensor([r - fmean(g.rewards) for g in BATCH for r in g.rewards]).double()  # as in a batch
    terms = []
    for advantage, logprobs, before in zip(advantages, t.logprobs, old, strict=True):
        change = logprobs.sum() - before.sum()
        terms.append(-advantage * change + 0.15 * change**2)
    t.check(sum(terms) / len(terms))


def test_a_new_optimizer_has_more_than_one_update_of_kimi() -> None:
    assert KimiConfig().updates > 1
    assert OLD_LOGPROBS in trial(KimiConfig()).algorithm.needs, "tau has something to hold to"
    assert KimiConfig(minibatches=1, epochs=2).updates == 2


def test_short_right_answers_are_preferred_once_it_counts() -> None:
    assert length_rewards([10, 20, 30], [True, True, True]) == [0.5, 0.0, -0.5]
    assert length_rewards([10, 20, 30], [False, True, False]) == [0.0, 0.0, -0.5]
    assert length_rewards([7, 7], [True, False]) == [0.0, 0.0]
    answers = tuple(answer((1,) * n, (-1.0,) * n) for n in (2, 4))
    group = TrajectoryGroup((1,), answers, (Score(1.0, {"a": 1.0}), Score(1.0, {"a": 1.0})))
    algorithm = Grpo(GrpoConfig(length_weight=0.2, length_after=10, scale_rewards=False))
    before, after = ([s.per_token[ADVANTAGES][0] for s in algorithm.sequences([], [group], step)] for step in (9, 10))
    assert before == [0.0, 0.0]
    assert after == pytest.approx([0.1, -0.1])


TEACHER = TeacherConfig(url="http://teacher:8000", model="wise")
DISTILL = {
    "alone": DistillConfig(teacher=TEACHER),
    "unclipped": DistillConfig(teacher=TEACHER, clip_low=1.0, clip_high=100.0, normalize="sequence"),
    "rewarded": DistillConfig(teacher=TEACHER, reward_weight=0.5, samples_per_prompt=5),
}


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("config", DISTILL.values(), ids=DISTILL)
def test_each_token_is_worth_what_the_teacher_thinks_of_it(config: DistillConfig, packed: bool) -> None:
    t = trial(config, packed=packed)
    worth = plain.grpo_advantages(BATCH, scale=True)
    advantages = []
    for sample, reward in zip(SAMPLES, worth, strict=True):
        assert sample.teacher_logprobs is not None
        pairs = zip(sample.teacher_logprobs, sample.logprobs, strict=True)
        row = [config.reward_weight * reward + teacher - mine for teacher, mine in pairs]
        advantages.append(torch.tensor(row, dtype=torch.float32).double().tolist())  # as a batch has it
    output = t.check(plain.policy_loss(msgspec.to_builtins(config), t.logprobs, BEHAVIOUR, advantages))
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
