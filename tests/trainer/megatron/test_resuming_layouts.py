"""A run is continued exactly in its own layout, and within rounding in any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.trainer.ranks import Ranks
from trainer.config import ParallelConfig

SCHEDULE = {"optimizer": {"lr": 1e-2, "warmup_steps": 2, "decay": "cosine"}}
FULL = {"data": 2, "shard": "full"}
SPREAD, INTERLEAVED = {"data": 2, "expert": 2}, {"pipeline": 2, "virtual_pipeline": 2}
LAYOUTS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("qwen2", {"tensor": 2}, {}),
    ("qwen2", {"pipeline": 2}, {}),
    ("qwen2", {"data": 2}, {}),
    ("qwen2", INTERLEAVED, {}),
    ("qwen2", {"context": 2}, {}),
    ("mixtral", SPREAD, {}),
    ("mixtral", {"tensor": 2, "sequence": True}, {}),
    ("qwen2", {"data": 2}, {"dtype": "float16"}),
    ("qwen2", {"data": 2}, {"offload": True}),
    ("qwen2", FULL, {}),
    ("llama-tied", FULL, {"dtype": "bfloat16"}),
    ("qwen2", {"context": 2, "shard": "full"}, {}),
]


def size(parallel: dict[str, Any]) -> int:
    return ParallelConfig(**parallel).world_size


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("model", "parallel", "how"),
    LAYOUTS,
    ids=["-".join([m, *(f"{k}{v}" for k, v in (p | h).items())]) for m, p, h in LAYOUTS],
)
def test_resume_is_exact(
    two_ranks: Ranks, models: dict[str, str], tmp_path: Path, model: str, parallel: dict[str, Any], how: dict[str, Any]
) -> None:
    path = models[model]
    common = {"path": path, "parallel": parallel, "save_at": 2, "directory": str(tmp_path)}
    config: dict[str, Any] = {"model": {"path": path, "dtype": how.get("dtype", "float32")}}
    config["optimizer"] = SCHEDULE["optimizer"] | {"offload": how.get("offload", False)}
    through = two_ranks.call("losses", **common, **config)
    resumed = two_ranks.call("losses", **common, **config, resume=True)
    assert resumed == [steps[2:] for steps in through]


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("offloaded", [False, True], ids=["to-the-host", "to-the-device"])
def test_an_optimizer_may_move_between_device_and_host(
    two_ranks: Ranks, models: dict[str, str], tmp_path: Path, offloaded: bool, dtype: str
) -> None:
    path = models["qwen2"]
    common = {"path": path, "parallel": {"data": 2}, "save_at": 2, "directory": str(tmp_path)}
    common["model"] = {"path": path, "dtype": dtype}
    there, back = (SCHEDULE["optimizer"] | {"offload": offload} for offload in (offloaded, not offloaded))
    through = two_ranks.call("losses", **common, optimizer=there)[0]
    resumed = two_ranks.call("losses", **common, optimizer=back, resume=True)[0]
    assert resumed == [pytest.approx(step, rel=1e-5) for step in through[2:]]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("model", "saved", "others"),
    [
        ("llama-tied", {"tensor": 2}, [{}, {"pipeline": 2}, INTERLEAVED, {"context": 2}]),
        ("llama-tied", INTERLEAVED, [{}, {"tensor": 2, "sequence": True}]),
        ("llama-tied", {"pipeline": 2, "data": 2}, [{}, {"pipeline": 2}]),
        ("mixtral", SPREAD, [{}, {"pipeline": 2}]),
        ("mixtral", {}, [SPREAD]),
        ("qwen2", {"data": 4, "shard": "full"}, [FULL]),
    ],
    ids=["tensor", "interleaved", "tied-stages", "experts", "alone", "full"],
)
def test_a_checkpoint_can_be_read_in_another_layout(
    one_rank: Ranks,
    models: dict[str, str],
    tmp_path: Path,
    model: str,
    saved: dict[str, Any],
    others: list[dict[str, Any]],
) -> None:
    common = {"path": models[model], "save_at": 2, "directory": str(tmp_path)}
    config = {"optimizer": {"lr": 1e-2, "weight_decay": 0.1}}
    through = one_rank.sharing(size(saved)).call("losses", **common, **config, parallel=saved)[0]
    for parallel in others:
        ranks = one_rank.sharing(size(parallel))
        resumed = ranks.call("losses", **common, **config, parallel=parallel, resume=True)[0]
        assert resumed == [pytest.approx(step, rel=2e-4) for step in through[2:]], parallel
