"""Precision and memory: what half precision, recompute, sharding and an optimizer on the host change, and what not."""

from __future__ import annotations

from typing import Any

import pytest

from tests.trainer.megatron.layouts import FULL, SEQUENCE, SPREAD, Layout
from tests.trainer.ranks import Ranks


def losses_of(ranks: Ranks, path: str, model: dict[str, Any], **config: Any) -> Any:
    return ranks.known("losses", path=path, parallel={}, model={"path": path} | model, **config)[0]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.02), ("float16", 0.002)])
def test_half_precision_trains_close_to_float32(one_rank: Ranks, deep: str, dtype: str, tolerance: float) -> None:
    exact = losses_of(one_rank, deep, {})
    half = losses_of(one_rank, deep, {"dtype": dtype})
    assert [loss for loss, _ in half] == [pytest.approx(loss, rel=tolerance) for loss, _ in exact]
    assert half != exact


def test_an_overflow_lowers_the_loss_scale_and_moves_nothing_else(one_rank: Ranks, deep: str) -> None:
    steps = one_rank.call("overflow", path=deep, loss_scale=131072.0, steps=8)[0]
    overflowed = [step["overflows"] for step in steps]
    assert overflowed[0] == 1.0
    assert overflowed[-1] == 0.0
    for number, step in enumerate(steps, 1):
        count = sum(overflowed[:number])
        assert step["loss_scale"] == 131072.0 / 2**count
        assert step["updates"] == number - count
        assert step["moved"] == 1.0 - step["overflows"]


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_optimizer_on_the_host_computes_the_same_numbers(two_ranks: Ranks, deep: str, dtype: str) -> None:
    common = {"path": deep, "parallel": {"data": 2}, "model": {"path": deep, "dtype": dtype}}
    optimizer = {"lr": 1e-2, "weight_decay": 0.1}
    here = two_ranks.call("losses", **common, optimizer=optimizer)[0]
    ranks = two_ranks.call("losses", **common, optimizer=optimizer | {"offload": True})
    assert ranks[0] == ranks[1] == [pytest.approx(step, rel=2e-6) for step in here]  # other kernels, other last bits


@pytest.mark.sample(1)
@pytest.mark.parametrize("parallel", [{}, {"tensor": 2}], ids=["alone", "tensor"])
def test_a_head_in_fp32_is_another_and_as_close(one_rank: Ranks, two_ranks: Ranks, deep: str, parallel: Layout) -> None:
    ranks = two_ranks if parallel else one_rank
    how = {"path": deep, "dtype": "bfloat16"}
    rounded, exact = (
        ranks.call("losses", path=deep, parallel=parallel, model=how | head)[0] for head in ({}, {"fp32_head": True})
    )
    full = one_rank.known("losses", path=deep, parallel={})[0]
    assert exact != rounded
    assert exact == [pytest.approx(step, rel=3e-2) for step in full]


@pytest.mark.sample(1)
@pytest.mark.parametrize("model", ["qwen2", "mixtral"])
def test_recompute_keeps_less_and_computes_the_same(one_rank: Ranks, path: str) -> None:
    plain = losses_of(one_rank, path, {})
    kept = {}
    for recompute in ("none", "selective", "full"):
        how = {"path": path, "recompute": recompute}
        kept[recompute] = one_rank.call("footprint", path=path, parallel={}, model=how)[0]["kept"]
        assert losses_of(one_rank, path, how) == plain
    assert kept["full"] < 0.5 * kept["none"]
    assert kept["full"] < kept["selective"] < kept["none"]


@pytest.mark.broad
def test_every_cut_makes_a_rank_hold_less(one_rank: Ranks, two_ranks: Ranks, models: dict[str, str]) -> None:
    def held(model: str, parallel: Layout) -> dict[str, Any]:
        ranks = two_ranks if parallel else one_rank
        found: dict[str, Any] = ranks.call("footprint", path=models[model], parallel=parallel)[-1]
        return found

    whole, mixture = held("qwen2", {}), held("mixtral", {})
    full = held("qwen2", {"data": 2, "shard": "full"})
    assert full["weights"] == pytest.approx(whole["weights"] / 2, rel=0.01)
    spread = held("mixtral", {"data": 2, "expert": 2})
    assert spread["experts"] == mixture["experts"] / 2
    for cut in ({"context": 2}, {"tensor": 2, "sequence": True}):
        part = held("qwen2", cut)
        assert part["length"] == whole["length"] / 2
        assert part["kept"] < 0.7 * whole["kept"]
    interleaved = held("qwen2", {"pipeline": 2, "virtual_pipeline": 2})
    assert interleaved["chunks"] == [2, 4]  # stage 1 of 2 has layers 2 and 4; without interleaving it has 3 and 4


@pytest.mark.parametrize(
    ("model", "config", "key", "says"),
    [
        ("qwen2", {"model": {"dtype": "bfloat16", "fp8": "hybrid"}}, "model.fp8", "GPU"),
        ("mixtral", {"model": {"dtype": "bfloat16", "fp8": "hybrid"}}, "model.fp8", "experts"),
        ("qwen2", {"parallel": FULL, "model": {"dtype": "float16"}}, "parallel.shard", "float16"),
        ("qwen2", {"parallel": FULL, "optimizer": {"offload": True}}, "optimizer.offload", "shard"),
        ("mixtral", {"parallel": SEQUENCE | SPREAD}, "parallel.expert_tensor", "gloo"),
    ],
    ids=["fp8", "fp8-experts", "full-float16", "full-offload", "gloo-and-spread-experts"],
)
def test_what_cannot_be_done_is_refused(
    one_rank: Ranks, path: str, config: dict[str, Any], key: str, says: str
) -> None:
    parallel = config.get("parallel", {})
    config = config | {"parallel": parallel, "model": {"path": path} | config.get("model", {})}
    for kind, message, _ in one_rank.spread(parallel).call("complaint", of="losses", path=path, **config):
        assert (kind, message.partition(":")[0]) == ("ConfigError", key)
        assert says in message
