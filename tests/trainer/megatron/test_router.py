"""The routers of mixtures: auxiliary losses and recorded routing, by their formulas and the same in every layout."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from tests.trainer.megatron.layouts import INTERLEAVED, SEQUENCE, SPREAD, Layout, alike, named
from tests.trainer.ranks import Ranks
from trainer.megatron import router

LOSSES = {"router_balance_loss": 0.3, "router_z_loss": 0.1}
LAYOUTS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("mixtral", SPREAD, {}),
    ("qwen3_moe", SEQUENCE, {}),
    ("mixtral", {"context": 2, "expert": 2}, {}),
    ("mixtral", {"pipeline": 2}, {}),
    ("qwen3_moe", INTERLEAVED, {"recompute": "full"}),
    ("mixtral", SEQUENCE | {"pipeline": 2}, {"recompute": "full"}),
]
NAMES = named([(model, layout | how) for model, layout, how in LAYOUTS])


@pytest.mark.parametrize(
    ("model", "algorithm"),
    [
        ("mixtral", {"name": "sft"}),
        ("qwen3_moe-raw", {"name": "sft"}),
        ("mixtral", {"name": "grpo"}),
        ("mixtral", {"name": "grpo", "normalize": "sequence"}),
    ],
    ids=["mixtral", "qwen3_moe", "of-tokens", "of-answers"],
)
def test_losses_and_their_gradient_are_the_formulas(one_rank: Ranks, path: str, algorithm: dict[str, Any]) -> None:
    """Over tokens that are no padding; beside the algorithm's mean loss, whatever that is a mean of."""
    found = one_rank.call("auxiliary", path=path, balance=0.3, z=0.1, algorithm=algorithm)[0]
    assert found["metrics"] == pytest.approx(found["formulas"], rel=1e-5)
    assert found["difference"] < 1e-5 < 0.01 * found["size"]


@pytest.mark.sample(3)
@pytest.mark.parametrize(("model", "parallel", "how"), LAYOUTS, ids=NAMES)
def test_they_are_the_same_in_every_layout(one_rank: Ranks, path: str, parallel: Layout, how: Any) -> None:
    alike(one_rank, "balanced", path, parallel, rel=3e-4, cut=how, **LOSSES)


def test_a_loss_that_was_not_asked_for_is_summed_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL takes the device's tensors alone. `meta` stands for the device here, and its numbers are none."""
    monkeypatch.setattr(router, "device", lambda: torch.device("meta"))
    monkeypatch.setattr(router, "ps", MagicMock(get_data_parallel_world_size=lambda: 1))
    monkeypatch.setattr(torch.Tensor, "item", lambda total: 0.0)
    summed = []
    monkeypatch.setattr(router.dist, "all_reduce", lambda total, group: summed.append(total.device.type))
    tracker = {"load_balancing_loss": {"values": torch.ones(2, device="meta")}}
    monkeypatch.setattr(router, "get_moe_layer_wise_logging_tracker", lambda: tracker)
    router.reported(layers=2, micro_batches=1)
    assert summed == ["meta"] * 6


def test_a_dense_model_has_no_routers(one_rank: Ranks, deep: str) -> None:
    for key in LOSSES:
        arguments = {"path": deep, "parallel": {}, "model": {"path": deep, key: 0.1}}
        ((kind, said, _),) = one_rank.call("complaint", of="losses", **arguments)
        assert (kind, said.partition(":")[0]) == ("ConfigError", f"model.{key}")


def test_tokens_go_where_they_were_sent(one_rank: Ranks, models: dict[str, str]) -> None:
    """With weights from the trainer's own logits; tokens without a record, and padding, are routed as ever."""
    (found,) = one_rank.call("followed", path=models["mixtral"])
    assert found["right"]
    assert found["weights"] < 1e-6
    assert 0 < found["elsewhere"] <= found["known"]


@pytest.mark.sample(3)
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize(("model", "parallel", "how"), LAYOUTS, ids=NAMES)
def test_recorded_routing_is_the_same_in_every_layout(
    one_rank: Ranks, path: str, parallel: Layout, how: Any, packed: bool
) -> None:
    """Also where layers are computed again in the backward pass, when other micro-batches have gone forward."""
    found = one_rank.spread(parallel).call("replayed", path=path, parallel=parallel, packed=packed, **how)
    expected = one_rank.known("replayed", path=path, parallel={})[0]
    for rank in found:
        assert rank["trained"] == [pytest.approx(step, rel=3e-4) for step in expected["trained"]]
    assert found[0]["logprobs"] == pytest.approx(expected["logprobs"], rel=1e-3)


def test_routing_of_another_model_is_refused(one_rank: Ranks, models: dict[str, str]) -> None:
    layers, experts, twice = one_rank.call("routing_refused", path=models["mixtral"])[0]
    assert "of another model" in layers
    assert "of another model" in experts
    assert "one expert twice" in twice
