"""An adapter is trained alike in every parallel layout, over frozen weights that take no memory for training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.trainer.batches import random_batch
from tests.trainer.megatron.test_conversion import CUT_FOUR, CUT_TWO, SPREAD, named
from tests.trainer.megatron.test_lora_peft import LORA, expected
from tests.trainer.ranks import Ranks
from trainer.batch import TOKENS
from trainer.config import ParallelConfig

HARD = {"optimizer": {"lr": 3e-2}, "micro_batch": 2}
TWO: list[tuple[str, dict[str, Any]]] = [
    ("qwen2", {"tensor": 2}),
    ("qwen2", {"pipeline": 2}),
    ("llama-tied", {"pipeline": 2}),
    ("qwen2", {"data": 2}),
    *CUT_TWO,
]
DENSE = [{"tensor": 2}, {"tensor": 2, "sequence": True}, {"pipeline": 2}, {"context": 2}, {"data": 2, "shard": "full"}]
ONLY: list[tuple[str, dict[str, Any], list[str]]] = [
    ("qwen3_moe", SPREAD, ["q_proj", "o_proj"]),
    ("qwen3_moe", SPREAD, ["gate_proj", "down_proj"]),
    ("mixtral", {"tensor": 2, "sequence": True}, ["up_proj"]),
    ("qwen2", {"tensor": 2, "sequence": True}, ["v_proj", "down_proj"]),
]


def alone(one_rank: Ranks, path: str, lora: dict[str, Any] = LORA) -> list[list[float]]:
    """What one rank computes."""
    losses: list[list[float]] = one_rank.known("losses", path=path, parallel={}, lora=lora, **HARD)[0]
    assert losses[-1] != losses[0]
    return losses


@pytest.mark.sample(5)
@pytest.mark.parametrize(("model", "parallel"), TWO, ids=named(TWO))
def test_two_ranks_train_an_adapter_alike(
    one_rank: Ranks, two_ranks: Ranks, models: dict[str, str], model: str, parallel: dict[str, Any]
) -> None:
    ranks = two_ranks.call("losses", path=models[model], parallel=parallel, lora=LORA, **HARD)
    assert ranks[0] == ranks[1]
    assert ranks[0] == [pytest.approx(step, rel=5e-4) for step in alone(one_rank, models[model])]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("model", "parallel"), CUT_FOUR, ids=named(CUT_FOUR))
def test_four_ranks_train_an_adapter_alike(
    one_rank: Ranks, four_ranks: Ranks, models: dict[str, str], model: str, parallel: dict[str, Any]
) -> None:
    ranks = four_ranks.call("losses", path=models[model], parallel=parallel, lora=LORA, **HARD)
    assert all(rank == ranks[0] for rank in ranks)
    assert ranks[0] == [pytest.approx(step, rel=5e-4) for step in alone(one_rank, models[model])]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("model", "parallel"), [TWO[0], CUT_TWO[1], CUT_TWO[5]], ids=named([TWO[0], *CUT_TWO[1:6:4]]))
def test_ranks_that_hold_the_same_matrix_keep_it_the_same(
    two_ranks: Ranks, models: dict[str, str], model: str, parallel: dict[str, Any]
) -> None:
    """With dropout, too: where all have the same input, they drop the same of it."""
    first, second = two_ranks.call("replicas", path=models[model], parallel=parallel, lora=LORA | {"dropout": 0.4})
    assert first == second
    assert any(number for name, matrix in first.items() if name.endswith(".B") for number in matrix)


@pytest.mark.sample(2)
@pytest.mark.parametrize(("model", "parallel", "targets"), ONLY)
def test_any_choice_of_layers_is_trained_alike(
    one_rank: Ranks, two_ranks: Ranks, models: dict[str, str], model: str, parallel: dict[str, Any], targets: list[str]
) -> None:
    lora = LORA | {"target_modules": targets}
    ranks = two_ranks.call("losses", path=models[model], parallel=parallel, lora=lora, **HARD)
    assert ranks[0] == [pytest.approx(step, rel=5e-4) for step in alone(one_rank, models[model], lora)]


@pytest.mark.sample(2)
@pytest.mark.parametrize("parallel", DENSE, ids=lambda layout: "-".join(layout))
def test_algorithms_and_packed_rows_are_the_same_in_every_layout(
    one_rank: Ranks, two_ranks: Ranks, models: dict[str, str], parallel: dict[str, Any]
) -> None:
    """GRPO with a KL term to the base, PPO whose critic has adapters of its own, and sequences end to end."""
    path, lora = models["qwen2"], LORA
    grpo = one_rank.known("grpo", path=path, parallel={}, lora=lora)[0]
    ranks = two_ranks.call("grpo", path=path, parallel=parallel, lora=lora)
    assert ranks[0] == [pytest.approx(step, rel=1e-3, abs=1e-6) for step in grpo]
    assert grpo[0]["kl"] < grpo[-1]["kl"]
    ppo = one_rank.known("ppo", path=path, parallel={}, lora=lora)[0]
    ranks = two_ranks.call("ppo", path=path, parallel=parallel, lora=lora)
    for mine, serial in zip(ranks[0], ppo, strict=True):
        # A value that lies on the bound counts as clipped or not, by its last bit; three tokens may.
        assert mine.pop("value_clip_ratio") == pytest.approx(serial.pop("value_clip_ratio"), abs=3 / serial["tokens"])
        assert mine == pytest.approx(serial, rel=1e-3, abs=1e-6)
    assert ppo[1]["value_mean"] != 0.0
    unpacked = one_rank.known("packed", path=path, parallel={}, rows=True, lora=lora)[0]
    ranks = two_ranks.call("packed", path=path, parallel=parallel, rows=False, lora=lora)
    assert ranks[0] == [pytest.approx(step, rel=5e-4) for step in unpacked]


@pytest.mark.sample(2)
@pytest.mark.parametrize("parallel", DENSE, ids=lambda layout: "-".join(layout))
def test_every_layout_saves_peft_s_adapter_and_merges_it(
    two_ranks: Ranks, models: dict[str, str], tmp_path: Path, parallel: dict[str, Any]
) -> None:
    """Each rank's share of the adapter, of its gradients, and of the merged model is where it belongs."""
    path, arguments = models["qwen2"], {"lora": LORA, "directory": str(tmp_path)}
    ranks = two_ranks.call("adapted", path=path, parallel=parallel, **arguments)
    logits, loss, gradients = expected(path, tmp_path)
    assert torch.allclose(load_file(tmp_path / "logits.st")["logits"], logits, atol=1e-4)
    assert ranks[0][0] == pytest.approx(loss, rel=1e-5)
    norm = sum(g.square().sum().item() for g in gradients.values()) ** 0.5
    assert ranks[0][1] == pytest.approx(norm, rel=1e-4)
    assert torch.allclose(merged_logits(tmp_path), logits, atol=1e-4)
    if "context" not in parallel:  # there each rank keeps a part of the sums over both
        found = {n: t for file in tmp_path.glob("gradients-*.st") for n, t in load_file(file).items()}
        assert found.keys() == gradients.keys()
        for name, gradient in gradients.items():
            assert torch.allclose(found[name], gradient, rtol=1e-3, atol=1e-5 * gradient.abs().max().item()), name


@pytest.mark.sample(1)
@pytest.mark.parametrize(("model", "parallel"), [("mixtral", {}), ("qwen3_moe", SPREAD), ("mixtral", CUT_TWO[5][1])])
def test_an_adapter_over_experts_merges_into_them(
    one_rank: Ranks, models: dict[str, str], tmp_path: Path, model: str, parallel: dict[str, Any]
) -> None:
    """transformers keeps experts fused, which PEFT's per-expert names do not reach: the merged model is the judge."""
    ranks = one_rank.sharing(ParallelConfig(**parallel).world_size)
    ranks.call("adapted", path=models[model], parallel=parallel, lora=LORA, directory=str(tmp_path))
    assert torch.allclose(load_file(tmp_path / "logits.st")["logits"], merged_logits(tmp_path), atol=1e-4)
    names = load_file(tmp_path / "adapter_model.safetensors").keys()
    last = "experts.3.w2" if model == "mixtral" else "experts.3.down_proj"
    assert any(name.endswith(f"{last}.lora_B.weight") for name in names)


def merged_logits(directory: Path) -> torch.Tensor:
    merged = AutoModelForCausalLM.from_pretrained(directory / "merged", dtype=torch.float32).eval()
    with torch.no_grad():
        return merged(random_batch(17, seed=2)[TOKENS][:, :-1]).logits
