"""A policy learns to use a tool from rewards alone: a short run of the benchmark's task, against a real server.

Every token that the policy wrote has the weights that wrote it; the tool's have none and are not trained on
(tests/trainer/megatron/test_tool_tokens.py says what that means for the gradient).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from loadtest.training.learning import tools as learning_tools
from loadtest.training.learning.bench import Bench, _server
from loadtest.training.learning.recipes import ENVIRONMENT, MODEL, TASKS, WAYS, recipe
from server.up.server import Server
from trainer.config import TrainerConfig, strict
from trainer.data import build_dataset
from trainer.data.tokenizer import Tokenizer
from trainer.report import read_events
from trainer.rewards import build_scorer
from trainer.rollouts.sampling import RolloutSampler
from trainer.tiny_model import write_tiny_model
from trainer.trajectory import TrajectoryGroup

STARTS = ("server.gateway", "server.cli instance", "trainer.main", "weightsync.push", "weightsync.persist")
STEPS = 20
TASK = replace(next(task for task in TASKS if task.name == "calculator"), rl_steps=STEPS)
GRPO = next(way for way in WAYS if way.name == "grpo")


@pytest.mark.broad
@pytest.mark.engine
@pytest.mark.timeout(1800)
def test_grpo_teaches_a_model_to_ask_the_calculator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    learning_tools.write_records(tmp_path, seed=1)
    write_tiny_model(tmp_path / f"{TASK.name}-random", characters=TASK.characters, seed=1)
    with _server(TASK, tmp_path) as server:
        bench = Bench(tmp_path, 1, server, Console())
        bench.base(TASK)
        found = bench.run(TASK, GRPO)
        groups = play(server, tmp_path)
    assert "failed" not in found, found

    print(f"held-out accuracy {found['curve']}, reward {found['reward']}, turns {found['turns']}")
    assert found["first"] < 0.05, "the base guesses"
    assert found["last"] > 0.6
    rewards = [value for _, value in found["reward"]]
    assert sum(rewards[-5:]) / 5 > rewards[0] + 0.3, "rewards alone raised it"
    asked = [value - 1 for _, value in found["turns"]]
    assert sum(asked[-5:]) / 5 > 0.8 > 0.6 > asked[0], "by asking"
    steps = list(read_events(str(tmp_path / f"{TASK.name}-grpo.jsonl")).steps.values())
    assert len(steps) == STEPS
    assert max(step["logprob_gap_max"] for step in steps if step["version_lag_max"] == 0) < 1e-3

    played = [trajectory for group in groups for trajectory in group.trajectories]
    for trajectory in played:
        covered = [0.0] * len(trajectory.token_ids)
        for span in trajectory.versions:
            covered[span.start : span.end] = [1.0] * (span.end - span.start)
        assert tuple(covered) == trajectory.mask, "every token of the policy has a version, and none of the tool's has"
        assert {span.version for span in trajectory.versions} == {steps[-1]["version"]}, "the last one"
    with_tool = [t for t in played if [turn.of_policy for turn in t.turns] == [True, False, True]]
    assert len(with_tool) > 0.8 * len(played)


def play(server: Server, work: Path) -> list[TrajectoryGroup]:
    """Held-out problems, with the weights that the server has at the end."""
    written = recipe(TASK, GRPO, work, server.url, 1)
    config = strict.build(TrainerConfig, written | {"publish": written["publish"] | {"store": server.store}})
    tokenizer = Tokenizer(work / f"{TASK.name}-random")
    records = build_dataset(config.data, tokenizer, 1).held_out[:16]
    assert config.gateway is not None
    scorer = build_scorer(config.rewards, config.gateway)
    with RolloutSampler(config.gateway, config.rollout, scorer, tokenizer, 1, config.environment, MODEL) as rollouts:
        running = [rollouts.submit(record, 4, number) for number, record in enumerate(records)]
        return [future.result(timeout=120) for future in running]
