"""Muon: its numbers, the same in every layout; what it keeps, and that it goes on from a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.trainer.megatron.layouts import INTERLEAVED, SEQUENCE, SPREAD, alike, goes_on, named
from tests.trainer.ranks import Ranks
from trainer.config import TrainerConfig, strict
from trainer.errors import ConfigError
from trainer.megatron.hf_config import load_shape

MUON: dict[str, Any] = {"optimizer": {"name": "muon", "lr": 1e-2, "weight_decay": 0.1}}
LAYOUTS: list[tuple[str, dict[str, Any]]] = [
    ("qwen2", {"tensor": 2}),
    ("qwen2", {"data": 2}),
    ("mixtral", SPREAD),
    ("llama-tied", {"pipeline": 2}),
    ("qwen2", {"context": 2}),
    ("llama-tied", INTERLEAVED),
    ("qwen3_moe", SEQUENCE | {"expert": 2, "expert_tensor": 1}),
    ("mixtral", SEQUENCE),
    ("qwen2", {"tensor": 2, "data": 2}),
]


@pytest.mark.parametrize("model", ["qwen2", "qwen3_moe"])
def test_every_weight_is_the_references(one_rank: Ranks, models: dict[str, str], model: str) -> None:
    """Matrices of layers Muon's, by singular values in float64; all else AdamW's. torch's own Muon rounds to bfloat16,
    which shows where singular values are small."""
    found = one_rank.call("muon_reference", path=models[model])[0]
    layers, shape = 4, load_shape(models[model])
    experts = 3 * shape.experts + 1 if shape.experts else 3
    assert found["matrices"] == layers * (4 + experts)
    assert found["others"] > 0
    assert found["muon"] < 1e-5
    assert found["adamw"] < 1e-5
    assert found["torch"][len(found["torch"]) // 2] < 0.06


@pytest.mark.sample(3)
@pytest.mark.parametrize(("model", "parallel"), LAYOUTS, ids=named(LAYOUTS))
def test_training_is_the_same_in_every_layout(
    one_rank: Ranks, models: dict[str, str], model: str, parallel: dict[str, Any]
) -> None:
    alone = alike(one_rank, "losses", models[model], parallel, cut={"micro_batch": 2}, **MUON)
    assert alone[-1][0] != alone[0][0]


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_close(one_rank: Ranks, two_ranks: Ranks, models: dict[str, str], dtype: str) -> None:
    path = models["qwen2"]
    alone = one_rank.known("losses", path=path, parallel={}, **MUON)[0]
    config = {"model": {"path": path, "dtype": dtype}, "parallel": {"tensor": 2}, **MUON}
    trained = two_ranks.call("losses", path=path, **config)[0]
    assert [loss for loss, _ in trained] == pytest.approx([loss for loss, _ in alone], rel=2e-2)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("model", "saved", "others"),
    [
        ("qwen2", {"data": 2}, [{}, {"tensor": 2}]),
        ("mixtral", SPREAD, [{}, {"pipeline": 2}]),
        ("llama-tied", {"pipeline": 2}, [{"context": 2}]),
    ],
    ids=["data", "experts", "stages"],
)
def test_a_run_goes_on_exactly_and_in_other_layouts(
    one_rank: Ranks, models: dict[str, str], tmp_path: Path, model: str, saved: Any, others: list[Any]
) -> None:
    goes_on(one_rank, models[model], tmp_path, saved, *others, **MUON)


def test_a_matrix_has_one_state_and_ranks_share_it(one_rank: Ranks, two_ranks: Ranks, models: dict[str, str]) -> None:
    """4 bytes a number of a matrix, 8 of all else, and a little for numbers that stand for nothing. The memory manager
    expects that before the first step."""
    (alone,) = one_rank.call("muon_states", path=models["qwen2"], parallel={})
    shape = load_shape(models["qwen2"])
    others = shape.padded_vocab(1) * shape.hidden * 2
    assert alone["bytes"] < 4 * (alone["numbers"] - others) + 8 * others + 10_000
    shares = two_ranks.call("muon_states", path=models["qwen2"], parallel={"data": 2})
    for share in (alone, *shares):
        assert share["held"] == pytest.approx(share["expected"], rel=0.01)
    for share in shares:
        assert share["bytes"] < 0.7 * alone["bytes"]


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"optimizer": {"name": "muon", "offload": True}}, "optimizer.offload"),
        ({"optimizer": {"name": "muon", "momentum": 2.0}}, "optimizer.momentum"),
        ({"optimizer": {"name": "muon", "ns_steps": 0}}, "optimizer.ns_steps"),
        ({"optimizer": {"momentum": 0.9}}, "optimizer.momentum"),
        ({"optimizer": {"name": "lion"}}, "optimizer.name"),
        ({**MUON, "parallel": {"data": 2, "shard": "full"}}, "optimizer.name"),
        ({**MUON, "lora": {}}, "optimizer.name"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], key: str) -> None:
    plain = {"model": {"path": "m"}, "data": {"kind": "arithmetic"}, "algorithm": {"name": "sft"}, "steps": 1}
    with pytest.raises(ConfigError) as error:
        strict.build(TrainerConfig, plain | changes)
    assert error.value.key == key
