"""long2short: merged weights, the shortest right answers, and preferences for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.trainer.faults.runs import arguments, fine_tuning
from tests.trainer.rollouts.generate_server import GenerateServer
from tests.trainer.rollouts.trajectories import answer
from trainer.config import JsonlData
from trainer.data import build_dataset
from trainer.data.tokenizer import Tokenizer
from trainer.long2short import longer_ones, main, shortest_right
from trainer.rewards import Score
from trainer.trajectory import TrajectoryGroup

RIGHT, WRONG = Score(1.0, {"a": 1.0}), Score(0.0, {"a": 0.0})


def test_the_shortest_right_answer_and_what_it_is_preferred_to() -> None:
    lengths = [6, 4, 5, 7, 3, 5, 2]
    scores = (RIGHT, RIGHT, RIGHT, RIGHT, WRONG, WRONG, RIGHT)
    answers = tuple(answer((1,) * n, (-1.0,) * n, "length" if n == 2 else "stop") for n in lengths)
    group = TrajectoryGroup((1,), answers, scores)
    chosen = shortest_right(group)
    assert chosen is not None
    assert chosen.policy_tokens == 4, "one that was cut off has not ended by itself"
    assert [t.policy_tokens for t in longer_ones(group, chosen)] == [7, 5], "right ones must be half as long again"
    assert shortest_right(TrajectoryGroup((1,), answers[4:6], scores[4:6])) is None


def test_weights_are_averaged(tiny_model: str, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for file in Path(tiny_model).iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    long = load_file(Path(tiny_model) / "model.safetensors")
    short = {name: torch.randn(tensor.shape).to(tensor.dtype) for name, tensor in long.items()}
    save_file(short, other / "model.safetensors", metadata={"format": "pt"})
    assert main(["merge", tiny_model, str(other), "--into", str(tmp_path / "merged"), "--share", "0.25"]) == 0
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert merged.keys() == long.keys()
    for name, tensor in merged.items():
        torch.testing.assert_close(tensor, 0.25 * long[name] + 0.75 * short[name])
    assert Tokenizer(tmp_path / "merged").size == Tokenizer(tiny_model).size


def test_models_of_other_tensors_are_refused(
    tiny_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = load_file(Path(tiny_model) / "model.safetensors")
    name = min(tensors)
    for changed in ({k: v for k, v in tensors.items() if k != name}, {**tensors, "another": torch.zeros(1)}):
        save_file(changed, tmp_path / "model.safetensors")
        assert main(["merge", tiny_model, str(tmp_path), "--into", str(tmp_path / "merged")]) == 2
    said = capsys.readouterr().err
    assert name in said
    assert "another" in said


def test_data_for_fine_tuning_and_preferences(
    server: GenerateServer, tiny_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A reward that any answer with a `1` in it has; what is written, the trainer reads."""
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{i}+{i}=", "answer": "1"}) + "\n" for i in range(8)))
    config: dict[str, Any] = {
        "data": {"kind": "jsonl", "path": str(data), "cache_dir": str(tmp_path / "cache"), "workers": 1},
        "gateway": {"url": server.url},
        "rollout": {"max_tokens": 8},
        "rewards": [{"kind": "regex", "pattern": "1", "workers": 1}],
    }
    common = [*arguments(fine_tuning(tiny_model, **config), tmp_path), "--records", "8", "--samples", "16"]
    tokenizer = Tokenizer(tiny_model)

    assert main(["sample", *common, "--into", str(tmp_path / "sft.jsonl")]) == 0
    lines = [json.loads(line) for line in (tmp_path / "sft.jsonl").read_text().splitlines()]
    assert lines
    assert all("1" in line["target"] for line in lines)
    read = build_dataset(JsonlData(path=str(tmp_path / "sft.jsonl"), cache_dir=str(tmp_path), workers=1), tokenizer, 0)
    assert len(read) == len(lines)
    assert read[0].target_ids

    assert main(["pairs", *common, "--into", str(tmp_path / "dpo.jsonl")]) == 0
    pairs = [json.loads(line) for line in (tmp_path / "dpo.jsonl").read_text().splitlines()]
    assert pairs
    assert all("1" in pair["chosen"] and len(pair["rejected"]) >= len(pair["chosen"]) for pair in pairs)
    read = build_dataset(JsonlData(path=str(tmp_path / "dpo.jsonl"), cache_dir=str(tmp_path), workers=1), tokenizer, 0)
    assert read[0].chosen_ids != read[0].rejected_ids
    assert f"{len(pairs)} pairs of 8 prompts" in capsys.readouterr().out


def test_without_a_gateway_it_says_so(tiny_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sample", *arguments(fine_tuning(tiny_model), tmp_path), "--into", str(tmp_path / "out")]) == 2
    assert "gateway" in capsys.readouterr().err
