"""Checkpoints of real engines on real ranks: written behind training's back, torn, refused by the disk, resumed; and
prepared by somebody else, which run nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.ranks import Ranks

PPO = {"algorithm": {"name": "ppo", "critic_lr": 1e-2}, "gateway": {"url": "http://unused"}}
FULLY_SHARDED = {"data": 2, "shard": "full"}


Call = Callable[..., list[Any]]


@pytest.fixture
def call(one_rank: Ranks, qwen2: str, tmp_path: Path) -> Call:
    """Each rank's answer to a case, of one rank unless `parallel` has two; in a directory of the test's own."""

    def called(case: str, **arguments: Any) -> list[Any]:
        ranks = one_rank.sharing(2 if arguments.get("parallel") else 1)
        return ranks.call(case, path=qwen2, **{"directory": str(tmp_path)} | arguments)

    return called


@pytest.fixture(scope="module")
def saved(two_ranks: Ranks, qwen2: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """An actor and a critic over two tensor-parallel ranks."""
    directory = str(tmp_path_factory.mktemp("ppo"))
    about = {"parallel": {"tensor": 2}, "directory": directory, **PPO}
    found = two_ranks.call("saved_while_training", path=qwen2, **about)
    return {"directory": directory, "ranks": found}


def test_training_goes_on_while_a_checkpoint_is_written(saved: dict[str, Any]) -> None:
    """It holds the weights of its step although later steps were done before the first byte was written."""
    for rank, found in enumerate(saved["ranks"]):
        assert found["unwritten"]
        assert found["train"] == {"step": 2}
        assert found["resumed"] == found["through"], "bit for bit"
        assert found["events"] == (["checkpoint"] if rank == 0 else [])
        assert all(critic_loss > 0 for _, _, critic_loss in found["through"])


@pytest.mark.parametrize("parallel", [{}, {"data": 2}, {"pipeline": 2}], ids=str)
def test_actor_and_critic_resume_in_another_layout(call: Call, saved: dict[str, Any], parallel: dict[str, int]) -> None:
    resumed = call("resumed", parallel=parallel, directory=saved["directory"], **PPO)
    for mine, expected in zip(resumed[-1], saved["ranks"][0]["through"], strict=True):
        assert mine == pytest.approx(expected, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("parallel", [{"tensor": 2}, FULLY_SHARDED], ids=["megatron", "full"])
def test_a_torn_or_missing_shard_is_named_and_the_one_before_used(call: Call, parallel: dict[str, Any]) -> None:
    lead, other = call("torn", parallel=parallel)
    assert lead["found"][:2] == other["found"][:2] == [{"step": 2}, {"step": 1}]
    assert "ResumeError: no whole checkpoint" in lead["found"][2]
    assert "step-00000002/actor/__1_" in lead["found"][2]
    assert "has changed since it was written" in lead["found"][2]
    assert "RankFailed" in other["found"][2]


def test_a_full_disk_is_named_and_survived_as_often_as_allowed(call: Call, tmp_path: Path) -> None:
    lead, other = call("disk_full", parallel={"tensor": 2})
    assert lead[:3] == [["checkpoint_failed", 1], ["checkpoint", 2], ["checkpoint_failed", 3]]
    assert "stopped at 4: rank 1: " in lead[3]
    assert "No space left" in lead[3]
    assert other == ["RankFailed"]
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-00000002"]


def test_a_checkpoint_of_another_kind_of_device_is_resumed(call: Call) -> None:
    (found,) = call("resumed_elsewhere")
    assert found == {"device": "cpu", "same": True, "torch": True, "tracker": True}


def test_without_a_thread(call: Call) -> None:
    (found,) = call("saved_synchronously", parallel={})
    assert found[0] == found[1]


def test_a_run_that_leaves_says_what_it_could_save(call: Call) -> None:
    (said,) = call("left_after_sigterm")
    assert "the checkpoint of step 1 could not be written, so what was saved last stands" in said[0]
    assert "saved at step 2; run it again" in said[1]
    assert "a leap has begun, so what was saved last stands" in said[2]


EXPECTED = {
    "an_index_that_runs_a_command": "asks for posix.system",
    "an_index_that_reaches_through_a_module_it_may_name": "asks for torch.distributed.checkpoint.metadata.os.system",
    "an_index_that_looks_up_a_method": "looks up an attribute",
    "an_index_beside_a_trap": "asks for posix.system",
    "a_shard_that_runs_a_command": "Weights only load failed",
    "a_shard_elsewhere": "points outside of the directory",
    "something_else": "it holds a list",
    "nothing": "is not to be read",
}
MEGATRON = EXPECTED | {
    "a_weight_that_is_called_bytes": "is not to be read",  # its own check of shapes is first
    "a_common_part_that_runs_a_command": "Weights only load failed",
}
FULL = EXPECTED | {
    "a_weight_that_is_called_bytes": "Weights only load failed",
    "a_common_part_that_runs_a_command": "does not fit this run",
}


@pytest.mark.parametrize(
    ("parallel", "expected"),
    [({"tensor": 2}, MEGATRON), (FULLY_SHARDED, FULL)],
    ids=["megatron", "full"],
)
def test_a_prepared_checkpoint_is_refused_and_runs_nothing(
    call: Call, tmp_path: Path, parallel: dict[str, Any], expected: dict[str, str]
) -> None:
    lead, other = call("prepared", parallel=parallel)
    assert lead.keys() == expected.keys()
    for trap, problem in expected.items():
        assert lead[trap].startswith("ResumeError"), trap
        assert problem in lead[trap], trap
        assert other[trap].startswith("RankFailed"), "it is said once"
    assert not list(tmp_path.glob("*.ran"))
