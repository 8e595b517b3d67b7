"""The model is transformers' model, and training is the same training, in every parallel layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.trainer.ranks import Ranks
from trainer.megatron.hf_config import load_shape

MODELS = ("llama", "llama-tied", "qwen2", "qwen2-tied", "qwen3", "qwen3-tied")
SERIAL: dict[str, int] = {}
TENSOR, PIPELINE, DATA = {"tensor": 2}, {"pipeline": 2}, {"data": 2}


def check_parity(results: list[dict[str, Any]], path: str) -> None:
    schema = load_shape(path).schema("float32")
    names, elements = sorted(name for name, _, _ in schema), load_shape(path).parameters
    assert max(r["logits"] for r in results if "logits" in r) < 1e-4
    assert max(r["logprobs"] for r in results if "logprobs" in r) < 1e-4
    assert max(r["padding_probability"] for r in results if "logits" in r) == 0.0
    assert all(r["exact"] and r["slices_exact"] for r in results)
    assert sorted(name for r in results for name in r["exported"]) == names  # every tensor, on one rank only
    assert sorted(set(results[0]["covered"])) == names
    assert results[0]["elements"] == elements  # slices cover every number once


@pytest.mark.parametrize("model", [*MODELS, "llama-scaled"])
def test_one_rank_equals_transformers(one_rank: Ranks, small_models: dict[str, str], model: str) -> None:
    check_parity(one_rank.call("parity", path=small_models[model], parallel=SERIAL), small_models[model])


@pytest.mark.parametrize("parallel", [TENSOR, PIPELINE], ids=["tensor2", "pipeline2"])
@pytest.mark.parametrize("model", MODELS)
def test_two_ranks_equal_transformers(
    two_ranks: Ranks, small_models: dict[str, str], model: str, parallel: dict[str, int]
) -> None:
    check_parity(two_ranks.call("parity", path=small_models[model], parallel=parallel), small_models[model])


@pytest.mark.parametrize("model", ["llama", "qwen3-tied"])
@pytest.mark.parametrize("parallel", [TENSOR, PIPELINE, DATA], ids=["tensor2", "pipeline2", "data2"])
def test_training_is_the_same_in_every_layout(
    one_rank: Ranks, two_ranks: Ranks, small_models: dict[str, str], model: str, parallel: dict[str, int]
) -> None:
    serial = one_rank.call("losses", path=small_models[model], parallel=SERIAL)[0]
    ranks = two_ranks.call("losses", path=small_models[model], parallel=parallel, micro_batch=2)
    assert ranks[0] == ranks[1]
    assert ranks[0] == [pytest.approx(step, rel=2e-4) for step in serial]
    assert serial[-1][0] != serial[0][0]


@pytest.mark.parametrize("parallel", [TENSOR, PIPELINE, DATA], ids=["tensor2", "pipeline2", "data2"])
def test_grpo_with_a_reference_is_the_same_in_every_layout(
    one_rank: Ranks, two_ranks: Ranks, small_models: dict[str, str], parallel: dict[str, int]
) -> None:
    serial = one_rank.call("grpo", path=small_models["qwen3"], parallel=SERIAL)[0]
    ranks = two_ranks.call("grpo", path=small_models["qwen3"], parallel=parallel)
    assert ranks[0] == [pytest.approx(step, rel=1e-3, abs=1e-6) for step in serial]
    assert serial[-1]["kl"] > 2 * serial[0]["kl"] > 0  # it moves away from the reference
    assert 0 < serial[0]["clip_ratio"] < 1


def test_four_ranks_cut_both_ways(small_models: dict[str, str], one_rank: Ranks) -> None:
    path, both = small_models["qwen3-tied"], {"tensor": 2, "pipeline": 2}
    serial = one_rank.call("losses", path=path, parallel=SERIAL)[0]
    with Ranks(4) as ranks:
        check_parity(ranks.call("parity", path=path, parallel=both), path)
        trained = ranks.call("losses", path=path, parallel=both, micro_batch=3)
    assert trained[0] == [pytest.approx(step, rel=2e-4) for step in serial]


def test_bfloat16_trains_close_to_float32(one_rank: Ranks, small_models: dict[str, str]) -> None:
    path = small_models["qwen2"]
    exact = one_rank.call("losses", path=path, parallel=SERIAL)[0]
    half = one_rank.call("losses", path=path, parallel=SERIAL, model={"path": path, "dtype": "bfloat16"})[0]
    assert [loss for loss, _ in half] == [pytest.approx(loss, rel=0.05) for loss, _ in exact]
    assert half != exact


@pytest.mark.parametrize("parallel", [TENSOR, PIPELINE, DATA], ids=["tensor2", "pipeline2", "data2"])
def test_resume_is_exact(
    two_ranks: Ranks, small_models: dict[str, str], tmp_path: Path, parallel: dict[str, int]
) -> None:
    common = {"path": small_models["qwen2"], "parallel": parallel, "save_at": 2, "directory": str(tmp_path)}
    config = {"optimizer": {"lr": 1e-2, "warmup_steps": 2, "decay": "cosine"}}
    through = two_ranks.call("losses", **common, **config)
    resumed = two_ranks.call("losses", **common, **config, resume=True)
    assert resumed == [steps[2:] for steps in through]


def test_a_checkpoint_can_be_read_in_another_layout(
    one_rank: Ranks, two_ranks: Ranks, small_models: dict[str, str], tmp_path: Path
) -> None:
    common = {"path": small_models["llama-tied"], "save_at": 2, "directory": str(tmp_path)}
    through = two_ranks.call("losses", **common, parallel=TENSOR)[0]
    pipelined = two_ranks.call("losses", **common, parallel=PIPELINE, resume=True)[0]
    alone = one_rank.call("losses", **common, parallel=SERIAL, resume=True)[0]
    assert pipelined == [pytest.approx(step, rel=2e-4) for step in through[2:]]
    assert alone == [pytest.approx(step, rel=2e-4) for step in through[2:]]
