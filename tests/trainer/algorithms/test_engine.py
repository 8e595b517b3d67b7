"""Algorithms in the engine: the same numbers in every layout, packed or not; the critic; what each role holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.trainer.conftest import SMALL
from tests.trainer.ranks import Ranks
from trainer.megatron.hf_config import load_shape
from trainer.tiny_model import write_tiny_model

EVERY = ["dpo", "gspo", "async", "rloo", "kimi", "reinforce", "ppo", "custom", "distill"]


@pytest.fixture(scope="module")
def serial(one_rank: Ranks, small_models: dict[str, str]) -> dict[str, Any]:
    """One rank's numbers, which all others are compared with."""
    numbers: dict[str, Any] = one_rank.call("algorithms", path=small_models["qwen3-tied"], parallel={}, names=EVERY)[0]
    return numbers


CLIPPED = "value_clip_ratio"


def check(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, steps in found.items():
        for mine, theirs in zip(steps, expected[name], strict=True):
            near = {key: pytest.approx(value, rel=2e-3, abs=2e-5) for key, value in theirs.items()}
            if CLIPPED in theirs:  # a value on the bound counts as clipped or not, by its last bit; three tokens may
                near[CLIPPED] = pytest.approx(theirs[CLIPPED], abs=3 / theirs["tokens"])
            assert mine == near, name


LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor": {"tensor": 2},
    "sequence": {"tensor": 2, "sequence": True},
    "pipeline": {"pipeline": 2},
    "data": {"data": 2},
    "context": {"context": 2},
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("parallel", LAYOUTS.values(), ids=LAYOUTS)
def test_every_algorithm_is_the_same_in_every_layout(
    two_ranks: Ranks, small_models: dict[str, str], serial: dict[str, Any], parallel: dict[str, Any]
) -> None:
    ranks = two_ranks.call("algorithms", path=small_models["qwen3-tied"], parallel=parallel, names=EVERY)
    assert ranks[0] == ranks[1]
    check(ranks[0], serial)


@pytest.mark.broad
def test_and_with_interleaved_pipeline_stages(one_rank: Ranks, two_ranks: Ranks, tmp_path: Path) -> None:
    """Two stages of two chunks each; the critic's head is on the last chunk."""
    path, parallel = str(tmp_path / "deep"), {"pipeline": 2, "virtual_pipeline": 2}
    write_tiny_model(path, "qwen3", **SMALL | {"num_hidden_layers": 4})
    alone, ranks = (
        ranks.call("algorithms", path=path, parallel=layout, names=["dpo", "ppo"])[0]
        for ranks, layout in ((one_rank, {}), (two_ranks, parallel))
    )
    check(ranks, alone)


@pytest.mark.parametrize("name", ["dpo", "ppo"])
def test_and_with_weights_fully_sharded(
    two_ranks: Ranks, small_models: dict[str, str], serial: dict[str, Any], name: str
) -> None:
    """One at a time: torch's device meshes do not survive the process groups of a first engine."""
    parallel = {"data": 2, "shard": "full"}
    check(two_ranks.call("algorithms", path=small_models["qwen3-tied"], parallel=parallel, names=[name])[0], serial)


@pytest.mark.broad
@pytest.mark.parametrize("parallel", [{}, {"data": 2}], ids=["serial", "data"])
def test_packing_changes_nothing(
    one_rank: Ranks, two_ranks: Ranks, small_models: dict[str, str], serial: dict[str, Any], parallel: dict[str, Any]
) -> None:
    ranks = two_ranks if parallel else one_rank
    found = ranks.call("algorithms", path=small_models["qwen3-tied"], parallel=parallel, names=EVERY, packed=True)
    check(found[0], serial)


def test_the_steps_say_what_happened(serial: dict[str, Any]) -> None:
    ppo = serial["ppo"]
    assert [step["value_mean"] == 0.0 for step in ppo] == [False, False]  # the second epoch sees a trained critic
    assert all(step["critic_loss"] > 0 and step["critic_grad_norm"] > 0 and step["kl"] >= 0 for step in ppo)
    assert serial["dpo"][0]["loss"] == pytest.approx(0.69, abs=0.05)  # at the reference: log 2
    assert serial["dpo"][0]["tokens"] > 0
    assert serial["async"][0]["rejected"] > 0
    assert serial["gspo"][1]["kl"] > 0


def test_the_critic_learns_alone_at_first(one_rank: Ranks, small_models: dict[str, str]) -> None:
    seen = one_rank.call("critic_warmup", path=small_models["qwen2"])[0]
    assert seen["untrained"] == 0.0
    actor, critic = ([w[name] for w in seen["weights"]] for name in ("actor", "critic"))
    assert actor[0] == actor[1] == actor[2] != actor[3]
    assert len(set(critic)) == 4
    assert [step["loss"] == 0.0 for step in seen["stats"]] == [True, True, False]
    assert "clip_ratio" in seen["stats"][2]
    assert seen["stats"][2]["critic_loss"] < seen["stats"][0]["critic_loss"]
    assert seen["rates"] == [pytest.approx(3e-3), pytest.approx(1e-2)]


@pytest.mark.broad
def test_the_critic_goes_on_where_it_was(
    one_rank: Ranks, two_ranks: Ranks, small_models: dict[str, str], tmp_path: Path
) -> None:
    """Also how much of its time alone is left; exactly in the same layout, within rounding in another."""
    common = {"path": small_models["qwen2-tied"], "directory": str(tmp_path)}
    through = two_ranks.call("critic_steps", parallel={"tensor": 2}, **common)[0]
    assert [step["loss"] == 0.0 for step in through] == [True, True, False, False]
    assert two_ranks.call("critic_steps", parallel={"tensor": 2}, resume=True, **common)[0] == through[1:]
    for ranks, parallel in ((two_ranks, {"pipeline": 2}), (two_ranks, {"data": 2}), (one_rank, {})):
        resumed = ranks.call("critic_steps", parallel=parallel, resume=True, **common)[0]
        check({"ppo": resumed}, {"ppo": through[1:]})


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_each_step_of_kimi_begins_with_a_new_optimizer(
    one_rank: Ranks, two_ranks: Ranks, small_models: dict[str, str], name: str
) -> None:
    """The second step leads where an optimizer leads that has seen no first one; not so without `reset_optimizer`."""
    common: dict[str, Any] = {"path": small_models["qwen2"], "optimizer": {"name": name, "lr": 3e-3}}
    for ranks, parallel in ((one_rank, {}), (two_ranks, {"data": 2})):
        for moved, apart in ranks.call("second_step", parallel=parallel, **common):
            assert apart == 0.0 < moved
    kept = one_rank.call("second_step", parallel={}, **common, algorithm={"reset_optimizer": False})[0]
    assert kept[1] > kept[0] / 10


@pytest.mark.parametrize("model", ["qwen2-tied", "llama"])
def test_the_critic_is_the_models_trunk(one_rank: Ranks, small_models: dict[str, str], model: str) -> None:
    assert one_rank.call("critic_is_the_trunk", path=small_models[model])[0] < 1e-5


def test_what_a_step_needs_can_be_computed_in_parts(one_rank: Ranks, small_models: dict[str, str]) -> None:
    differences = one_rank.call("prefilled_in_parts", path=small_models["qwen3"])[0]
    assert len(differences) == 3
    assert max(differences) < 1e-5


@pytest.mark.parametrize(("dtype", "weight", "optimizer"), [("float32", 4, 8), ("bfloat16", 2, 12)])
def test_every_byte_of_a_role_is_listed_once(
    one_rank: Ranks, small_models: dict[str, str], dtype: str, weight: int, optimizer: int
) -> None:
    """Weights and fp32 gradients are the model's; Adam's two states, and fp32 weights where the model's are not, the
    optimizer's."""
    path = small_models["qwen2"]
    found, parameters = one_rank.call("role_storages", path=path, dtype=dtype)[0], load_shape(path).parameters
    assert found["distinct"]
    assert sorted(found["after"]) == ["actor", "actor_optimizer", "critic", "critic_optimizer", "reference"]
    after = {name: size / parameters for name, size in found["after"].items()}
    padding = 1.3  # of the vocabulary, to a multiple that ranks divide, and of buffers
    assert weight + 4 <= after["actor"] <= (weight + 4) * padding
    assert optimizer <= after["actor_optimizer"] <= optimizer * padding
    assert weight <= after["reference"] <= weight * padding
    assert found["before"]["actor_optimizer"] < found["after"]["actor_optimizer"]
    assert found["before"]["actor"] == found["after"]["actor"]
