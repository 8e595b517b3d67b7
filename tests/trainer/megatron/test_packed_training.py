"""Training on packed rows is training on the same sequences one a row: log-probs, losses, gradients, weights."""

from __future__ import annotations

from typing import Any

import pytest

from tests.trainer.ranks import Ranks

GRPO = {"name": "grpo", "samples_per_prompt": 3, "kl_coef": 0.1, "minibatches": 2}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "sft": {"name": "sft"},
    "sft on prompts": {"name": "sft", "on_prompt": True},
    "dpo": {"name": "dpo", "minibatches": 2},
    "grpo": GRPO,
    "gspo": GRPO | {"ratio": "sequence", "normalize": "sequence"},
    "rloo": {"name": "rloo", "samples_per_prompt": 3, "kl_coef": 0.1},
    "reinforce++": {"name": "reinforce++", "samples_per_prompt": 2, "kl_coef": 0.1},
    "ppo": {"name": "ppo", "samples_per_prompt": 2, "epochs": 2},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "data": {"parallel": {"data": 2}},
    "tensor and sequence": {"parallel": {"tensor": 2, "sequence": True}},
    "pipeline": {"parallel": {"pipeline": 2}},
    "context": {"parallel": {"context": 2}},
}


def check(results: list[dict[str, Any]], *, tolerance: float = 2e-4) -> None:
    first = results[0]
    assert len(first["plain"]) == 3
    assert first["packed"] == [pytest.approx(step, rel=tolerance, abs=tolerance / 10) for step in first["plain"]]
    assert first["plain"][0]["loss"] != first["plain"][2]["loss"]
    assert max(r["logprobs"] for r in results) < 1e-5
    assert 0 < max(r["weights"] for r in results) < 2e-3
    assert first["packed_cells"] < 0.9 * first["plain_cells"]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_learns_the_same_from_packed_rows(
    one_rank: Ranks, small_models: dict[str, str], algorithm: str
) -> None:
    path, section = small_models["qwen3"], ALGORITHMS[algorithm]
    check(one_rank.call("packed_training", path=path, parallel={}, algorithm=section))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("algorithm", ["dpo", "grpo"])
def test_so_does_every_layout(two_ranks: Ranks, small_models: dict[str, str], layout: str, algorithm: str) -> None:
    path, section = small_models["llama"], ALGORITHMS[algorithm]
    check(two_ranks.call("packed_training", path=path, algorithm=section, **LAYOUTS[layout]))


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_packed_rows_are_recomputed_as_they_were(one_rank: Ranks, small_models: dict[str, str], recompute: str) -> None:
    path = small_models["llama-scaled"]
    model = {"path": path, "recompute": recompute}
    check(one_rank.call("packed_training", path=path, parallel={}, algorithm={"name": "sft"}, model=model))
