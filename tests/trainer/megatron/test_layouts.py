"""Training is the same training in every parallel layout: the loss, the gradient, every algorithm's numbers."""

from __future__ import annotations

from typing import Any

import pytest

from tests.trainer.megatron.test_conversion import CUT_FOUR, CUT_TWO, named
from tests.trainer.ranks import Ranks

SERIAL: dict[str, int] = {}
TENSOR, PIPELINE, DATA = {"tensor": 2}, {"pipeline": 2}, {"data": 2}
SEQUENCE, CONTEXT = {"tensor": 2, "sequence": True}, {"context": 2}
INTERLEAVED, FULL = {"pipeline": 2, "virtual_pipeline": 2}, {"data": 2, "shard": "full"}
DENSE_CUTS = {"sequence": SEQUENCE, "context": CONTEXT, "interleaved": INTERLEAVED, "full": FULL}


@pytest.mark.sample(2)
@pytest.mark.parametrize("model", ["llama", "qwen3-tied"])
@pytest.mark.parametrize("parallel", [TENSOR, PIPELINE, DATA], ids=["tensor2", "pipeline2", "data2"])
def test_training_is_the_same_in_every_layout(
    one_rank: Ranks, two_ranks: Ranks, small_models: dict[str, str], model: str, parallel: dict[str, int]
) -> None:
    alone = one_rank.known("losses", path=small_models[model], parallel=SERIAL)[0]
    ranks = two_ranks.call("losses", path=small_models[model], parallel=parallel, micro_batch=2)
    assert ranks[0] == ranks[1]
    assert ranks[0] == [pytest.approx(step, rel=2e-4) for step in alone]
    assert alone[-1][0] != alone[0][0]


@pytest.mark.sample(3)
@pytest.mark.parametrize(("model", "parallel"), CUT_TWO, ids=named(CUT_TWO))
def test_two_ranks_train_alike(
    one_rank: Ranks, two_ranks: Ranks, models: dict[str, str], model: str, parallel: dict[str, Any]
) -> None:
    alone = one_rank.known("losses", path=models[model], parallel=SERIAL)[0]
    ranks = two_ranks.call("losses", path=models[model], parallel=parallel, micro_batch=2)
    assert ranks[0] == ranks[1]
    assert ranks[0] == [pytest.approx(step, rel=2e-4) for step in alone]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("model", "parallel"), CUT_FOUR, ids=named(CUT_FOUR))
def test_four_ranks_train_alike(
    one_rank: Ranks, four_ranks: Ranks, models: dict[str, str], model: str, parallel: dict[str, Any]
) -> None:
    alone = one_rank.known("losses", path=models[model], parallel=SERIAL)[0]
    ranks = four_ranks.call("losses", path=models[model], parallel=parallel, micro_batch=2)
    assert all(rank == ranks[0] for rank in ranks)
    assert ranks[0] == [pytest.approx(step, rel=2e-4) for step in alone]


@pytest.mark.sample(1)
@pytest.mark.parametrize("parallel", [TENSOR, PIPELINE, DATA], ids=["tensor2", "pipeline2", "data2"])
def test_grpo_with_a_reference_is_the_same_in_every_layout(
    one_rank: Ranks, two_ranks: Ranks, small_models: dict[str, str], parallel: dict[str, int]
) -> None:
    alone = one_rank.known("grpo", path=small_models["qwen3"], parallel=SERIAL)[0]
    ranks = two_ranks.call("grpo", path=small_models["qwen3"], parallel=parallel)
    assert ranks[0] == [pytest.approx(step, rel=1e-3, abs=1e-6) for step in alone]
    assert alone[-1]["kl"] > 2 * alone[0]["kl"] > 0  # it moves away from the reference
    assert 0 < alone[0]["clip_ratio"] < 1


@pytest.mark.sample(1)
@pytest.mark.parametrize("parallel", [PIPELINE, *DENSE_CUTS.values()], ids=["pipeline", *DENSE_CUTS])
def test_ppo_with_critic_and_reference_is_the_same_in_every_layout(
    one_rank: Ranks, two_ranks: Ranks, models: dict[str, str], parallel: dict[str, Any]
) -> None:
    serial = one_rank.known("ppo", path=models["qwen2"], parallel=SERIAL)[0]
    ranks = two_ranks.call("ppo", path=models["qwen2"], parallel=parallel)
    assert ranks[0] == ranks[1]
    for mine, alone in zip(ranks[0], serial, strict=True):
        # A value that lies on the bound counts as clipped or not, by its last bit; three tokens may.
        assert mine.pop("value_clip_ratio") == pytest.approx(alone["value_clip_ratio"], abs=3 / alone["tokens"])
        assert mine == pytest.approx({k: v for k, v in alone.items() if k != "value_clip_ratio"}, rel=1e-3, abs=1e-6)
    assert serial[1]["value_mean"] != 0.0


@pytest.mark.sample(1)
@pytest.mark.parametrize("parallel", DENSE_CUTS.values(), ids=DENSE_CUTS.keys())
def test_packed_rows_are_the_same_in_every_layout(
    one_rank: Ranks, two_ranks: Ranks, models: dict[str, str], parallel: dict[str, Any]
) -> None:
    unpacked = one_rank.known("packed", path=models["qwen2"], parallel={}, rows=True)[0]
    ranks = two_ranks.call("packed", path=models["qwen2"], parallel=parallel, rows=False)
    assert ranks[0] == [pytest.approx(step, rel=2e-4) for step in unpacked]


@pytest.mark.broad
def test_grpo_of_a_mixture_is_the_same_with_spread_experts(
    one_rank: Ranks, two_ranks: Ranks, models: dict[str, str]
) -> None:
    alone = one_rank.known("grpo", path=models["mixtral"], parallel=SERIAL)[0]
    spread = two_ranks.call("grpo", path=models["mixtral"], parallel={"data": 2, "expert": 2})
    assert spread[0] == [pytest.approx(step, rel=1e-3, abs=1e-6) for step in alone]


@pytest.mark.broad
def test_four_ranks_cut_both_ways(four_ranks: Ranks, small_models: dict[str, str], one_rank: Ranks) -> None:
    path, both = small_models["qwen3-tied"], {"tensor": 2, "pipeline": 2}
    alone = one_rank.known("losses", path=path, parallel=SERIAL)[0]
    trained = four_ranks.call("losses", path=path, parallel=both, micro_batch=3)
    assert trained[0] == [pytest.approx(step, rel=2e-4) for step in alone]
