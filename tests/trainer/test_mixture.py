"""The whole loop on a mixture of experts: trained by two ranks with half of the experts each, served by vLLM, swapped
after every step, and learning from rewards."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

from loadtest.training.learning.recipes import ENVIRONMENT
from tests import stock
from tests.live import LiveServer
from tests.trainer.zygote import Zygote
from tests.waiting import wait_until
from trainer.tiny_model import tiny_run, write_tiny_model

pytestmark = [pytest.mark.broad, pytest.mark.engine]

CONFIGS = Path(__file__).parents[2] / "trainer" / "configs"
ENGINE = ("--dtype", "float32", "--max-model-len", "256")
PROMPTS = [[5, 13, 3, 13, 8, 14], [3, 13, 3, 13, 4, 14], [8, 13, 7, 13, 6, 14]]  # 2+0+5=, 0+0+1=, 5+4+3=
LAST = 10  # steps: 1,280 samples of 160 prompts


def configured(name: str, root: Path, file: str, **changes: Any) -> Path:
    """An example configuration with other sections; its metrics lie beside it."""
    config = yaml.safe_load((CONFIGS / name).read_text()) | {"metrics": str(root / f"{file}.jsonl")} | changes
    path = root / f"{file}.yaml"
    path.write_text(yaml.safe_dump(tiny_run(config)))
    return path


def events(root: Path, file: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (root / f"{file}.jsonl").read_text().splitlines()]


def weights(directory: Path) -> dict[str, Any]:
    """What a checkpoint holds, a file or more of every rank."""
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.timeout(900)
def test_a_mixture_learns_from_rewards_while_it_is_swapped_every_step(
    zygote: Zygote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`hotswap up` and `hotswap train`, with the configuration that is the example."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    random, mistaken, improved = (tmp_path / name for name in ("random", "mistaken", "improved"))
    write_tiny_model(random, "qwen3_moe", max_position_embeddings=1024)  # as the stock engine expects
    two_halves = yaml.safe_load((CONFIGS / "grpo_moe.yaml").read_text())["parallel"]
    assert two_halves["expert"] == 2
    wrong = yaml.safe_load((CONFIGS / "sft.yaml").read_text())["data"] | {"noise": 0.85}
    without = {"publish": None, "eval": [], "gateway": None}
    teach = {"model": {"path": str(random)}, "data": wrong, "parallel": two_halves, "save_to": str(mistaken), **without}
    status, _, errors = zygote.run(["--config", str(configured("sft.yaml", tmp_path, "sft", **teach))], tmp_path)
    assert status == 0, errors

    live = LiveServer(mistaken, tmp_path / "state", ENGINE, name="demo")
    with live.running():
        learn = {"model": {"path": str(mistaken)}, "gateway": {"url": live.url}, "save_to": str(improved)}
        trainer = live.processes.train(configured("grpo_moe.yaml", tmp_path, "grpo", **learn))
        wait_until(lambda: not trainer.alive, 600, what="the trainer ends")
        assert trainer.process.returncode == 0, trainer.tail()
        said = [live.generate(prompt, 4)["choices"][0]["token_ids"] for prompt in PROMPTS]
        active = live.active()

    happened = events(tmp_path, "grpo")
    steps = [event for event in happened if event["event"] == "step"]
    before, *_, after = (event["accuracy"] for event in happened if event["event"] == "eval")
    rewards = [step["reward_mean"] for step in steps]
    first, last = rewards[0], statistics.fmean(rewards[-LAST:])
    print(f"rewards {rewards}, held-out accuracy {before} -> {after}")
    # Even if all samples of a prompt were alike, the standard errors would be at most 0.125 for the 16 prompts of the
    # first step, and 0.04 for those of the last ones.
    assert last >= first + 0.4
    assert after >= before + 0.4  # on the same problems, none of which was trained on
    assert [step["version"] for step in steps] == list(range(steps[0]["version"], active + 1)), "a version each step"
    current = [step["logprob_gap_max"] for step in steps if step["version_lag_max"] == 0]
    assert len(current) > len(steps) / 2
    assert max(current) < 1e-4  # vLLM samples from the trainer's very weights
    start, end = weights(mistaken), weights(improved)
    assert start.keys() == end.keys()
    assert not [name for name in start if start[name].equal(end[name])], "every expert and router was trained"
    assert said == stock.answers(improved, PROMPTS, 4, dtype="float32"), "what serves is what was saved"
