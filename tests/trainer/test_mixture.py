"""The whole loop on a mixture of experts: trained by two ranks with half of the experts each, served by vLLM, swapped
after every step, and learning from rewards."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import stock
from tests.live import LiveServer
from tests.trainer.faults.runs import events, example
from tests.trainer.fleet import exported
from tests.trainer.zygote import Zygote
from tests.waiting import wait_until
from trainer.tiny_model import tiny_run, write_tiny_model

pytestmark = [pytest.mark.broad, pytest.mark.engine, pytest.mark.usefixtures("quiet_engines")]

ENGINE = ("--dtype", "float32", "--max-model-len", "256")
PROMPTS = [[5, 13, 3, 13, 8, 14], [3, 13, 3, 13, 4, 14], [8, 13, 7, 13, 6, 14]]  # 2+0+5=, 0+0+1=, 5+4+3=
LAST = 10  # steps: 1,280 samples of 160 prompts


def mistaken(zygote: Zygote, root: Path, family: str = "qwen2", **more: Any) -> Path:
    """A model that has learned the mistake in the data of the example of fine-tuning."""
    write_tiny_model(root / "random", family, max_position_embeddings=1024)  # as the stock engine expects
    config = example("sft.yaml")
    config |= {"model": {"path": str(root / "random")}, "data": config["data"] | {"noise": 0.85}}
    config |= {"save_to": str(root / "mistaken"), "publish": None, "eval": [], "gateway": None}
    zygote.train(config | {"metrics": str(root / "taught.jsonl")} | more, root)
    return root / "mistaken"


def learn(live: LiveServer, recipe: str, root: Path, **changes: Any) -> Path:
    """Train the model of the server by an example to its end; the metrics."""
    config = example(recipe) | {"model": {"path": live.processes.config.model}, "gateway": {"url": live.url}}
    config |= {"metrics": str(root / "learned.jsonl"), **changes}
    (root / "learn.yaml").write_text(yaml.safe_dump(tiny_run(config)))
    trainer = live.processes.train(root / "learn.yaml")
    wait_until(lambda: not trainer.alive, 600, what="the trainer ends")
    assert trainer.process.returncode == 0, trainer.tail()
    return root / "learned.jsonl"


def check_learned(metrics: Path, active: int) -> None:
    """Rewards and accuracy have risen, a version came with each step, and vLLM sampled from the trainer's weights."""
    steps, evals = events(metrics, "step"), events(metrics, "eval")
    rewards, accuracies = [step["reward_mean"] for step in steps], [event["accuracy"] for event in evals]
    print(f"rewards {rewards}, held-out accuracy {accuracies[0]} -> {accuracies[-1]}")
    # Even if all samples of a prompt were alike, the standard errors would be at most 0.125 for the 16 prompts of the
    # first step, and 0.04 for those of the last ones.
    assert statistics.fmean(rewards[-LAST:]) >= rewards[0] + 0.4
    assert accuracies[-1] >= accuracies[0] + 0.4  # on the same problems, none of which was trained on
    assert [step["version"] for step in steps] == list(range(steps[0]["version"], active + 1)), "a version each step"
    current = [step["logprob_gap_max"] for step in steps if step["version_lag_max"] == 0]
    assert len(current) > len(steps) / 2
    assert max(current) < 1e-4


@pytest.mark.timeout(900)
def test_a_mixture_learns_from_rewards_while_it_is_swapped_every_step(zygote: Zygote, tmp_path: Path) -> None:
    """`hotswap up` and `hotswap train`, with the configuration that is the example."""
    two_halves = example("grpo_moe.yaml")["parallel"]
    assert two_halves["expert"] == 2
    begun, improved = mistaken(zygote, tmp_path, "qwen3_moe", parallel=two_halves), tmp_path / "improved"
    live = LiveServer(begun, tmp_path / "state", ENGINE, name="demo")
    with live.running():
        metrics = learn(live, "grpo_moe.yaml", tmp_path, save_to=str(improved))
        said = [live.generate(prompt, 4)["choices"][0]["token_ids"] for prompt in PROMPTS]
        active = live.active()

    check_learned(metrics, active)
    start, end = exported(begun), exported(improved)
    assert start.keys() == end.keys()
    assert not [name for name in start if start[name].equal(end[name])], "every expert and router was trained"
    assert said == stock.answers(improved, PROMPTS, 4, dtype="float32"), "what serves is what was saved"
