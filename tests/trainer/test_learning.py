"""The two recipes, end to end: a model learns a mistake from its data, then unlearns it from rewards alone.

Real trainer process, real store, coordinator and slots, a real model that samples; the engine alone is transformers'.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.trainer.faults.runs import events
from tests.trainer.fleet import Fleet, fleet
from tests.trainer.zygote import Zygote

pytestmark = pytest.mark.broad

CONFIGS = Path(__file__).parents[2] / "trainer" / "configs"


def configured(name: str, running: Fleet, root: Path, **changes: Any) -> dict[str, Any]:
    """An example configuration, pointed at this test's server and directory."""
    config: dict[str, Any] = yaml.safe_load((CONFIGS / name).read_text())
    config["gateway"]["url"] = running.server.url
    config["publish"] |= {"store": running.store_url, "model": running.model}
    return {**config, "metrics": str(root / f"{name}.jsonl")} | changes


@pytest.mark.timeout(600)
def test_fine_tuning_then_grpo_raises_held_out_accuracy(zygote: Zygote, tiny_model: str, tmp_path: Path) -> None:
    tuned, improved = str(tmp_path / "sft"), str(tmp_path / "grpo")
    with fleet(tiny_model, tmp_path) as running:
        changes: dict[str, Any] = {"model": {"path": tiny_model}, "save_to": tuned, "steps": 150}
        sft = zygote.train(configured("sft.yaml", running, tmp_path, **changes), tmp_path)
        changes = {"model": {"path": tuned}, "save_to": improved, "checkpoint": None, "steps": 40}
        grpo = zygote.train(configured("grpo.yaml", running, tmp_path, **changes), tmp_path)

    (first, *_, before), (*_, after) = ([e["accuracy"] for e in events(run, "eval")] for run in (sft, grpo))
    print(f"accuracy {first} -> {before} in fine-tuning, {after} after GRPO")
    assert first < 0.05
    assert before < 0.5  # the mistake was learned
    assert after >= before + 0.3  # and unlearned, on problems that were never trained on

    steps = events(grpo, "step")
    assert [step["version"] for step in steps] == sorted({step["version"] for step in steps})  # one version a step
    # The commit record is written a moment before the instance flips: a first answer may still be the old version's.
    assert max(step["version_lag_max"] for step in steps) <= 1
    current = [step["logprob_gap_max"] for step in steps if step["version_lag_max"] == 0]
    assert len(current) > len(steps) / 2
    assert max(current) < 1e-4  # the server samples from the trainer's very weights
    assert (tmp_path / "grpo" / "model.safetensors").exists()
