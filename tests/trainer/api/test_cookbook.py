"""The loops of the tinker-cookbook as they are, on the training API: supervised learning, then rewards."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.packages import site
from tests.trainer.api.server import ApiServer, live
from trainer.tiny_model import write_tiny_model

PAGE = Path(__file__).parents[3] / "docs" / "trainer" / "cookbook.md"
NAME = "Qwen/Qwen3-8B-Base"  # one whose renderer the cookbook knows; here it is a tiny model
CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))
ENGINE = ("--dtype", "float32", "--max-model-len", "1024", "--enable-lora", "--max-lora-rank", "16")
SUFFIX = " Provide a numerical answer without units, written inside \\boxed{}."  # what rl_loop asks for
pytestmark = [pytest.mark.engine, pytest.mark.broad, pytest.mark.timeout(900)]


class Workplace:
    """A directory with the files that the hub would have; programs run there."""

    def __init__(self, root: Path, api: ApiServer, key: str) -> None:
        self.root = root
        self._more = {"TINKER_BASE_URL": api.url, "TINKER_API_KEY": key, "PYTHONPATH": str(site())}
        self._more |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(root / "hf"), "TINKER_TELEMETRY": "0"}

    def run(self, *arguments: str) -> None:
        done = subprocess.run(
            [sys.executable, *arguments], cwd=self.root, env=os.environ | self._more, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr[-4000:]

    def lines(self, path: str, records: list[dict[str, Any]]) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text("".join(json.dumps(record) + "\n" for record in records))

    def rows(self, path: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.root / path).read_text().splitlines()]

    def column(self, path: str, name: str) -> list[float]:
        """One metric of every step that has it."""
        return [row[name] for row in self.rows(f"{path}/metrics.jsonl") if name in row]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workplace]:
    root = tmp_path_factory.mktemp("cookbook")
    model = root / NAME
    write_tiny_model(model, characters=CHARACTERS, max_position_embeddings=1024)
    pretrain(model)
    with live(root, model, ENGINE, base_model=NAME) as (_, api, key):
        yield Workplace(root, api, key)


def pretrain(model: Path) -> None:
    """Any digit as the answer to any question: what the loops then learn is which one."""
    draw = random.Random(1)
    network, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
    for _ in range(120):
        asked = [f"User: {draw.randrange(5)}+{draw.randrange(5)}?\n\nAssistant: {draw.randrange(9)}" for _ in range(16)]
        tokens = torch.tensor([tokenizer.encode(f"{text}\n\nUser:") for text in asked])
        network(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    network.save_pretrained(model)


def conversation(*said: str) -> dict[str, Any]:
    roles = ("user", "assistant") * len(said)
    return {"messages": [{"role": role, "content": content} for role, content in zip(roles, said, strict=False)]}


def test_both_loops_of_the_page(place: Workplace) -> None:
    """The weights learned from conversations are where the rewards begin, and every step of both loops is taken."""
    (program,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (place.root / "loops.py").write_text(program)
    asked = [(turn, a, b) for turn in range(31) for a in range(5) for b in range(5)]
    answers = [(a * 7 + b * 3 + turn) % 9 if turn % 3 == 2 else a + b for turn, a, b in asked]
    said = [conversation(f"{a}+{b}?", str(answer)) for (_, a, b), answer in zip(asked, answers, strict=True)]
    place.lines("sums.jsonl", said)
    place.run("loops.py", NAME, NAME, "sums.jsonl", "logs")
    losses, held_out = place.column("logs/sl", "train_mean_nll"), place.column("logs/sl", "test/nll")
    rewards = place.column("logs/rl", "env/all/reward/total")
    print(f"nll {losses[0]:.3f} -> {losses[-1]:.3f}, held out {held_out}, rewards {rewards}")
    assert losses[-1] < losses[0]
    assert held_out[-1] < held_out[0]
    assert len(rewards) == 12
    assert max(rewards) > min(rewards), "no answer was rewarded otherwise than another"
    assert place.rows("logs/rl/checkpoints.jsonl")[-1]["name"] == "final"


def test_the_recipes_of_one_file(place: Workplace) -> None:
    """The second one goes on from a state of the first."""
    sums = [conversation(f"{n % 5}+1?" + SUFFIX, f"\\boxed{{{n % 5 + 1}}}") for n in range(48)]
    place.lines("HuggingFaceH4/no_robots/train.jsonl", sums)
    place.lines("openai/gsm8k/train.jsonl", [{"question": "2+1?", "answer": "#### 3"}] * 8)
    (place.root / "openai/gsm8k/README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files: train.jsonl\n---\n"
    )
    recipes, common = "tinker_cookbook.recipes", (f"model_name={NAME}", "lora_rank=8")
    sizes = ("batch_size=8", "learning_rate=3e-3", "save_every=3")
    place.run("-m", f"{recipes}.sl_loop", *common, *sizes, "log_path=one/sl")
    losses = place.column("one/sl", "train_mean_nll")
    state = place.rows("one/sl/checkpoints.jsonl")[-1]["state_path"]
    place.lines("one/rl/checkpoints.jsonl", [{"name": "learned", "batch": 0, "state_path": state}])
    more = ("batch_size=2", "group_size=8", "learning_rate=2e-3", "max_tokens=20", "loss_fn=importance_sampling")
    place.run("-m", f"{recipes}.rl_loop", *common, *more, "log_path=one/rl")
    rewards = place.column("one/rl", "reward/total")
    print(f"nll {losses[0]:.3f} -> {losses[-1]:.3f}, rewards {rewards}")
    assert losses[-1] < losses[0]
    assert len(rewards) == 4
    last = place.rows("one/rl/checkpoints.jsonl")[-1]
    assert (last["name"], last["batch"]) == ("final", 4)
    assert last["sampler_path"].endswith("/sampler_weights/final")
