"""Training is the same training in every parallel layout: the loss, the gradient, every algorithm's numbers."""

from __future__ import annotations

from typing import Any

import pytest

from tests.trainer.megatron.layouts import CUT_FOUR, CUT_TWO, FULL, INTERLEAVED, SEQUENCE, SPREAD, alike, named
from tests.trainer.ranks import Ranks

PLAIN: list[dict[str, Any]] = [{"pipeline": 2}, {"tensor": 2}, {"data": 2}]
SIMPLE = [(model, layout) for model in ("llama", "qwen3-tied") for layout in PLAIN]
CASES = [*SIMPLE, *CUT_TWO, *CUT_FOUR, ("qwen3-tied", {"tensor": 2, "pipeline": 2})]
DENSE_CUTS = {"sequence": SEQUENCE, "context": {"context": 2}, "interleaved": INTERLEAVED, "full": FULL}


@pytest.mark.sample(6)
@pytest.mark.parametrize(("model", "parallel"), CASES, ids=named(CASES))
def test_training_is_the_same_in_every_layout(
    one_rank: Ranks, every_model: dict[str, str], model: str, parallel: dict[str, Any]
) -> None:
    alone = alike(one_rank, "losses", every_model[model], parallel, cut={"micro_batch": 2})
    assert alone[-1][0] != alone[0][0]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("model", "parallel"),
    [("qwen3", {"tensor": 2}), ("qwen3", {"pipeline": 2}), ("qwen3", {"data": 2}), ("mixtral", SPREAD)],
    ids=["tensor2", "pipeline2", "data2", "experts2"],
)
def test_grpo_with_a_reference_is_the_same_in_every_layout(
    one_rank: Ranks, every_model: dict[str, str], model: str, parallel: dict[str, Any]
) -> None:
    alone = alike(one_rank, "grpo", every_model[model], parallel, rel=1e-3)
    assert alone[-1]["kl"] > alone[0]["kl"] > 0  # it moves away from the reference
    assert 0 < alone[0]["clip_ratio"] < 1


@pytest.mark.sample(1)
@pytest.mark.parametrize("parallel", [{"pipeline": 2}, *DENSE_CUTS.values()], ids=["pipeline", *DENSE_CUTS])
def test_ppo_with_critic_and_reference_is_the_same_in_every_layout(
    one_rank: Ranks, models: dict[str, str], parallel: dict[str, Any]
) -> None:
    alone = alike(one_rank, "ppo", models["qwen2"], parallel, rel=1e-3)
    assert alone[1]["value_mean"] != 0.0


@pytest.mark.sample(1)
@pytest.mark.parametrize("parallel", DENSE_CUTS.values(), ids=DENSE_CUTS.keys())
def test_packed_rows_are_the_same_in_every_layout(
    one_rank: Ranks, models: dict[str, str], parallel: dict[str, Any]
) -> None:
    alike(one_rank, "packed", models["qwen2"], parallel, rows=True, cut={"rows": False})
