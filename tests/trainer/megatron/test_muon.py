"""Muon: its numbers, the same in every layout; and what it keeps."""

from __future__ import annotations

from typing import Any

import pytest

from tests.trainer.megatron.layouts import INTERLEAVED, SEQUENCE, SPREAD, Layout, alike, named
from tests.trainer.ranks import Ranks
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
def test_every_weight_is_the_references(one_rank: Ranks, path: str) -> None:
    """Matrices of layers Muon's, by singular values in float64; all else AdamW's. torch's own Muon rounds to bfloat16,
    which shows where singular values are small."""
    found = one_rank.call("muon_reference", path=path)[0]
    layers, shape = 4, load_shape(path)
    experts = 3 * shape.experts + 1 if shape.experts else 3
    assert found["matrices"] == layers * (4 + experts)
    assert found["others"] > 0
    assert found["muon"] < 1e-5
    assert found["adamw"] < 1e-5
    assert found["torch"][len(found["torch"]) // 2] < 0.06


@pytest.mark.sample(3)
@pytest.mark.parametrize(("model", "parallel"), LAYOUTS, ids=named(LAYOUTS))
def test_training_is_the_same_in_every_layout(one_rank: Ranks, path: str, parallel: Layout) -> None:
    alone = alike(one_rank, "losses", path, parallel, cut={"micro_batch": 2}, **MUON)
    assert alone[-1][0] != alone[0][0]


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_close(one_rank: Ranks, two_ranks: Ranks, deep: str, dtype: str) -> None:
    alone = one_rank.known("losses", path=deep, parallel={}, **MUON)[0]
    config = {"model": {"path": deep, "dtype": dtype}, "parallel": {"tensor": 2}, **MUON}
    trained = two_ranks.call("losses", path=deep, **config)[0]
    assert [loss for loss, _ in trained] == pytest.approx([loss for loss, _ in alone], rel=2e-2)


def test_a_matrix_has_one_state_and_ranks_share_it(one_rank: Ranks, two_ranks: Ranks, deep: str) -> None:
    """4 bytes a number of a matrix, 8 of all else, and a little for numbers that stand for nothing. The memory manager
    expects that before the first step."""
    (alone,) = one_rank.call("muon_states", path=deep, parallel={})
    shape = load_shape(deep)
    others = shape.padded_vocab(1) * shape.hidden * 2
    assert alone["bytes"] < 4 * (alone["numbers"] - others) + 8 * others + 10_000
    shares = two_ranks.call("muon_states", path=deep, parallel={"data": 2})
    for share in (alone, *shares):
        assert share["held"] == pytest.approx(share["expected"], rel=0.01)
    for share in shares:
        assert share["bytes"] < 0.7 * alone["bytes"]
