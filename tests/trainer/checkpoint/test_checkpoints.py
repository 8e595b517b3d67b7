"""Checkpoints of real engines on real ranks: written behind training's back, torn, refused by the disk, resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.trainer.ranks import Ranks

PPO = {"algorithm": {"name": "ppo", "critic_lr": 1e-2}, "gateway": {"url": "http://unused"}}


@pytest.fixture(scope="module")
def saved(two_ranks: Ranks, small_models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """An actor and a critic over two tensor-parallel ranks."""
    directory = str(tmp_path_factory.mktemp("ppo"))
    found = two_ranks.call(
        "saved_while_training", path=small_models["qwen2"], parallel={"tensor": 2}, directory=directory, **PPO
    )
    return {"directory": directory, "ranks": found}


def test_training_goes_on_while_a_checkpoint_is_written(saved: dict[str, Any]) -> None:
    """It holds the weights of its step although later steps were done before the first byte was written."""
    for rank, found in enumerate(saved["ranks"]):
        assert found["unwritten"]
        assert found["train"] == {"step": 2}
        assert found["resumed"] == found["through"], "bit for bit"
        assert found["events"] == (["checkpoint"] if rank == 0 else [])
        assert all(critic_loss > 0 for _, _, critic_loss in found["through"])


@pytest.mark.parametrize("parallel", [{"data": 2}, {"pipeline": 2}], ids=str)
def test_actor_and_critic_resume_in_another_layout(
    saved: dict[str, Any], parallel: dict[str, int], two_ranks: Ranks, small_models: dict[str, str]
) -> None:
    resumed = two_ranks.call(
        "resumed", path=small_models["qwen2"], parallel=parallel, directory=saved["directory"], **PPO
    )
    for mine, expected in zip(resumed[-1], saved["ranks"][0]["through"], strict=True):
        assert mine == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_a_single_rank_resumes_what_two_saved(
    saved: dict[str, Any], one_rank: Ranks, small_models: dict[str, str]
) -> None:
    (resumed,) = one_rank.call("resumed", path=small_models["qwen2"], parallel={}, directory=saved["directory"], **PPO)
    for mine, expected in zip(resumed, saved["ranks"][0]["through"], strict=True):
        assert mine == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_a_torn_or_missing_shard_is_named_and_the_one_before_used(
    two_ranks: Ranks, small_models: dict[str, str], tmp_path: Path
) -> None:
    lead, other = two_ranks.call("torn", path=small_models["qwen2"], parallel={"tensor": 2}, directory=str(tmp_path))
    assert lead["found"][:2] == other["found"][:2] == [{"step": 2}, {"step": 1}]
    assert "ResumeError: no whole checkpoint" in lead["found"][2]
    assert "step-00000002/actor/__1_" in lead["found"][2]
    assert "has changed since it was written" in lead["found"][2]
    assert "RankFailed" in other["found"][2]


def test_a_full_disk_is_named_and_survived_as_often_as_allowed(
    two_ranks: Ranks, small_models: dict[str, str], tmp_path: Path
) -> None:
    lead, other = two_ranks.call(
        "disk_full", path=small_models["qwen2"], parallel={"tensor": 2}, directory=str(tmp_path)
    )
    assert lead[:3] == [["checkpoint_failed", 1], ["checkpoint", 2], ["checkpoint_failed", 3]]
    assert "stopped at 4: rank 1: " in lead[3]
    assert "No space left" in lead[3]
    assert other == ["RankFailed"]
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-00000002"]


def test_without_a_thread(one_rank: Ranks, small_models: dict[str, str], tmp_path: Path) -> None:
    (found,) = one_rank.call("saved_synchronously", path=small_models["qwen2"], parallel={}, directory=str(tmp_path))
    assert found[0] == found[1]


def test_a_run_that_leaves_says_what_it_could_save(
    one_rank: Ranks, small_models: dict[str, str], tmp_path: Path
) -> None:
    (said,) = one_rank.call("left_after_sigterm", path=small_models["qwen2"], directory=str(tmp_path))
    assert "the checkpoint of step 1 could not be written, so what was saved last stands" in said[0]
    assert "saved at step 2; run it again" in said[1]
    assert "a leap has begun, so what was saved last stands" in said[2]
