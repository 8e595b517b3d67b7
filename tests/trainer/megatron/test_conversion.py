"""The model is transformers' model, and an export is what was loaded, in every parallel layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.trainer.batches import random_batch
from tests.trainer.megatron.layouts import CUT_FOUR, CUT_TWO, INTERLEAVED, SPREAD, Layout, named
from tests.trainer.ranks import Ranks
from trainer.batch import TOKENS
from trainer.megatron.hf_config import load_shape
from trainer.megatron.hf_files import HfTensors

DENSE = ("llama", "llama-tied", "qwen2", "qwen2-tied", "qwen3", "qwen3-tied")
ALONE = ["qwen3_moe-raw", "llama", "mixtral", "llama-tied", "qwen3_moe", "llama-scaled", "qwen2-tied", "qwen2"]
CASES: list[tuple[str, dict[str, Any]]] = [
    *((model, {}) for model in [*ALONE, "qwen3-tied", "qwen3"]),
    *((model, layout) for model in DENSE for layout in ({"tensor": 2}, {"pipeline": 2})),
    *CUT_TWO,
    *CUT_FOUR,
]


@pytest.mark.sample(14)
@pytest.mark.parametrize(("model", "parallel"), CASES, ids=named(CASES))
def test_ranks_equal_transformers(one_rank: Ranks, path: str, parallel: Layout) -> None:
    results = one_rank.spread(parallel).call("parity", path=path, parallel=parallel)
    schema = load_shape(path).schema("float32")
    names, elements = sorted(name for name, _, _ in schema), load_shape(path).parameters
    assert max(r["logits"] for r in results if "logits" in r) < 1e-4
    assert max(r["logprobs"] for r in results if "logprobs" in r) < 1e-4
    assert all(r["exact"] and r["slices_exact"] for r in results)
    assert sorted(name for r in results for name in r["exported"]) == names  # every tensor, on one rank only
    assert sorted(set(results[0]["covered"])) == names
    assert results[0]["elements"] == elements  # slices cover every number once


def test_no_rank_exports_a_whole_model(two_ranks: Ranks, models: dict[str, str]) -> None:
    for model, parallel in (("mixtral", SPREAD), ("qwen2", INTERLEAVED)):
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
