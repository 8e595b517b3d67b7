"""Training is the same training in every parallel layout: the loss, the gradient, every algorithm's numbers."""

from __future__ import annotations

import pytest

from tests.trainer.megatron.layouts import CUT_FOUR, CUT_TWO, FULL, INTERLEAVED, SEQUENCE, SPREAD, Layout, alike, named
from tests.trainer.ranks import Ranks

PLAIN: list[Layout] = [{"pipeline": 2}, {"tensor": 2}, {"data": 2}]
SIMPLE = [(model, layout) for model in ("llama", "qwen3-tied") for layout in PLAIN]
CASES = [*SIMPLE, *CUT_TWO, *CUT_FOUR, ("qwen3-tied", {"tensor": 2, "pipeline": 2})]
DENSE_CUTS: list[Layout] = [SEQUENCE, {"context": 2}, INTERLEAVED, FULL]


@pytest.mark.sample(6)
@pytest.mark.parametrize(("model", "parallel"), CASES, ids=named(CASES))
def test_training_is_the_same_in_every_layout(one_rank: Ranks, path: str, parallel: Layout) -> None:
    alone = alike(one_rank, "losses", path, parallel, cut={"micro_batch": 2})
    assert alone[-1][0] != alone[0][0]


NUMBERS: list[tuple[str, str, Layout]] = [
    *(("grpo", "qwen3", layout) for layout in PLAIN),
    ("grpo", "mixtral", SPREAD),
    *(("packed", "qwen2", layout) for layout in DENSE_CUTS),
    *(("ppo", "qwen2", layout) for layout in ({"pipeline": 2}, *DENSE_CUTS)),
]


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("case", "model", "parallel"), NUMBERS, ids=named([(case, layout) for case, _, layout in NUMBERS])
)
def test_algorithms_and_packed_rows_are_the_same_in_every_layout(
    one_rank: Ranks, path: str, case: str, parallel: Layout
) -> None:
    """GRPO with a reference, PPO with critic and reference, and sequences end to end."""
    if case == "packed":
        alike(one_rank, case, path, parallel, rows=True, cut={"rows": False})
        return
    alone = alike(one_rank, case, path, parallel, rel=1e-3)
    if case == "grpo":
        assert alone[-1]["kl"] > alone[0]["kl"] > 0  # it moves away from the reference
        assert 0 < alone[0]["clip_ratio"] < 1
    else:
        assert alone[1]["value_mean"] != 0.0
