"""Training on packed rows is training on the same sequences one a row: log-probs, losses, gradients, weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.trainer.data.writing import jsonl, problems
from tests.trainer.megatron.layouts import FULL, INTERLEAVED, SEQUENCE, SPREAD, Layout
from tests.trainer.ranks import Ranks

GRPO = {"name": "grpo", "samples_per_prompt": 3, "kl_coef": 0.1, "minibatches": 2}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "sft": {"name": "sft"},
    "sft on prompts": {"name": "sft", "on_prompt": True},
    "dpo": {"name": "dpo", "minibatches": 2},
    "grpo": GRPO,
    "gspo": GRPO | {"ratio": "sequence", "normalize": "sequence"},
    "rloo": {"name": "rloo", "samples_per_prompt": 3, "kl_coef": 0.1},
    "kimi": {"name": "kimi", "samples_per_prompt": 3, "minibatches": 2},
    "reinforce++": {"name": "reinforce++", "samples_per_prompt": 2, "kl_coef": 0.1},
    "ppo": {"name": "ppo", "samples_per_prompt": 2, "epochs": 2},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "data": {"data": 2},
    "tensor and sequence": SEQUENCE,
    "pipeline": {"pipeline": 2},
    "context": {"context": 2},
    "full": FULL,
}


def check(results: list[dict[str, Any]], *, tolerance: float = 2e-4) -> None:
    first = results[0]
    assert len(first["plain"]) == 3
    assert first["packed"] == [pytest.approx(step, rel=tolerance, abs=tolerance / 10) for step in first["plain"]]
    assert first["plain"][0]["loss"] != first["plain"][2]["loss"]
    assert max(r["logprobs"] for r in results) < 1e-5
    assert 0 < max(r["weights"] for r in results) < 2e-3
    assert first["packed_cells"] < 0.9 * first["plain_cells"]


@pytest.mark.sample(3)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_learns_the_same_from_packed_rows(
    one_rank: Ranks, small_models: dict[str, str], algorithm: str
) -> None:
    path, section = small_models["qwen3"], ALGORITHMS[algorithm]
    check(one_rank.call("packed_training", path=path, parallel={}, algorithm=section))


@pytest.mark.sample(3)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("algorithm", ["dpo", "grpo"])
def test_so_does_every_layout(two_ranks: Ranks, small_models: dict[str, str], layout: str, algorithm: str) -> None:
    path, section = small_models["llama"], ALGORITHMS[algorithm]
    check(two_ranks.call("packed_training", path=path, algorithm=section, parallel=LAYOUTS[layout]))


@pytest.mark.parametrize(
    ("model", "parallel", "recompute"),
    [
        ("llama-scaled", {}, "selective"),
        pytest.param("llama-scaled", {}, "full", marks=pytest.mark.broad),
        ("qwen3_moe", SPREAD, "none"),
        pytest.param("qwen2", INTERLEAVED, "none", marks=pytest.mark.broad),
    ],
    ids=["recomputed in part", "recomputed", "experts are chosen as without packing", "whole groups for stages"],
)
def test_so_do_recomputed_layers_experts_and_interleaved_stages(
    one_rank: Ranks, path: str, parallel: Layout, recompute: str
) -> None:
    config = {"parallel": parallel, "algorithm": {"name": "sft"}, "model": {"path": path, "recompute": recompute}}
    check(one_rank.spread(parallel).call("packed_training", path=path, **config))


@pytest.mark.broad
def test_a_run_goes_on_at_another_number_of_ranks_where_it_was(
    one_rank: Ranks, two_ranks: Ranks, tiny_model: str, tmp_path: Path
) -> None:
    data = str(jsonl(tmp_path / "a.jsonl", problems(50)))

    def run(ranks: Ranks, steps: list[int], directory: str, **parallel: int) -> dict[str, Any]:
        (tmp_path / directory).mkdir(exist_ok=True)
        place = {"data": data, "directory": str(tmp_path / directory)}
        first, *others = ranks.call("from_files", path=tiny_model, parallel=parallel, steps=steps, **place)
        assert all(other == first for other in others)
        return first

    through = run(one_rank, [0, 6], "through")
    first = run(two_ranks, [0, 3], "cut", data=2)
    # Fifty records at twelve a step: the rest goes on into a second epoch.
    for rest in (run(one_rank, [3, 6], "cut"), run(two_ranks, [3, 6], "cut", data=2)):
        assert first["tokens"] + rest["tokens"] == through["tokens"]
        assert first["trained"] + rest["trained"] == [pytest.approx(step, rel=1e-3) for step in through["trained"]]
    assert through["trained"][0][0] > through["trained"][5][0]
