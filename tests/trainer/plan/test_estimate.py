"""The estimator against what the engine really holds, measured on real ranks in every kind of layout."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.trainer.ranks import Ranks
from trainer.config import LoraConfig, ParallelConfig
from trainer.megatron.hf_config import load_shape
from trainer.plan.estimate import Workload, adapter_weights, bytes_to_save, estimate, rank_weights
from trainer.tiny_model import write_tiny_model

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 16,
}
ROWS, LENGTH = 2, 64
MUON: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {}, "float32"),
    ("qwen2", {}, "bfloat16"),
    ("qwen3_moe", {}, "bfloat16"),
    ("llama-tied", {"pipeline": 2}, "float32"),
    ("qwen3", {"tensor": 2}, "bfloat16"),
    ("qwen3_moe", {"data": 2, "expert": 2}, "float32"),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    for family in ("llama", "qwen2", "qwen3", "qwen3_moe"):
        write_tiny_model(root / family, family, **SIZES)
    write_tiny_model(root / "llama-tied", "llama", tie_word_embeddings=True, **SIZES)
    return {path.name: str(path) for path in root.iterdir()}


BROAD = pytest.mark.broad


@pytest.mark.parametrize(
    ("family", "parallel", "model", "kept"),
    [
        ("llama", {}, {}, 0.05),
        ("llama-tied", {}, {}, 0.05),
        ("qwen2", {}, {}, 0.05),
        ("qwen3", {}, {}, 0.05),
        ("qwen3_moe", {}, {}, 0.05),
        ("llama", {}, {"dtype": "bfloat16"}, 0.05),
        ("llama", {}, {"recompute": "full"}, 0.15),
        ("llama", {"tensor": 2}, {}, 0.08),
        ("llama", {"tensor": 2, "sequence": True}, {}, 0.08),
        ("llama-tied", {"pipeline": 2}, {}, 0.08),
        ("llama", {"context": 2}, {}, 0.08),
        pytest.param("llama", {"pipeline": 2}, {}, 0.08, marks=BROAD),
        pytest.param("llama", {"data": 2}, {}, 0.08, marks=BROAD),
        pytest.param("qwen3_moe", {"data": 2, "expert": 2}, {}, 0.08, marks=BROAD),
    ],
    ids=str,
)
def test_every_layout_holds_what_was_estimated(
    one_rank: Ranks, models: dict[str, str], family: str, parallel: dict[str, Any], model: dict[str, Any], kept: float
) -> None:
    """Counts must be equal; what padding and step counters add may be a hundredth; `kept` bounds the error of
    activations."""
    shape, layout = load_shape(models[family]), ParallelConfig(**parallel)
    ranks = one_rank.sharing(layout.world_size)
    found = ranks.call("measured", path=models[family], parallel=parallel, rows=ROWS, length=LENGTH, model=model)
    work = Workload(LENGTH, ROWS, sequences=ROWS * layout.data, **{"dtype": "float32", "recompute": "none"} | model)
    for rank in found:
        assert rank["parameters"] == rank_weights(shape, layout, rank["stage"]).total
    fullest = max(found, key=lambda rank: rank["weights"] + rank["kept"])
    told = estimate(shape, layout, work)
    assert told.weights == fullest["weights"]
    assert told.gradients == pytest.approx(fullest["gradients"], rel=0.01)
    assert told.optimizer == pytest.approx(fullest["optimizer"], rel=0.01)
    assert told.activations == pytest.approx(fullest["kept"], rel=kept)


@pytest.mark.sample(2)
@pytest.mark.parametrize(("family", "parallel", "dtype"), MUON, ids=str)
def test_muon_holds_what_was_estimated(
    one_rank: Ranks, models: dict[str, str], family: str, parallel: dict[str, Any], dtype: str
) -> None:
    """One moment for the layers' matrices, two for everything else."""
    shape, layout = load_shape(models[family]), ParallelConfig(**parallel)
    arguments: dict[str, Any] = {"rows": ROWS, "length": LENGTH, "optimizer": {"name": "muon"}}
    ranks = one_rank.sharing(layout.world_size)
    found = ranks.call("measured", path=models[family], parallel=parallel, model={"dtype": dtype}, **arguments)
    fullest = max(found, key=lambda rank: rank["weights"] + rank["kept"])
    work = Workload(LENGTH, ROWS, sequences=ROWS * layout.data, dtype=dtype, optimizer="muon")
    told = estimate(shape, layout, work)
    assert told.optimizer == pytest.approx(fullest["optimizer"], rel=0.01)
    assert told.optimizer < 0.8 * estimate(shape, layout, dataclasses.replace(work, optimizer="adamw")).optimizer


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("family", "parallel"),
    [("llama", {}), ("qwen3_moe", {}), ("llama", {"tensor": 2}), ("qwen3_moe", {"data": 2, "expert": 2})],
    ids=str,
)
def test_adapters_hold_what_was_estimated(
    one_rank: Ranks, models: dict[str, str], family: str, parallel: dict[str, Any]
) -> None:
    shape, layout, lora = load_shape(models[family]), ParallelConfig(**parallel), LoraConfig(rank=8)
    ranks = one_rank.sharing(layout.world_size)
    arguments: dict[str, Any] = {"rows": ROWS, "length": LENGTH, "lora": {"rank": 8}}
    found = ranks.call("measured", path=models[family], parallel=parallel, **arguments)[0]
    told = estimate(shape, layout, Workload(LENGTH, ROWS, sequences=ROWS * layout.data, dtype="float32", lora=lora))
    adapters = adapter_weights(shape, layout, lora)
    assert found["parameters"] == rank_weights(shape, layout, 0).total + adapters.total
    assert told.weights == found["weights"]
    assert told.gradients == 4 * adapters.total == pytest.approx(found["gradients"], rel=0.05)  # which is padded
    assert told.optimizer == pytest.approx(found["optimizer"], rel=0.05)
    full = estimate(shape, layout, Workload(LENGTH, ROWS, sequences=ROWS * layout.data, dtype="float32"))
    assert told.total < full.total


def test_a_reference_is_whole_on_each_rank(two_ranks: Ranks, models: dict[str, str]) -> None:
    """Nothing cuts what is not trained."""
    layout: dict[str, Any] = {"data": 2, "shard": "full"}
    found = two_ranks.call("reference_bytes", path=models["llama"], parallel=layout)
    shape, parallel = load_shape(models["llama"]), ParallelConfig(**layout)
    work = Workload(LENGTH, ROWS, dtype="float32")
    alone, beside = (estimate(shape, parallel, dataclasses.replace(work, references=n)).weights for n in (0, 1))
    assert found == [beside - alone] * 2


SAVED: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"data": 2}),
    ("qwen3_moe", {}),
    ("qwen3_moe", {"data": 2, "expert": 2}),
    ("llama", {"data": 2, "shard": "full"}),
]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("family", "parallel"), SAVED, ids=str)
@pytest.mark.parametrize("copied", [True, False], ids=["copied", "at-once"])
def test_a_checkpoint_takes_no_more_than_was_estimated(
    one_rank: Ranks, models: dict[str, str], family: str, parallel: dict[str, Any], copied: bool
) -> None:
    """Of replicas the first gathers the optimizer states, and the others gather nothing."""
    shape, layout = load_shape(models[family]), ParallelConfig(**parallel)
    arguments: dict[str, Any] = {"parallel": parallel, "copied": copied, "dtype": "bfloat16"}
    first, *others = one_rank.sharing(layout.world_size).call("saving", path=models[family], **arguments)
    told = bytes_to_save(shape, layout, Workload(LENGTH), copied=copied)
    assert 0.85 * told <= first < 1.02 * told + 1e5
    if parallel == {"data": 2}:
        assert others[0] < first / 2
