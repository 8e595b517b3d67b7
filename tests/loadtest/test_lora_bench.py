"""The benchmarks of adapters: what is published, what is counted, and what both sides of a step are given."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from loadtest.models.checkpoints import make_checkpoint
from loadtest.training import lora
from loadtest.training.rl_step import ours, task
from trainer.config import LINEAR_LAYERS, TrainerConfig, strict
from trainer.tiny_model import tiny_run


def test_the_adapter_is_one_that_peft_loads(tmp_path: Path) -> None:
    from peft import PeftModel

    base = make_checkpoint(tmp_path / "base")
    path = lora.write_adapter(tmp_path / "adapter", base, rank=4)
    tensors = load_file(path / "adapter_model.safetensors")
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(path))
    loaded = [name for name, _ in adapted.named_parameters() if "lora_" in name]
    assert len(loaded) == len(tensors) == 2 * 2 * len(LINEAR_LAYERS)
    assert json.loads((path / "adapter_config.json").read_text())["r"] == 4


def test_figures_are_medians_and_ratios() -> None:
    row = {"bytes": 100, "publish_ms": 1.0, "stage_ms": 2.0, "first_token_ms": 10.0}
    adapter = lora.summary([row, row | {"first_token_ms": 30.0}, row | {"first_token_ms": 20.0}])
    assert adapter["first_token_ms"] == 20.0
    assert adapter["first_token_ms_range"] == [10.0, 30.0]
    model = lora.summary([row | {"bytes": 4000, "first_token_ms": 50.0}])
    assert lora.ratios(model, adapter) == {"bytes": 40, "publish_ms": 1, "stage_ms": 1, "first_token_ms": 2.5}


@pytest.mark.parametrize("rank", [0, 16])
def test_both_sides_of_a_step_train_the_same_adapter(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from loadtest.training.rl_step.trl_run import adapter

    monkeypatch.setenv("HOTSWAP_STORE", "sqlite:///unused")
    asked = dataclasses.replace(task.SMALL, rank=rank)
    values = ours.config(asked, tmp_path, "http://127.0.0.1:1", "async", "instant", tmp_path / "m")
    built, theirs = strict.build(TrainerConfig, tiny_run(values)), adapter(asked)
    if not rank:
        assert built.lora is None is theirs
        return
    assert built.lora is not None
    assert (built.lora.rank, built.lora.alpha) == (theirs.r, theirs.lora_alpha) == (16, 32)
    assert set(built.lora.target_modules) == set(theirs.target_modules)
