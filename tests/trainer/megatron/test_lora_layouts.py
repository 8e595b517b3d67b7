"""An adapter that is trained here is PEFT's: the same logits, the same gradients, and it can be merged; and training is
alike in every parallel layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.trainer.batches import random_batch
from tests.trainer.megatron.layouts import CUT_FOUR, CUT_TWO, FULL, SEQUENCE, SPREAD, TWO, Layout, alike, named
from tests.trainer.ranks import Ranks
from trainer.batch import MASK, TOKENS

LORA: dict[str, Any] = {"rank": 4, "alpha": 6.0}
SOME: dict[str, Any] = LORA | {"target_modules": ["q_proj", "v_proj", "up_proj"]}
HARD: dict[str, Any] = {"optimizer": {"lr": 3e-2}, "micro_batch": 2}
DENSE = [{"tensor": 2}, SEQUENCE, {"pipeline": 2}, {"context": 2}, FULL]
CASES: list[tuple[str, Layout, dict[str, Any]]] = [
    *((model, layout, dict[str, Any]()) for model, layout in (*TWO, *CUT_FOUR)),
    ("qwen3_moe", SPREAD, {"target_modules": ["q_proj", "o_proj"]}),
    ("mixtral", SEQUENCE, {"target_modules": ["up_proj"]}),
    ("qwen2", SEQUENCE, {"target_modules": ["v_proj", "down_proj"]}),
    ("qwen3_moe", SPREAD, {"target_modules": ["gate_proj", "down_proj"]}),
]


@pytest.mark.sample(8)
@pytest.mark.parametrize(("model", "parallel", "some"), CASES, ids=named([case[:2] for case in CASES]))
def test_an_adapter_is_trained_alike(one_rank: Ranks, path: str, parallel: Layout, some: dict[str, Any]) -> None:
    """Over all layers, and over a choice of them."""
    alone = alike(one_rank, "losses", path, parallel, rel=5e-4, lora=LORA | some, **HARD)
    assert alone[-1] != alone[0]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("model", "parallel"), [TWO[0], CUT_TWO[1], CUT_TWO[5]], ids=named([TWO[0], *CUT_TWO[1:6:4]]))
def test_ranks_that_hold_the_same_matrix_keep_it_the_same(two_ranks: Ranks, path: str, parallel: Layout) -> None:
    """With dropout, too: where all have the same input, they drop the same of it."""
    first, second = two_ranks.call("replicas", path=path, parallel=parallel, lora=LORA | {"dropout": 0.4})
    assert first == second
    assert any(number for name, matrix in first.items() if name.endswith(".B") for number in matrix)


@pytest.mark.sample(2)
@pytest.mark.parametrize("parallel", DENSE, ids=lambda layout: "-".join(layout))
def test_algorithms_and_packed_rows_are_the_same_in_every_layout(one_rank: Ranks, deep: str, parallel: Layout) -> None:
    """GRPO with a KL term to the base, PPO whose critic has adapters of its own, and sequences end to end."""
    grpo = alike(one_rank, "grpo", deep, parallel, rel=1e-3, lora=LORA)
    assert grpo[0]["kl"] < grpo[-1]["kl"]
    ppo = alike(one_rank, "ppo", deep, parallel, rel=1e-3, lora=LORA)
    assert ppo[1]["value_mean"] != 0.0
    alike(one_rank, "packed", deep, parallel, rel=5e-4, rows=True, cut={"rows": False}, lora=LORA)


def expected(path: str, adapter: Path) -> tuple[torch.Tensor, float, dict[str, torch.Tensor]]:
    """PEFT's logits for the batch, its loss, and the gradients of A and B by the names in the adapter's file."""
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, str(adapter), is_trainable=True)
    batch = random_batch(17, seed=2)
    logits = model(batch[TOKENS][:, :-1]).logits
    chosen = logits.log_softmax(-1).gather(-1, batch[TOKENS][:, 1:, None])[..., 0]
    loss = -(chosen * batch[MASK]).sum() / batch[MASK].sum()
    loss.backward()
    trained = {n.replace(".default", ""): p.grad for n, p in model.named_parameters() if p.requires_grad}
    return logits.detach(), loss.item(), trained


SAVED = [(model, {}, lora) for lora in (LORA, SOME) for model in ("llama", "qwen2-tied", "qwen3")]
SAVED += [("qwen2", layout, LORA) for layout in DENSE]


@pytest.mark.sample(5)
@pytest.mark.parametrize(("model", "parallel", "lora"), SAVED)
def test_peft_computes_the_same_with_the_saved_adapter(
    one_rank: Ranks, every_model: dict[str, str], tmp_path: Path, model: str, parallel: Layout, lora: Any
) -> None:
    """Each rank's share of the adapter, of its gradients, and of the merged model is where it belongs."""
    path = every_model[model]
    ranks = one_rank.spread(parallel).call("adapted", path=path, parallel=parallel, lora=lora, directory=str(tmp_path))
    logits, loss, gradients = expected(path, tmp_path)
    assert torch.allclose(load_file(tmp_path / "logits.st")["logits"], logits, atol=1e-4)
    assert torch.allclose(logits_of(tmp_path / "merged"), logits, atol=1e-4)
    assert not torch.allclose(logits_of(Path(path)), logits, atol=1e-2)
    norm = sum(g.square().sum().item() for g in gradients.values()) ** 0.5
    assert ranks[0] == [pytest.approx(loss, rel=1e-5), pytest.approx(norm, rel=1e-4)]
    assert gradients.keys() == load_file(tmp_path / "adapter_model.safetensors").keys()
    assert all(gradient.abs().max() > 0 for gradient in gradients.values())
    if "context" not in parallel:  # there each rank keeps a part of the sums over both
        found = {n: t for file in tmp_path.glob("gradients-*.st") for n, t in load_file(file).items()}
        assert found.keys() == gradients.keys()
        for name, gradient in gradients.items():
            assert torch.allclose(found[name], gradient, rtol=1e-3, atol=1e-5 * gradient.abs().max().item()), name


@pytest.mark.sample(1)
@pytest.mark.parametrize(("model", "parallel"), [("mixtral", {}), ("qwen3_moe", SPREAD), ("mixtral", CUT_TWO[5][1])])
def test_an_adapter_over_experts_merges_into_them(
    one_rank: Ranks, models: dict[str, str], tmp_path: Path, model: str, parallel: Layout
) -> None:
    """transformers keeps experts fused, which PEFT's per-expert names do not reach: the merged model is the judge."""
    one_rank.spread(parallel).call("adapted", path=models[model], parallel=parallel, lora=LORA, directory=str(tmp_path))
    assert torch.allclose(load_file(tmp_path / "logits.st")["logits"], logits_of(tmp_path / "merged"), atol=1e-4)
    names = load_file(tmp_path / "adapter_model.safetensors").keys()
    last = "experts.3.w2" if model == "mixtral" else "experts.3.down_proj"
    assert any(name.endswith(f"{last}.lora_B.weight") for name in names)


def logits_of(directory: Path) -> torch.Tensor:
    """By transformers."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(random_batch(17, seed=2)[TOKENS][:, :-1]).logits
