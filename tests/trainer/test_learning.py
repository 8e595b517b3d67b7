"""Recipes, end to end: a model learns a mistake from its data, then unlearns it from rewards alone; a student comes to
agree with its teacher.

Real trainer process, real store, coordinator and slots, a real model that samples. The engine that samples is
transformers'; the teacher's is vLLM.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.live import LiveServer
from tests.trainer.faults.runs import events, example
from tests.trainer.fleet import Fleet, fleet
from tests.trainer.rollouts.client import client, records
from tests.trainer.rollouts.teacher_server import logprobs
from tests.trainer.rollouts.test_runs import reinforced
from tests.trainer.zygote import Zygote
from trainer.config import TeacherConfig
from trainer.data.tokenizer import Tokenizer
from trainer.trajectory import TrajectoryGroup

pytestmark = pytest.mark.broad

ENGINE = ("--dtype", "float32", "--max-model-len", "256")


def configured(name: str, running: Fleet, root: Path, **changes: Any) -> dict[str, Any]:
    """An example configuration, pointed at this test's server and directory."""
    config = example(name)
    config["gateway"]["url"] = running.server.url
    config["publish"] |= {"store": running.store_url, "model": running.model}
    return {**config, "metrics": str(root / f"{name}.jsonl")} | changes


@pytest.mark.timeout(1800)
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


def check_logprobs(live: LiveServer, student_url: str, model: Path) -> None:
    """Both forms of the question have the answer that transformers gives."""
    tokenizer, reference = Tokenizer(model), AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    (record,) = records(tokenizer, "1+2=")
    for form in ("prompt_logprobs", "echo"):
        teacher = TeacherConfig(url=live.url, model=live.name, form=form)  # type: ignore[arg-type]
        with client(student_url, tokenizer, teacher=teacher, max_tokens=8) as running:
            group = running.round(record, 3, 0).result(timeout=60)
        assert isinstance(group, TrajectoryGroup)
        for trajectory in group.trajectories:
            expected = logprobs(reference, [*record.prompt_ids, *trajectory.token_ids])[len(record.prompt_ids) - 1 :]
            assert trajectory.teacher_logprobs == pytest.approx(expected, abs=1e-3)


@pytest.mark.engine
@pytest.mark.timeout(1800)
def test_a_student_comes_to_agree_with_a_teacher_that_vllm_serves(
    zygote: Zygote, tiny_model: str, tmp_path: Path
) -> None:
    """The student is trained, published and sampled from as in any run."""
    teacher = zygote.taught(tiny_model, tmp_path / "teacher")
    student = zygote.taught(tiny_model, tmp_path / "student", mistake="off_by_one", noise=0.8)
    live = LiveServer(Path(teacher), tmp_path / "state", ENGINE, name="teacher")
    with live.running(), fleet(student, tmp_path) as served:
        check_logprobs(live, served.server.url, Path(teacher))
        recipe = example("distill.yaml")
        recipe["algorithm"]["teacher"] |= {"url": live.url, "model": live.name}
        recipe |= reinforced(student, served, algorithm=recipe["algorithm"], steps=40)
        # At a constant rate the divergence of the last steps is noise as large as what is left of it.
        recipe |= {"rewards": [{"kind": "exact_match"}], "save_to": None, "optimizer": {"lr": 5e-4, "decay": "cosine"}}
        recipe.pop("metrics")
        steps = events(zygote.train(recipe, tmp_path, "distill"), "step")
    divergences, rewards = ([step[name] for step in steps] for name in ("teacher_kl", "reward_mean"))
    print(f"reverse KL {divergences}, rewards {rewards}")
    # 60 samples a step. Rewards are not in the loss: the student is right more often because the teacher is.
    assert sum(divergences[-10:]) / 10 < divergences[0] / 3, divergences
    assert sum(rewards[-10:]) / 10 > rewards[0] + 0.2, rewards
