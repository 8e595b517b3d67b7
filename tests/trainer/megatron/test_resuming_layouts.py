"""A run is continued exactly in its own layout, and within rounding in any other. Checkpoints of fully sharded weights:
written behind training's back, uneven and empty shards, the other format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.trainer.conftest import SMALL
from tests.trainer.megatron.layouts import FULL, INTERLEAVED, SEQUENCE, SPREAD, Layout, goes_on, named
from tests.trainer.ranks import Ranks
from trainer.tiny_model import write_tiny_model

OPTIMIZER = {"lr": 1e-2, "warmup_steps": 2, "decay": "cosine", "weight_decay": 0.1}
MUON = {"name": "muon"}
PPO = {"algorithm": {"name": "ppo", "critic_lr": 1e-2}, "gateway": {"url": "http://unused"}}
CASES: list[tuple[str, Layout, list[Layout], str, dict[str, Any]]] = [
    ("llama-tied", {"tensor": 2}, [{}, {"pipeline": 2}, INTERLEAVED, {"context": 2}], "float32", {}),
    ("qwen2", {"tensor": 2}, [], "float32", {}),
    ("qwen2", {"pipeline": 2}, [], "float32", {}),
    ("mixtral", SEQUENCE, [], "float32", {}),
    ("qwen2", {"data": 2}, [], "float32", {}),
    ("qwen2", {"context": 2}, [], "float32", {}),
    ("llama-tied", INTERLEAVED, [{}, SEQUENCE], "float32", {}),
    ("mixtral", {}, [SPREAD], "float32", {}),
    ("mixtral", SPREAD, [{}, {"pipeline": 2}], "float32", {}),
    ("qwen2", FULL, [], "float32", {}),
    ("qwen2", {"context": 2, "shard": "full"}, [], "float32", {}),
    ("llama-tied", {"pipeline": 2, "data": 2}, [{}, {"pipeline": 2}], "float32", {}),
    ("qwen2", {"data": 4, "shard": "full"}, [FULL], "float32", {}),
    ("qwen2", {"data": 2}, [], "float32", {"offload": True}),
    ("qwen2", {"data": 2}, [], "float16", {}),
    ("llama-tied", FULL, [], "bfloat16", {}),
    ("qwen2", {"data": 2}, [{}, {"tensor": 2}], "float32", MUON),
    ("mixtral", SPREAD, [{}, {"pipeline": 2}], "float32", MUON),
    ("llama-tied", {"pipeline": 2}, [{"context": 2}], "float32", MUON),
]
NAMES = named([(model, saved | optimizer) for model, saved, _, _, optimizer in CASES])


@pytest.mark.sample(7)
@pytest.mark.parametrize(("model", "saved", "others", "dtype", "optimizer"), CASES, ids=NAMES)
def test_a_run_goes_on_exactly_and_in_other_layouts(
    one_rank: Ranks, tmp_path: Path, path: str, saved: Layout, others: list[Layout], dtype: str, optimizer: Any
) -> None:
    how: dict[str, Any] = {"model": {"path": path, "dtype": dtype}, "optimizer": OPTIMIZER | optimizer}
    goes_on(one_rank, path, tmp_path, saved, *others, **how)


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("offloaded", [False, True], ids=["to-the-host", "to-the-device"])
def test_an_optimizer_may_move_between_device_and_host(
    two_ranks: Ranks, deep: str, tmp_path: Path, offloaded: bool, dtype: str
) -> None:
    common = {"path": deep, "parallel": {"data": 2}, "save_at": 2, "directory": str(tmp_path)}
    common["model"] = {"path": deep, "dtype": dtype}
    there, back = (OPTIMIZER | {"offload": offload} for offload in (offloaded, not offloaded))
    through = two_ranks.call("losses", **common, optimizer=there)[0]
    resumed = two_ranks.call("losses", **common, optimizer=back, resume=True)[0]
    assert resumed == [pytest.approx(step, rel=1e-5) for step in through[2:]]


def test_actor_and_critic_are_written_while_training_goes_on(two_ranks: Ranks, qwen2: str, tmp_path: Path) -> None:
    found = two_ranks.call("saved_while_training", path=qwen2, parallel=FULL, directory=str(tmp_path), **PPO)
    for rank in found:
        assert rank["unwritten"]
        assert rank["resumed"] == rank["through"], "bit for bit"
    files = {p.name for p in (tmp_path / "step-00000002" / "critic").iterdir()}
    assert files == {".metadata", "__0_0.distcp", "__1_0.distcp", "fully_sharded.json"}


@pytest.mark.broad
def test_ranks_without_a_part_of_some_tensor(one_rank: Ranks, tmp_path: Path) -> None:
    """Six norm weights over four ranks are two, two, two and none."""
    sizes: dict[str, Any] = SMALL | {"head_dim": 6}
    write_tiny_model(tmp_path / "model", "qwen3", **sizes)
    (saved := tmp_path / "saved").mkdir()
    goes_on(one_rank, str(tmp_path / "model"), saved, {"data": 4, "shard": "full"}, FULL)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("saved", "resumed"), [(FULL, {"data": 2}), ({"data": 2}, FULL)], ids=["full", "optimizer"])
def test_the_other_way_of_sharding_is_refused_by_name(
    two_ranks: Ranks, qwen2: str, tmp_path: Path, saved: Layout, resumed: Layout
) -> None:
    common: dict[str, Any] = {"path": qwen2, "steps": 2, "save_at": 1, "directory": str(tmp_path)}
    two_ranks.call("losses", **common, parallel=saved)
    with pytest.raises(AssertionError, match=rf"shard {saved.get('shard', 'optimizer')}, this run has .* Set it back"):
        two_ranks.call("losses", **common, parallel=resumed, resume=True)
