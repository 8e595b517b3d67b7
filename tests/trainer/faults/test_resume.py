"""Killed with SIGKILL at a random step and resumed, a run's curve is the uninterrupted one, bit for bit; so it is in
phases, with the models of its rewards, where the uninterrupted run had room for all."""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.trainer.faults.runs import PATIENCE_S, arguments, curve, events
from tests.trainer.fleet import Fleet, fleet, never_behind
from tests.trainer.rewards.functions import Large
from tests.trainer.rollouts.generate_server import Unmoved
from tests.trainer.zygote import Zygote
from tests.waiting import wait_until


def uninterrupted(zygote: Zygote, config: dict[str, Any], root: Path) -> Path:
    through = config | {"metrics": str(root / "through"), "checkpoint": None}
    zygote.train(through, root, "through", RUN="through")
    return root / "through"


def killed_and_resumed(zygote: Zygote, config: dict[str, Any], root: Path, kill_after: int) -> list[int]:
    """Kills the run once it has a checkpoint and has done that many steps, and runs it again; the steps that each of
    the two started from."""
    run = zygote.start(arguments(config, root), root / "said", RUN="killed")
    path = config["metrics"]
    wait_until(lambda: len(curve(path)) >= kill_after and bool(events(path, "checkpoint")), PATIENCE_S)
    os.kill(run, signal.SIGKILL)
    assert zygote.wait(run) == -signal.SIGKILL
    zygote.train(config, root, RUN="resumed")
    return [event["step"] for event in events(path, "start")]


def reinforced(running: Fleet, **changes: Any) -> dict[str, Any]:
    """Reinforcement learning with that fleet."""
    return {
        "algorithm": {"name": "grpo", "samples_per_prompt": 4},
        "rewards": [{"kind": "regex", "pattern": "[0-9]+"}],
        "rollout": {"max_tokens": 4},
        "gateway": {"url": running.server.url},
        "publish": {"model": "tiny", "store": running.store_url, "dtype": "float32", "lineage": "a"},
        "optimizer": {"lr": 2e-3},
        "batch": 4,
    } | changes


def repeats_itself(
    zygote: Zygote, config: dict[str, Any], root: Path, kill_after: int, *more: str, memory: Any = None
) -> int:
    """Killed and resumed, with a lineage and that section `memory` of its own, it has these numbers of the
    uninterrupted run; the step that it was resumed from."""
    numbers = ("reward_mean", "answer_tokens_mean", *more)
    expected = curve(uninterrupted(zygote, config, root), *numbers)
    config["publish"]["lineage"] = "b"
    config["memory"] = memory
    first, second = killed_and_resumed(zygote, config, root, kill_after)
    assert (first, second > 0) == (0, True)
    assert curve(config["metrics"], *numbers) == expected
    assert len({tuple(values) for values in expected.values()}) >= 4, "there was something to repeat"
    return second


@pytest.mark.broad
def test_fine_tuning(zygote: Zygote, config: dict[str, Any], tmp_path: Path) -> None:
    config |= {"steps": 100, "checkpoint": config["checkpoint"] | {"every": 10}}
    expected = curve(uninterrupted(zygote, config, tmp_path))
    first, second = killed_and_resumed(zygote, config, tmp_path, random.randrange(20, 80))
    assert first == 0
    assert 0 < second < 100
    assert curve(config["metrics"]) == expected
    assert len(expected) == 100


def test_reinforcement_learning(zygote: Zygote, config: dict[str, Any], tmp_path: Path, qwen2: str) -> None:
    """With a server that samples by nothing but weights and seed, rewards and rollouts repeat themselves too."""
    with fleet(qwen2, tmp_path) as running, never_behind(running):
        repeats_itself(zygote, config | reinforced(running, steps=9), tmp_path, random.randrange(4, 7))


@pytest.mark.broad
def test_an_asynchronous_run(zygote: Zygote, config: dict[str, Any], tmp_path: Path, qwen2: str) -> None:
    """The weights that write an answer depend on the moment. Where an answer depends on its request alone, and no more
    groups are ahead than a step takes, all the rest repeats itself: what was finished is trained on and not asked for
    again, what was in flight is."""
    with fleet(qwen2, tmp_path, kind=Unmoved) as running:
        config |= reinforced(
            running,
            rollout={"max_tokens": 4, "request": "group"},
            schedule={"name": "async", "max_lag": 2, "buffer": 4},
            gateway={"url": running.server.url, "api_key_env": "RUN"},
            checkpoint=config["checkpoint"] | {"keep": 100},
            steps=20,
        )
        second = repeats_itself(zygote, config, tmp_path, random.randrange(4, 16))

        buffer = tmp_path / "checkpoints" / f"step-{second:08d}" / "parts" / "rollouts.json"
        saved = json.loads(buffer.read_text())
        assert saved["drawn"] == 4 * second + 4
        assert sorted(entry["number"] for entry in saved["pending"]) == [4 * second + i for i in range(4)]
        finished = sum(entry["group"] is not None for entry in saved["pending"])
        asked = [headers for headers in running.server.headers if headers["authorization"] == "Bearer resumed"]
        assert len(asked) == 4 * (20 - second) - finished


def budget(model: str, models: float, nbytes: int = 0) -> float:
    """GiB: so often the model's weights, and so many bytes."""
    weights = sum(tensor.nbytes for tensor in load_file(Path(model) / "model.safetensors").values())
    return (models * weights + nbytes) / 2**30


@pytest.mark.broad
def test_a_checkpoint_is_taken_while_the_optimizer_is_away(
    zygote: Zygote, config: dict[str, Any], tmp_path: Path, qwen2: str
) -> None:
    """Evaluation brings the models of the rewards, the run's and its own, and sends the optimizer away; the checkpoint
    comes right after it."""
    large = [{"kind": "callable", "target": "tests.trainer.rewards.functions:large", "workers": 1}]
    with fleet(qwen2, tmp_path) as running, never_behind(running):
        config |= reinforced(
            running,
            rewards=large,
            data=config["data"] | {"held_out": 4},
            eval=[{"every": 2, "prompts": 2, "rewards": large}],
            checkpoint=config["checkpoint"] | {"every": 2},
            steps=8,
        )
        room = budget(qwen2, 3, 2 * Large.nbytes)  # weights, gradients and two moments are 4
        memory = {"budget_gib": room, "directory": str(tmp_path)}
        second = repeats_itself(zygote, config, tmp_path, random.randrange(3, 7), memory=memory)
    assert second in range(2, 8, 2)
    assert len(curve(config["metrics"])) == 8
    for step in events(config["metrics"], "step")[1:]:
        moved = {key.removeprefix("memory_ms/") for key in step if key.startswith("memory_ms/")}
        assert {"train/actor_optimizer", "train/reward_model"} <= moved, "one came, the other left"


@pytest.mark.broad
def test_a_reference_that_makes_room_for_training_comes_back_for_its_pass(
    zygote: Zygote, config: dict[str, Any], tmp_path: Path, qwen2: str
) -> None:
    """Preferences are not sampled: the reference looks at a step's records when they are whole."""
    config |= {"algorithm": {"name": "dpo"}, "data": {"kind": "arithmetic", "mistake": "off_by_one"}}
    config |= {"steps": 4, "checkpoint": None}
    expected = curve(uninterrupted(zygote, config, tmp_path))
    config["memory"] = {"budget_gib": budget(qwen2, 4.5), "directory": str(tmp_path)}  # 5 in all
    zygote.train(config, tmp_path, RUN="offloaded")
    assert curve(config["metrics"]) == expected
    assert len(expected) == 4
    for step in events(config["metrics"], "step")[1:]:
        assert {"memory_ms/inference/reference", "memory_ms/train/reference"} <= step.keys(), "it came, and left"
