"""Every recipe of trainer/configs, run for two steps against one server: its own algorithm, data, rewards, schedule,
precision and packing, on a tiny model, with short answers."""

from __future__ import annotations

import json
import math
import string
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from loadtest.training.learning.recipes import ENVIRONMENT
from tests.live import LiveServer
from tests.trainer.faults.runs import CONFIGS, example
from tests.trainer.zygote import Zygote
from trainer.config import strict
from trainer.tiny_model import write_tiny_model

pytestmark = [pytest.mark.broad, pytest.mark.engine]

ENGINE = ("--dtype", "float32", "--max-model-len", "2048", "--enable-lora", "--max-lora-rank", "16")
STEPS = 2
ELSEWHERE = {"grpo_moe": "test_mixture.py", "api": "api/", "rewards": "rewards/test_server.py"}  # which run their like


@dataclass(frozen=True)
class Case:
    """The needs of a recipe besides what all of them are given: `files` by the key of the configuration, as records."""

    files: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    changes: tuple[str, ...] = ()


SUMS = [{"problem": f"What is {a}+{b}?", "answer": str(a + b)} for a in range(3) for b in range(4)]
CHATS = [{"messages": [{"role": "user", "content": f"Say {n}"}], "target": str(n), "answer": str(n)} for n in range(12)]
PAIRS = [{"prompt": f"{n}+1=", "target": str(n + 1)} for n in range(12)]
PROBLEMS = {"data.path": SUMS, "data.eval_path": SUMS}
CASES = {
    "sft": Case(),
    "sft_chat": Case({"data.path": CHATS, "data.eval_path": CHATS}),
    "sft_jsonl": Case({"data.path": PAIRS}, ("parallel={tensor: 2}",)),  # of eight processes two
    "dpo": Case(),
    "grpo": Case(),
    "grpo_async": Case(),
    "grpo_code": Case(),
    "grpo_lora": Case(),
    "grpo_math": Case(
        {**PROBLEMS, "eval.1.data.path": SUMS},
        ("algorithm.overlong_buffer=4", "algorithm.drop_zero_std=false"),  # a random model has no right answer
    ),
    "grpo_tools": Case(PROBLEMS),
    "ppo": Case(),
    "distill": Case(),
    "long2short": Case(PROBLEMS, ("algorithm.length_after=1",)),
}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A tiny model that can write whatever a keyboard prints."""
    root = tmp_path_factory.mktemp("recipes")
    characters = "".join(sorted(set(string.printable) - set(string.whitespace)))
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2}
    write_tiny_model(root / "model", characters=characters, max_position_embeddings=2048, **sizes | {"head_dim": 32})
    with pytest.MonkeyPatch.context() as patched:
        for name, value in ENVIRONMENT.items():
            patched.setenv(name, value)
        server = LiveServer(root / "model", root / "state", ENGINE, name="recipes")
        with server.running():
            yield server


def configured(name: str, live: LiveServer, root: Path) -> dict[str, Any]:
    """A recipe with a tiny model's sizes, and pointed at this test's server, files and directories."""
    config = example(f"{name}.yaml")
    model, case = live.processes.config.model, CASES[name]
    config |= {"steps": STEPS, "batch": 2, "metrics": str(root / "metrics.jsonl"), "save_to": str(root / "saved")}
    config["model"]["path"] = model
    config["rollout"] = config.get("rollout", {}) | {"max_tokens": 8}
    if "samples_per_prompt" in config["algorithm"]:
        config["algorithm"]["samples_per_prompt"] = 2
    if config.get("packing"):
        config["packing"] = {"max_tokens": 2048}
    if "gateway" in config:
        config["gateway"] |= {"url": live.url}
        config["publish"] |= {"model": live.name, "store": live.processes.store, "dtype": "float32", "every": 1}
        config["publish"]["lineage"] = name
    for entry in config.get("eval", []):
        entry |= {"every": STEPS, "prompts": 2}
    if "checkpoint" in config:
        config["checkpoint"] |= {"path": str(root / "checkpoints"), "every": STEPS}
    if "teacher" in config["algorithm"]:
        config["algorithm"]["teacher"] |= {"url": live.url, "model": live.name}
    for key, watched in config.get("watch", {}).items():
        config["watch"][key] = watched | {"dir": str(root)} if isinstance(watched, dict) else str(root / key)
    for key, records in case.files.items():
        path = root / f"{key}.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        _place(config, key, str(path))
    strict.override(config, list(case.changes))
    return config


def _place(config: dict[str, Any], key: str, path: str) -> None:
    *parents, last = key.split(".")
    section: Any = config
    for name in parents:
        section = section[int(name)] if name.isdigit() else section[name]
    section |= {last: path, "cache_dir": str(Path(path).parent / "cache"), "workers": 1}


def test_none_is_left_out() -> None:
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == CASES.keys() | ELSEWHERE.keys()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", CASES)
def test_a_recipe_trains_publishes_and_saves(zygote: Zygote, live: LiveServer, tmp_path: Path, name: str) -> None:
    config = configured(name, live, tmp_path)
    before = live.active()
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    status, _, errors = zygote.run(["--config", str(tmp_path / "run.yaml")], tmp_path)
    assert status == 0, errors
    events = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = [event for event in events if event["event"] == "step"]
    assert [step["step"] for step in steps] == [1, 2]
    assert all(math.isfinite(step["loss"]) and math.isfinite(step["grad_norm"]) for step in steps)
    assert all(step["tokens"] > 0 for step in steps)
    sets = {entry.get("name", "held_out") for entry in config.get("eval", [])}
    found = [(event["set"], event["step"]) for event in events if event["event"] == "eval"]
    assert set(found) == {(name, step) for name in sets for step in (0, STEPS)}
    if "publish" in config:
        assert live.active() == before + 1 + STEPS, "a version before the first step, and one after each"
        versions: list[dict[str, Any]] = live.admin.get("/admin/weights").json()["versions"]
        part = [p["name"] for v in versions if v["version"] == live.active() for p in v.get("parts", [])]
        assert (f"lora/{config['lora']['name']}" in part) if "lora" in config else True
    saved = tmp_path / "saved" / ("adapter_model.safetensors" if "lora" in config else "config.json")
    assert saved.exists()
    assert ("checkpoint" in config) == (tmp_path / "checkpoints").exists()
    if name == "distill":
        assert all(math.isfinite(step["teacher_kl"]) for step in steps)
