"""Parts that training an adapter leaves alone: the frozen weights, the memory they would need, the reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.trainer.faults.runs import arguments
from tests.trainer.megatron.layouts import FULL, SEQUENCE, SPREAD, Layout, goes_on
from tests.trainer.megatron.test_lora_layouts import LORA
from tests.trainer.ranks import Ranks
from tests.trainer.zygote import Zygote
from trainer.checkpoint.shards import INDEX, read_index

LAYERS, HIDDEN, FFN, QUERIES, KEYS = 2, 32, 64, 64, 32  # of the small models
PER_LAYER = (HIDDEN + QUERIES) * 2 + (HIDDEN + KEYS) * 2 + (HIDDEN + FFN) * 3  # inputs and outputs of the projections
HARD: dict[str, Any] = {"optimizer": {"lr": 3e-2, "warmup_steps": 2, "decay": "cosine"}}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_only_the_adapter_has_gradients_and_optimizer_states(one_rank: Ranks, qwen2: str, dtype: str) -> None:
    model = {"path": qwen2, "dtype": dtype}
    optimizer = {"lr": 3e-2, "weight_decay": 0.1}
    found = one_rank.call("held", path=qwen2, lora=LORA, model=model, optimizer=optimizer)[0]
    assert found["elements"] == found["states"] == LAYERS * PER_LAYER * LORA["rank"]
    assert found["elements"] <= found["gradients"] < 1.2 * found["elements"]  # buffers are padded
    assert found["graded"] == found["trained"]
    assert all("_lora." in name for name in found["trained"])
    assert {name for name in found["moved"] if name.endswith(".B")} == {n for n in found["trained"] if n.endswith(".B")}
    assert set(found["moved"]) <= set(found["trained"])


@pytest.mark.sample(2)
@pytest.mark.parametrize("parallel", [{}, {"tensor": 2}, {"pipeline": 2}], ids=["one", "tensor", "pipeline"])
def test_the_reference_is_the_actor_without_its_adapter(
    one_rank: Ranks, small_models: dict[str, str], parallel: dict[str, int]
) -> None:
    ranks, arguments = one_rank.spread(parallel), {"path": small_models["qwen3"], "parallel": parallel}
    found = ranks.call("references", **arguments, lora=LORA)[0]
    full = ranks.call("references", **arguments, lora=None)[0]
    assert found["before"] == found["after"]
    assert found["actor"] != found["after"]
    for mine, copy in zip(found["before"], full["before"], strict=True):
        assert mine == pytest.approx(copy, abs=1e-5)  # what the second copy of the whole weights says
    assert found["losses"][0] == pytest.approx(full["losses"][0], rel=1e-5)
    assert found["losses"][2] != pytest.approx(found["losses"][0], rel=1e-3)
    assert found["storages"] == ["actor", "actor_optimizer"]
    assert full["storages"] == ["actor", "actor_optimizer", "reference"]
    assert found["bytes"] < 0.45 * full["bytes"]  # weights once, and not twice with gradients and two moments
    adapted = 2 * 7 * LAYERS // parallel.get("pipeline", 1)
    assert found["parameters"] - adapted == full["parameters"] // 2


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_inputs_drop_out_in_training_alone(one_rank: Ranks, qwen2: str, recompute: str) -> None:
    arguments: dict[str, Any] = {"path": qwen2, "recompute": recompute}
    dropping = one_rank.call("repeated", lora=LORA | {"dropout": 0.5}, **arguments)[0]
    whole = one_rank.call("repeated", lora=LORA, **arguments)[0]
    assert dropping["said"][0] == dropping["said"][1] == whole["said"][0]
    assert dropping["losses"][0] != dropping["losses"][1]
    assert whole["losses"][0] == pytest.approx(whole["losses"][1], rel=1e-6)
    assert whole["norms"][0] > 0


def test_recomputed_layers_have_the_same_gradients(one_rank: Ranks, qwen2: str) -> None:
    """With dropout, too: the second pass draws what the first one drew."""
    arguments: dict[str, Any] = {"path": qwen2, "parallel": {}, **HARD}
    for lora in (LORA, LORA | {"dropout": 0.3}):
        models = [{"path": qwen2, "recompute": how} for how in ("none", "full")]
        kept, again = (one_rank.call("losses", lora=lora, model=model, **arguments)[0] for model in models)
        assert again == [pytest.approx(step, rel=1e-5) for step in kept]
        assert min(norm for _, norm in kept) > 0


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("model", "saved", "others"),
    [
        ("qwen2", {"tensor": 2}, [{}]),
        ("qwen2", {}, [{"pipeline": 2}]),
        ("qwen2", FULL, []),
        ("mixtral", SPREAD, [{}]),
        ("mixtral", SEQUENCE, [SPREAD]),
    ],
)
def test_an_adapter_and_its_optimizer_are_resumed(
    one_rank: Ranks, tmp_path: Path, path: str, saved: Layout, others: list[Any]
) -> None:
    goes_on(one_rank, path, tmp_path, saved, *others, rel=5e-4, lora=LORA, **HARD)
    kept = read_index(tmp_path / "actor" / INDEX).state_dict_metadata
    assert any("_lora." in name for name in kept)
    assert [name for name in kept if name.endswith("weight")] == []  # the frozen ones


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"lora": {"rank": 8}}, "written with lora {'rank': 4"),
        ({"lora": {"rank": 4, "target_modules": ["q_proj"]}}, "'targets': ['q_proj']"),
        ({"lora": None}, "this run has None"),
    ],
    ids=["rank", "targets", "full"],
)
def test_a_checkpoint_of_another_adapter_is_refused(
    zygote: Zygote, config: dict[str, Any], tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    zygote.train(config | {"lora": {"rank": 4}, "steps": 3, "save_to": str(tmp_path / "saved")}, tmp_path)
    assert {f.name for f in (tmp_path / "saved").iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    status, _, errors = zygote.run(arguments(config | {"lora": {"rank": 4}, "steps": 5} | changes, tmp_path), tmp_path)
    assert status == 2
    assert said in errors
    assert "checkpoint.resume" in errors
