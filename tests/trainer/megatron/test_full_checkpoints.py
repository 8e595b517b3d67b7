"""Checkpoints of fully sharded weights: written behind training's back, uneven and empty shards, the other format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.trainer.conftest import SMALL
from tests.trainer.ranks import Ranks
from trainer.tiny_model import write_tiny_model

FULL = {"data": 2, "shard": "full"}
PPO = {"algorithm": {"name": "ppo", "critic_lr": 1e-2}, "gateway": {"url": "http://unused"}}


def test_actor_and_critic_are_written_while_training_goes_on(
    two_ranks: Ranks, small_models: dict[str, str], tmp_path: Path
) -> None:
    path = small_models["qwen2"]
    found = two_ranks.call("saved_while_training", path=path, parallel=FULL, directory=str(tmp_path), **PPO)
    for rank in found:
        assert rank["unwritten"]
        assert rank["resumed"] == rank["through"], "bit for bit"
    files = {p.name for p in (tmp_path / "step-00000002" / "critic").iterdir()}
    assert files == {".metadata", "__0_0.distcp", "__1_0.distcp", "fully_sharded.json"}


def test_a_damaged_shard_is_named_and_the_one_before_used(
    two_ranks: Ranks, small_models: dict[str, str], tmp_path: Path
) -> None:
    lead, _ = two_ranks.call("torn", path=small_models["qwen2"], parallel=FULL, directory=str(tmp_path))
    assert lead["found"][:2] == [{"step": 2}, {"step": 1}]
    assert "step-00000002/actor/__1_" in lead["found"][2]


@pytest.mark.broad
def test_ranks_without_a_part_of_some_tensor(four_ranks: Ranks, two_ranks: Ranks, tmp_path: Path) -> None:
    """Six norm weights over four ranks are two, two, two and none."""
    path, directory = str(tmp_path / "model"), str(tmp_path / "saved")
    Path(directory).mkdir()
    sizes: dict[str, Any] = SMALL | {"head_dim": 6}
    write_tiny_model(Path(path), "qwen3", **sizes)
    common: dict[str, Any] = {"path": path, "save_at": 2, "directory": directory}
    through = four_ranks.call("losses", **common, parallel={"data": 4, "shard": "full"})
    resumed = four_ranks.call("losses", **common, parallel={"data": 4, "shard": "full"}, resume=True)
    assert resumed == [steps[2:] for steps in through]
    fewer = two_ranks.call("losses", **common, parallel=FULL, resume=True)
    assert fewer[0] == [pytest.approx(step, rel=2e-4) for step in through[0][2:]]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("saved", "resumed"), [(FULL, {"data": 2}), ({"data": 2}, FULL)], ids=["full", "optimizer"])
def test_the_other_way_of_sharding_is_refused_by_name(
    two_ranks: Ranks, small_models: dict[str, str], tmp_path: Path, saved: dict[str, Any], resumed: dict[str, Any]
) -> None:
    common: dict[str, Any] = {"path": small_models["qwen2"], "steps": 2, "save_at": 1, "directory": str(tmp_path)}
    two_ranks.call("losses", **common, parallel=saved)
    with pytest.raises(AssertionError, match=rf"shard {saved.get('shard', 'optimizer')}, this run has .* Set it back"):
        two_ranks.call("losses", **common, parallel=resumed, resume=True)
