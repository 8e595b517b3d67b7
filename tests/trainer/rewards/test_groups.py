"""Rewards that see all samples of a prompt: what they get, what they add, and what becomes of one that fails."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.trainer.rollouts.generate_server import GenerateServer
from trainer.config import EvalConfig, ExactMatchReward, GatewayConfig, GroupReward, RewardConfig, RolloutConfig
from trainer.data.records import Record
from trainer.data.tokenizer import Tokenizer
from trainer.errors import ConfigError
from trainer.metrics.rollouts import rollout_metrics
from trainer.rewards import ComparingReward, RewardRequest, SampleGroup, Score, Scorer, Weighted, build_scorer
from trainer.rollouts.sampling import RolloutSampler

HERE = "tests.trainer.rewards.functions"


def compare(configs: Sequence[RewardConfig], *answers: str) -> list[Score]:
    """The scores of one prompt's answers; the last one was cut off."""

    async def asked(scorer: Scorer) -> list[Score]:
        requests = [
            RewardRequest(
                "3+4=", answer, "07", {"bonus": 0.5}, ({"role": "assistant", "content": answer},), len(answer),
                truncated=answer == answers[-1],
            )
            for answer in answers
        ]  # fmt: skip
        return await scorer.compared(requests, await asyncio.gather(*(scorer(request) for request in requests)))

    with contextlib.closing(build_scorer(configs)) as scorer:
        return asyncio.run(asked(scorer))


def test_a_group_reward_is_one_more_part_of_each_score() -> None:
    ranked = GroupReward(target=f"{HERE}:ranked", weight=-0.5, name="length", workers=1)
    scores = compare([ranked, ExactMatchReward(weight=2.0)], "07", "0000007", "7")
    assert [score.parts for score in scores] == [
        {"exact_match": 1, "length": 1}, {"exact_match": 0, "length": 2}, {"exact_match": 0, "length": 0},
    ]  # fmt: skip
    assert [score.total for score in scores] == [1.5, -1.0, 0.0]
    assert [score.full for score in scores] == [True, False, False], "right is right, whatever its siblings are"


def test_it_sees_every_sample_and_may_be_a_coroutine() -> None:
    scores = compare([ExactMatchReward(weight=2.0), GroupReward(target=f"{HERE}:seen", workers=1)], "07", "8")
    assert [score.failures for score in scores] == [{}, {}]
    assert [score.total for score in scores] == [3.0, 1.0]


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("raise", "KeyError"),
        ("hang", "took over 1 s"),
        ("die", "status 3"),
        ("one number", "a list with a number for each sample"),
        ("too few", "1 numbers for 2 samples"),
        ("infinite", "finite"),
    ],
)
def test_one_that_fails_has_no_value_for_any_sample(fault: str, why: str) -> None:
    reward = GroupReward(target=f"{HERE}:ranked", timeout_s=1.0, workers=1)
    scores = compare([ExactMatchReward(), reward, replace(reward, on_failure=-1.0, name="instead")], fault, "07")
    for score in scores:
        assert score.missing == ["group"]
        assert why in score.failures["group"]
    assert [score.total for score in scores] == [-1.0, 0.0]


def test_a_target_names_a_function() -> None:
    with pytest.raises(ConfigError, match="names no function"):
        GroupReward(target="module")


class Away(ComparingReward):
    """Fails until it was asked so often."""

    def __init__(self, until: int) -> None:
        self.asked, self.until = 0, until

    async def __call__(self, group: SampleGroup, /) -> list[float]:
        self.asked += 1
        if self.asked <= self.until:
            raise ConnectionError("nobody there")
        return [float(sample.tokens) for sample in group.samples]


def rollouts(server: GenerateServer, model: str, reward: ComparingReward) -> RolloutSampler:
    scorer = Scorer({"length": Weighted(reward)})
    return RolloutSampler(GatewayConfig(url=server.url), RolloutConfig(max_tokens=8), scorer, Tokenizer(model), 3)


def test_it_is_asked_again_and_an_outage_leaves_the_group_out(server: GenerateServer, tiny_model: str) -> None:
    problem = Record(0, "1+2=", "03", Tokenizer(tiny_model).prompt("1+2="), ())
    with rollouts(server, tiny_model, Away(1)) as running:
        group = running.submit(problem, 4, 0).result(timeout=60)
        assert group.rewards == [float(trajectory.policy_tokens) for trajectory in group.trajectories]
        assert "trajectories_without_reward" not in running.stats()
    assert rollout_metrics([group], 0)["reward/length"] == sum(group.rewards) / 4
    assert type(group).from_json(json.loads(json.dumps(group.to_json()))) == group, "a checkpoint keeps it"
    with rollouts(server, tiny_model, Away(1000)) as running:
        assert running.submit(problem, 4, 0).result(timeout=60).trajectories == (), "never trained on as 0"
        stats = running.stats()
    assert stats["trajectories_without_reward"] == 4
    assert stats["reward_failures/length"] == 2


@pytest.mark.parametrize("samples", [1, 3])
def test_an_evaluation_compares_nothing(server: GenerateServer, tiny_model: str, samples: int) -> None:
    reward = Away(0)
    problem = Record(0, "1+2=", "03", Tokenizer(tiny_model).prompt("1+2="), ())
    with rollouts(server, tiny_model, reward) as running:
        (group,) = running.evaluate([problem], EvalConfig(samples=samples))
    assert group.scores == (Score(0),) * samples
    assert reward.asked == 0
