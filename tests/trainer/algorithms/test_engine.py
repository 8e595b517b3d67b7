"""Algorithms in the engine: the same numbers in every layout; the critic; what each role holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.trainer.ranks import Ranks
from trainer.megatron.hf_config import load_shape

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


BROAD = pytest.mark.broad
FULL = {"data": 2, "shard": "full"}


@pytest.mark.parametrize(
    ("parallel", "names"),
    [
        pytest.param({"tensor": 2}, EVERY, id="tensor"),
        pytest.param({"pipeline": 2}, EVERY, id="pipeline"),
        pytest.param({"tensor": 2, "sequence": True}, EVERY, id="sequence", marks=BROAD),
        pytest.param({"data": 2}, EVERY, id="data", marks=BROAD),
        pytest.param({"context": 2}, EVERY, id="context", marks=BROAD),
        pytest.param(FULL, ["dpo"], id="full-dpo"),
        pytest.param(FULL, ["ppo"], id="full-ppo"),
    ],
)
def test_every_algorithm_is_the_same_in_every_layout(
    one_rank: Ranks, small_models: dict[str, str], serial: Any, parallel: Any, names: list[str]
) -> None:
    """Of weights that are fully sharded, one at a time: torch's device meshes outlive no engine's process groups."""
    about = {"path": small_models["qwen3-tied"], "parallel": parallel, "names": names}
    ranks = one_rank.spread(parallel).call("algorithms", **about)
    assert all(rank == ranks[0] for rank in ranks)
    check(ranks[0], serial)


@pytest.mark.broad
def test_and_with_interleaved_pipeline_stages(one_rank: Ranks, two_ranks: Ranks, deep: str) -> None:
    """Two stages of two chunks each; the critic's head is on the last chunk."""
    about = {"path": deep, "names": ["dpo", "ppo"]}
    alone = one_rank.call("algorithms", parallel={}, **about)[0]
    check(two_ranks.call("algorithms", parallel={"pipeline": 2, "virtual_pipeline": 2}, **about)[0], alone)


def test_the_steps_say_what_happened(serial: dict[str, Any]) -> None:
    ppo = serial["ppo"]
    assert [step["value_mean"] == 0.0 for step in ppo] == [False, False]  # the second epoch sees a trained critic
    assert all(step["critic_loss"] > 0 and step["critic_grad_norm"] > 0 and step["kl"] >= 0 for step in ppo)
    assert serial["dpo"][0]["loss"] == pytest.approx(0.69, abs=0.05)  # at the reference: log 2
    assert serial["dpo"][0]["tokens"] > 0
    assert serial["async"][0]["rejected"] > 0
    assert serial["gspo"][1]["kl"] > 0


def test_the_critic_learns_alone_at_first(one_rank: Ranks, qwen2: str) -> None:
    seen = one_rank.call("critic_warmup", path=qwen2)[0]
    assert seen["untrained"] == 0.0
    actor, critic = ([w[name] for w in seen["weights"]] for name in ("actor", "critic"))
    assert actor[0] == actor[1] == actor[2] != actor[3]
    assert len(set(critic)) == 4
    assert [step["loss"] == 0.0 for step in seen["stats"]] == [True, True, False]
    assert "clip_ratio" in seen["stats"][2]
    assert seen["stats"][2]["critic_loss"] < seen["stats"][0]["critic_loss"]
    assert seen["rates"] == [pytest.approx(3e-3), pytest.approx(1e-2)]


@pytest.mark.broad
def test_the_critic_goes_on_where_it_was(two_ranks: Ranks, small_models: dict[str, str], tmp_path: Path) -> None:
    """Also how much of its time alone is left."""
    common = {"path": small_models["qwen2-tied"], "directory": str(tmp_path)}
    through = two_ranks.call("critic_steps", parallel={"tensor": 2}, **common)[0]
    assert [step["loss"] == 0.0 for step in through] == [True, True, False, False]
    assert two_ranks.call("critic_steps", parallel={"tensor": 2}, resume=True, **common)[0] == through[1:]


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_each_step_of_kimi_begins_with_a_new_optimizer(
    one_rank: Ranks, two_ranks: Ranks, qwen2: str, name: str
) -> None:
    """The second step leads where an optimizer leads that has seen no first one; not so without `reset_optimizer`."""
    common: dict[str, Any] = {"path": qwen2, "optimizer": {"name": name, "lr": 3e-3}}
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
    one_rank: Ranks, qwen2: str, dtype: str, weight: int, optimizer: int
) -> None:
    """Weights and fp32 gradients are the model's; Adam's two states, and fp32 weights where the model's are not, the
    optimizer's."""
    found, parameters = one_rank.call("role_storages", path=qwen2, dtype=dtype)[0], load_shape(qwen2).parameters
    assert found["distinct"]
    assert sorted(found["after"]) == ["actor", "actor_optimizer", "critic", "critic_optimizer", "reference"]
    after = {name: size / parameters for name, size in found["after"].items()}
    padding = 1.3  # of the vocabulary, to a multiple that ranks divide, and of buffers
    assert weight + 4 <= after["actor"] <= (weight + 4) * padding
    assert optimizer <= after["actor_optimizer"] <= optimizer * padding
    assert weight <= after["reference"] <= weight * padding
    assert found["before"]["actor_optimizer"] < found["after"]["actor_optimizer"]
    assert found["before"]["actor"] == found["after"]["actor"]
