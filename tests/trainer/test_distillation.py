"""A whole distillation: a real vLLM engine behind its gateway is the teacher, and the student is trained, published and
sampled from as in any run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from tests.live import LiveServer
from tests.trainer.faults.runs import events
from tests.trainer.fleet import fleet
from tests.trainer.rollouts.client import client, records
from tests.trainer.zygote import Zygote
from trainer.config import TeacherConfig
from trainer.data.tokenizer import Tokenizer
from trainer.trajectory import TrajectoryGroup

pytestmark = [pytest.mark.broad, pytest.mark.engine]

CONFIGS = Path(__file__).parents[2] / "trainer" / "configs"
ENGINE = ("--dtype", "float32", "--max-model-len", "256")
DATA = {"kind": "arithmetic", "operands": 2, "largest": 4, "held_out": 10}


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
            ids = torch.tensor([[*record.prompt_ids, *trajectory.token_ids]])
            with torch.no_grad():
                distributions = reference(ids).logits[0, :-1].log_softmax(-1)
            expected = distributions.gather(1, ids[0, 1:, None])[len(record.prompt_ids) - 1 :, 0].tolist()
            assert trajectory.teacher_logprobs == pytest.approx(expected, abs=1e-3)


@pytest.mark.timeout(900)
def test_a_student_comes_to_agree_with_a_teacher_that_vllm_serves(
    zygote: Zygote, tiny_model: str, tmp_path: Path
) -> None:
    taught = {"model": {"path": tiny_model}, "data": DATA, "algorithm": {"name": "sft"}, "steps": 80, "batch": 64}
    taught["optimizer"] = {"lr": 2e-3, "warmup_steps": 10, "decay": "cosine"}
    wrong = {"data": DATA | {"mistake": "off_by_one", "noise": 0.8}}
    zygote.train(taught | {"save_to": str(tmp_path / "teacher")}, tmp_path)
    zygote.train(taught | wrong | {"save_to": str(tmp_path / "student")}, tmp_path)
    live = LiveServer(tmp_path / "teacher", tmp_path / "state", ENGINE, name="teacher")
    with live.running(), fleet(str(tmp_path / "student"), tmp_path) as served:
        check_logprobs(live, served.server.url, tmp_path / "teacher")
        example = yaml.safe_load((CONFIGS / "distill.yaml").read_text())
        example["algorithm"]["teacher"] |= {"url": live.url, "model": live.name}
        example |= {
            "model": {"path": str(tmp_path / "student")},
            "data": DATA,
            "batch": 15,  # every problem there is
            "steps": 40,
            "optimizer": {"lr": 5e-4},
            "rollout": {"max_tokens": 4, "request": "group"},
            "gateway": {"url": served.server.url},
            "publish": {"model": served.model, "store": served.store_url, "dtype": "float32"},
            "rewards": [{"kind": "exact_match"}],
            "eval": [{"every": 100, "prompts": 10}],
            "save_to": None,
        }
        example.pop("metrics")
        steps = events(zygote.train(example, tmp_path, "distill"), "step")
    divergences, rewards = ([step[name] for step in steps] for name in ("teacher_kl", "reward_mean"))
    print(f"reverse KL {divergences}, rewards {rewards}")
    # 60 samples a step. Rewards are not in the loss: the student is right more often because the teacher is.
    assert sum(divergences[-10:]) / 10 < divergences[0] / 3, divergences
    assert sum(rewards[-10:]) / 10 > rewards[0] + 0.2, rewards
