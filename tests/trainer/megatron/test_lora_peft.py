"""An adapter that is trained here is PEFT's: the same logits, the same gradients, and it can be merged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.trainer.batches import random_batch
from tests.trainer.ranks import Ranks
from trainer.batch import MASK, TOKENS

LORA: dict[str, Any] = {"rank": 4, "alpha": 6.0}
SOME: dict[str, Any] = LORA | {"target_modules": ["q_proj", "v_proj", "up_proj"]}


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


@pytest.mark.sample(3)
@pytest.mark.parametrize("lora", [LORA, SOME], ids=["all", "some"])
@pytest.mark.parametrize("model", ["llama", "qwen2-tied", "qwen3"])
def test_peft_computes_the_same_with_the_saved_adapter(
    one_rank: Ranks, small_models: dict[str, str], tmp_path: Path, model: str, lora: dict[str, Any]
) -> None:
    path = small_models[model]
    loss, norm = one_rank.call("adapted", path=path, parallel={}, lora=lora, directory=str(tmp_path))[0]
    logits, peft_loss, gradients = expected(path, tmp_path)
    assert torch.allclose(load_file(tmp_path / "logits.st")["logits"], logits, atol=1e-4)
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    assert not torch.allclose(base(random_batch(17, seed=2)[TOKENS][:, :-1]).logits, logits, atol=1e-2)
    assert loss == pytest.approx(peft_loss, rel=1e-5)
    found = load_file(tmp_path / "gradients-0.st")
    assert found.keys() == gradients.keys() == load_file(tmp_path / "adapter_model.safetensors").keys()
    for name, gradient in gradients.items():
        assert torch.allclose(found[name], gradient, rtol=1e-3, atol=1e-5 * gradient.abs().max().item()), name
        assert gradient.abs().max() > 0
    assert norm == pytest.approx(sum(g.square().sum().item() for g in gradients.values()) ** 0.5, rel=1e-4)


@pytest.mark.sample(1)
@pytest.mark.parametrize("model", ["qwen2", "llama-tied"])
def test_the_merged_model_is_the_base_with_the_adapter(
    one_rank: Ranks, small_models: dict[str, str], tmp_path: Path, model: str
) -> None:
    one_rank.call("adapted", path=small_models[model], parallel={}, lora=LORA, directory=str(tmp_path))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    with torch.no_grad():
        logits = merged(random_batch(17, seed=2)[TOKENS][:, :-1]).logits
    assert torch.allclose(load_file(tmp_path / "logits.st")["logits"], logits, atol=1e-4)
