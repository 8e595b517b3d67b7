"""Phases on real ranks: training is the same bit for bit, memory is really free, and refusals reach every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.trainer.ranks import Ranks
from trainer.tiny_model import write_tiny_model

MB = 1 << 20
LARGER = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 6}


@pytest.fixture(scope="module")
def larger_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """About 9 M parameters: what it holds stands out against an interpreter's noise."""
    path = tmp_path_factory.mktemp("models") / "larger"
    write_tiny_model(path, **LARGER, num_key_value_heads=6)
    return str(path)


@pytest.fixture(scope="module")
def even_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One that two tensor-parallel ranks can cut."""
    path = tmp_path_factory.mktemp("models") / "even"
    write_tiny_model(path, num_attention_heads=4, num_key_value_heads=2)
    return str(path)


def phases(
    ranks: Ranks, path: str, directory: Path, spare: float | None, lora: dict[str, Any] | None = None, **parallel: int
) -> list[dict[str, Any]]:
    return ranks.call("phases", path=path, parallel=parallel, directory=str(directory), spare=spare, lora=lora)


@pytest.mark.broad
def test_training_in_phases_is_the_same_training_and_the_server_gets_the_memory(
    one_rank: Ranks, larger_model: str, tmp_path: Path
) -> None:
    """A budget of 60 % of everything: trainer and server cannot be there together."""
    (alone,) = phases(one_rank, larger_model, tmp_path, None)
    (shared,) = phases(one_rank, larger_model, tmp_path, 0.6)
    assert shared["losses"] == alone["losses"]
    assert alone["log"] == []
    assert shared["log"] == ["sleep", "wake"] * 2 + ["sleep"], "the server sleeps through training"
    assert shared["held"] == [True] * 3
    rollout, train = shared["resident"][2::2], shared["resident"][3::2]  # from the second step on, with Adam's states
    assert shared["own"] > 150 * MB
    assert min(train) - max(rollout) > 0.7 * shared["own"], shared["resident"]
    assert "memory_ms/rollout/engine" not in shared["took"][0], "it was awake"
    assert {"memory_ms/rollout", "memory_ms/rollout/engine", "memory_ms/rollout/actor"} <= set(shared["took"][1])
    assert list(tmp_path.iterdir()) == []


def test_with_room_for_everything_nothing_moves(one_rank: Ranks, larger_model: str, tmp_path: Path) -> None:
    (shared,) = phases(one_rank, larger_model, tmp_path, 1.1)
    assert shared["log"] == []


@pytest.mark.sample(1)
@pytest.mark.parametrize("parallel", [{"data": 2}, {"tensor": 2}, {"pipeline": 2}], ids=str)
def test_ranks_move_together(two_ranks: Ranks, even_model: str, tmp_path: Path, parallel: dict[str, int]) -> None:
    alone = phases(two_ranks, even_model, tmp_path, None, **parallel)
    shared = phases(two_ranks, even_model, tmp_path, 0.6, **parallel)
    assert [rank["losses"] for rank in shared] == [rank["losses"] for rank in alone]
    assert [rank["log"] for rank in shared] == [["sleep", "wake"] * 2 + ["sleep"]] * 2


def test_what_cannot_be_is_refused_on_every_rank(two_ranks: Ranks, tiny_model: str, tmp_path: Path) -> None:
    first, last = two_ranks.call("phases_refused", path=tiny_model, parallel={"data": 2}, directory=str(tmp_path))
    for rank in (first, last):
        kind, told = rank[0]
        assert kind == "MemoryPlanError"
        assert "phase train needs" in told
        assert "the budget is 0.1 MiB" in told
        assert rank[1] == ["MemoryPlanError", "actor is offloaded. Enter a phase that needs it first."]
    assert first[2][0] == "RankFailed"
    assert "rank 1" in first[2][1]
    assert last[2][0] == "MemoryPlanError"
    assert "memory.directory" in last[2][1]


@pytest.mark.parametrize("parallel", [{}, {"data": 2}], ids=["one", "data"])
def test_frozen_weights_leave_with_their_adapter(
    one_rank: Ranks, even_model: str, tmp_path: Path, parallel: dict[str, int]
) -> None:
    """The reference is the actor's weights, moved once; the frozen ones are in none of the actor's buffers."""
    ranks = one_rank.sharing(2 if parallel else 1)
    alone = phases(ranks, even_model, tmp_path, None, {"rank": 4}, **parallel)
    shared = phases(ranks, even_model, tmp_path, 0.6, {"rank": 4}, **parallel)
    assert [rank["losses"] for rank in shared] == [rank["losses"] for rank in alone]
    moved = {name for taken in shared[0]["took"] for name in taken}
    assert "memory_ms/rollout/actor" in moved
    assert "memory_ms/rollout/reference" not in moved
    weights = (Path(even_model) / "model.safetensors").stat().st_size
    assert shared[0]["own"] > 2 * weights  # of actor and critic, and something for their adapters
    assert shared[0]["own"] < 4 * weights
