"""A run in phases, with the models of its rewards: killed between them, it repeats the run that had room for all."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.trainer.faults.runs import arguments, curve, events
from tests.trainer.faults.test_resume import killed_and_resumed, uninterrupted
from tests.trainer.fleet import fleet, never_behind
from tests.trainer.rewards.functions import Large
from tests.trainer.zygote import Zygote

pytestmark = pytest.mark.broad

STEPS, EVERY = 8, 2


def test_a_checkpoint_is_taken_while_the_optimizer_is_away(
    zygote: Zygote, config: dict[str, Any], tmp_path: Path, small_models: dict[str, str]
) -> None:
    """Evaluation brings the models of the rewards, the run's and its own, and sends the optimizer away; the checkpoint
    comes right after it."""
    weights = sum(tensor.nbytes for tensor in load_file(Path(small_models["qwen2"]) / "model.safetensors").values())
    budget = 2 * Large.nbytes + 3 * weights  # weights, gradients and two moments are 4
    large = [{"kind": "callable", "target": "tests.trainer.rewards.functions:large", "workers": 1}]
    with fleet(small_models["qwen2"], tmp_path) as running, never_behind(running):
        config |= {
            "algorithm": {"name": "grpo", "samples_per_prompt": 4},
            "rewards": large,
            "rollout": {"max_tokens": 4},
            "gateway": {"url": running.server.url},
            "publish": {"model": "tiny", "store": running.store_url, "dtype": "float32", "lineage": "a"},
            "data": config["data"] | {"held_out": 4},
            "eval": [{"every": EVERY, "prompts": 2, "rewards": large}],
            "checkpoint": config["checkpoint"] | {"every": EVERY},
            "steps": STEPS,
            "optimizer": {"lr": 2e-3},
            "batch": 4,
        }
        expected = curve(uninterrupted(zygote, config, tmp_path), "reward_mean")
        config["publish"]["lineage"] = "b"
        config["memory"] = {"budget_gib": budget / 2**30, "directory": str(tmp_path)}
        first, second = killed_and_resumed(zygote, config, tmp_path, random.randrange(EVERY + 1, STEPS - 1))
        assert first == 0
        assert second in range(EVERY, STEPS, EVERY)
    assert curve(config["metrics"], "reward_mean") == expected
    assert len(expected) == STEPS
    for step in events(config["metrics"], "step")[1:]:
        moved = {key.removeprefix("memory_ms/") for key in step if key.startswith("memory_ms/")}
        assert {"train/actor_optimizer", "train/reward_model"} <= moved, "one came, the other left"


def test_a_reference_that_makes_room_for_training_comes_back_for_its_pass(
    zygote: Zygote, config: dict[str, Any], tmp_path: Path, small_models: dict[str, str]
) -> None:
    """Preferences are not sampled: the reference looks at a step's records when they are whole."""
    weights = sum(tensor.nbytes for tensor in load_file(Path(small_models["qwen2"]) / "model.safetensors").values())
    config |= {
        "algorithm": {"name": "dpo"},
        "data": {"kind": "arithmetic", "mistake": "off_by_one"},
        "steps": 4,
        "checkpoint": None,
    }
    expected = curve(uninterrupted(zygote, config, tmp_path))
    config["memory"] = {"budget_gib": 4.5 * weights / 2**30, "directory": str(tmp_path)}  # 5 in all
    run = zygote.start(arguments(config, tmp_path), tmp_path / "said", RUN="offloaded")
    assert zygote.wait(run) == 0, (tmp_path / "said").read_text()
    assert curve(config["metrics"]) == expected
    assert len(expected) == 4
    for step in events(config["metrics"], "step")[1:]:
        assert {"memory_ms/inference/reference", "memory_ms/train/reference"} <= step.keys(), "it came, and left"
