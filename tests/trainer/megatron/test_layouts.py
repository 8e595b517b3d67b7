"""Training is the same training in every parallel layout: the loss, the gradient, every algorithm's numbers."""

from __future__ import annotations

import pytest

from tests.trainer.megatron.layouts import CUT_FOUR, CUT_TWO, SPREAD, Layout, alike, named
from tests.trainer.ranks import Ranks

PLAIN: list[Layout] = [{"pipeline": 2}, {"tensor": 2}, {"data": 2}]
SIMPLE = [(model, layout) for model in ("llama", "qwen3-tied") for layout in PLAIN]
CASES = [*SIMPLE, *CUT_TWO, *CUT_FOUR, ("qwen3-tied", {"tensor": 2, "pipeline": 2})]


@pytest.mark.sample(6)
@pytest.mark.parametrize(("model", "parallel"), CASES, ids=named(CASES))
def test_training_is_the_same_in_every_layout(one_rank: Ranks, path: str, parallel: Layout) -> None:
    alone = alike(one_rank, "losses", path, parallel, cut={"micro_batch": 2})
    assert alone[-1][0] != alone[0][0]


def test_rewards_train_a_mixture_alike(one_rank: Ranks, models: dict[str, str]) -> None:
    """GRPO with a reference, over ranks with half of the experts each."""
    alone = alike(one_rank, "grpo", models["mixtral"], SPREAD, rel=1e-3)
    assert alone[-1]["kl"] > alone[0]["kl"] > 0  # it moves away from the reference
    assert 0 < alone[0]["clip_ratio"] < 1
