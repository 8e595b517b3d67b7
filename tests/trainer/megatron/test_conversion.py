"""The model is transformers' model, and an export is what was loaded, in every parallel layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.trainer.batches import random_batch
from tests.trainer.ranks import Ranks
from trainer.batch import TOKENS
from trainer.megatron.hf_config import load_shape
from trainer.megatron.hf_files import HfTensors

DENSE = ("llama", "llama-tied", "qwen2", "qwen2-tied", "qwen3", "qwen3-tied")
MIXTURES = ("mixtral", "qwen3_moe", "qwen3_moe-raw")
SPREAD = {"data": 2, "expert": 2}
CUT_TWO = [
    ("qwen2", {"context": 2}),
    ("llama-tied", {"tensor": 2, "sequence": True}),
    ("llama-tied", {"pipeline": 2, "virtual_pipeline": 2}),
    ("llama-tied", {"data": 2, "shard": "full"}),
    ("qwen3_moe", SPREAD),
    ("mixtral", {"tensor": 2, "sequence": True}),
    ("mixtral", {"tensor": 2, "sequence": True, "expert": 2, "expert_tensor": 1}),
    ("qwen3_moe", {"context": 2, "expert": 2}),
]
CUT_FOUR = [
    ("mixtral", {"pipeline": 2, "virtual_pipeline": 2, "data": 2, "expert": 2}),
    ("qwen3_moe", {"tensor": 2, "sequence": True, "context": 2, "expert": 4, "expert_tensor": 1}),
    ("llama-tied", {"tensor": 2, "sequence": True, "pipeline": 2, "virtual_pipeline": 2}),
    ("qwen2", {"data": 2, "context": 2, "shard": "full"}),
]


def named(cases: list[tuple[str, dict[str, Any]]]) -> list[str]:
    return [f"{model}-" + "-".join(f"{k}{v}" for k, v in layout.items()) for model, layout in cases]


def check_parity(results: list[dict[str, Any]], path: str) -> None:
    schema = load_shape(path).schema("float32")
    names, elements = sorted(name for name, _, _ in schema), load_shape(path).parameters
    assert max(r["logits"] for r in results if "logits" in r) < 1e-4
    assert max(r["logprobs"] for r in results if "logprobs" in r) < 1e-4
    assert all(r["exact"] and r["slices_exact"] for r in results)
    assert sorted(name for r in results for name in r["exported"]) == names  # every tensor, on one rank only
    assert sorted(set(results[0]["covered"])) == names
    assert results[0]["elements"] == elements  # slices cover every number once


@pytest.mark.sample(3)
@pytest.mark.parametrize("model", [*DENSE, "llama-scaled"])
def test_one_rank_equals_transformers(one_rank: Ranks, small_models: dict[str, str], model: str) -> None:
    check_parity(one_rank.call("parity", path=small_models[model], parallel={}), small_models[model])


@pytest.mark.parametrize("model", MIXTURES)
def test_a_mixture_on_one_rank_equals_transformers(one_rank: Ranks, models: dict[str, str], model: str) -> None:
    check_parity(one_rank.call("parity", path=models[model], parallel={}), models[model])


@pytest.mark.sample(3)
@pytest.mark.parametrize("parallel", [{"tensor": 2}, {"pipeline": 2}], ids=["tensor2", "pipeline2"])
@pytest.mark.parametrize("model", DENSE)
def test_two_ranks_equal_transformers(
    two_ranks: Ranks, small_models: dict[str, str], model: str, parallel: dict[str, int]
) -> None:
    check_parity(two_ranks.call("parity", path=small_models[model], parallel=parallel), small_models[model])


@pytest.mark.sample(3)
@pytest.mark.parametrize(("model", "parallel"), CUT_TWO, ids=named(CUT_TWO))
def test_every_way_of_cutting_equals_transformers(
    two_ranks: Ranks, models: dict[str, str], model: str, parallel: dict[str, Any]
) -> None:
    check_parity(two_ranks.call("parity", path=models[model], parallel=parallel), models[model])


@pytest.mark.sample(1)
@pytest.mark.parametrize(("model", "parallel"), CUT_FOUR, ids=named(CUT_FOUR))
def test_cuts_combine(four_ranks: Ranks, models: dict[str, str], model: str, parallel: dict[str, Any]) -> None:
    check_parity(four_ranks.call("parity", path=models[model], parallel=parallel), models[model])


def test_no_rank_exports_a_whole_model(two_ranks: Ranks, models: dict[str, str]) -> None:
    for model, parallel in (("mixtral", SPREAD), ("qwen2", {"pipeline": 2, "virtual_pipeline": 2})):
        path, whole = models[model], load_shape(models[model]).parameters
        held = two_ranks.call("footprint", path=path, parallel=parallel)
        assert sum(rank["exported"] for rank in held) == whole
        assert max(rank["exported"] for rank in held) < 0.65 * whole


def test_a_saved_mixture_is_the_loaded_one(two_ranks: Ranks, models: dict[str, str], tmp_path: Path) -> None:
    """Each rank writes its experts into files of its own, and transformers reads the whole."""
    from transformers import AutoModelForCausalLM

    files = two_ranks.call("saved", path=models["qwen3_moe"], parallel=SPREAD, directory=str(tmp_path))
    assert all(len(written) == 1 for written in files)
    assert files[0] != files[1]
    original = HfTensors(models["qwen3_moe"])
    written = HfTensors(tmp_path)
    assert written.shapes == original.shapes
    assert all(torch.equal(written.get(name), original.get(name)) for name in original.shapes)
    expected = load_file(Path(models["qwen3_moe"]) / "expected.st")["logits"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(random_batch(17)[TOKENS][:, :-1]).logits
    assert torch.allclose(logits, expected, atol=1e-5)
