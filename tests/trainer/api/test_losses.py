"""Each loss and its gradient against float64, by PEFT on transformers' model."""

from __future__ import annotations

import base64
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.trainer.api.server import datum
from tests.trainer.ranks import Ranks

VOCABULARY = 17
Reference = Callable[[Tensor, Tensor, Tensor], Tensor]  # log p, log q, A -> loss by token


def _clip(ratio: Tensor, low: float, high: float) -> Tensor:
    return torch.tensor([min(max(r, low), high) for r in ratio.tolist()], dtype=ratio.dtype)


def _bounded(ratio: Tensor, a: Tensor, low: float, high: float) -> Tensor:
    inside = torch.where(ratio < low, low, torch.where(ratio > high, high, ratio))
    return -torch.where(ratio * a < inside * a, ratio * a, inside * a)


def _ppo(low: float, high: float) -> Reference:
    return lambda p, q, a: _bounded((p - q).exp(), a, low, high)


def _gspo(low: float, high: float) -> Reference:
    """By the paper's equations of GSPO-token: the ratio of the sequence, without a gradient, times p / sg(p)."""

    def loss(p: Tensor, q: Tensor, a: Tensor) -> Tensor:
        marked = torch.tensor(marks(len(p)), dtype=torch.bool)
        ratio = torch.prod((p.exp() / q.exp())[marked]).pow(1 / int(marked.sum())).detach() * p.exp() / p.exp().detach()
        return _bounded(ratio, a, low, high)

    return loss


CASES: list[tuple[str, dict[str, float], Reference]] = [
    ("cross_entropy", {}, lambda p, q, a: -a * p),
    ("importance_sampling", {}, lambda p, q, a: -a * p.exp() / q.exp()),
    ("ppo", {}, _ppo(0.8, 1.2)),
    ("ppo", {"clip_low_threshold": 0.5, "clip_high_threshold": 1.05}, _ppo(0.5, 1.05)),
    ("cispo", {}, lambda p, q, a: -_clip((p - q).exp(), 0.0, 4.0) * a * p),
    ("dro", {"beta": 0.3}, lambda p, q, a: 0.15 * (p - q) ** 2 - a * p),
    ("gspo", {}, _gspo(0.9997, 1.0004)),
    ("gspo", {"clip_low_threshold": 0.2, "clip_high_threshold": 3.0}, _gspo(0.2, 3.0)),
]


def body(loss: str, options: dict[str, float], data: list[types.Datum]) -> str:
    """As the SDK sends it."""
    given = types.ForwardBackwardInput(data=data, loss_fn=loss, loss_fn_config=options or None)  # type: ignore[arg-type]
    request = types.ForwardBackwardRequest(forward_backward_input=given, model_id="m", seq_id=1)
    return base64.b64encode(forward_backward_request_to_proto(request).SerializeToString()).decode()


def numbers(seed: int) -> list[tuple[list[int], list[float], list[float]]]:
    """(tokens, the sampler's log-probs, advantages) of sequences of several lengths. The log-probs are such that ratios
    are on both sides of every threshold."""
    draw = random.Random(seed)
    found = []
    for length in (2, 9, 5, 9, 3):
        tokens = [draw.randrange(VOCABULARY) for _ in range(length)]
        found.append((tokens, [draw.uniform(-5, -0.5) for _ in tokens[1:]], [draw.uniform(-1, 1) for _ in tokens[1:]]))
    return found


def marks(length: int) -> list[float]:
    """The tokens that count for the ratio of a sequence: all but its first, where there are more."""
    return [float(place > 0 or length == 1) for place in range(length)]


def data_for(loss: str, seed: int) -> list[types.Datum]:
    found = []
    for tokens, q, a in numbers(seed):
        inputs = {"weights": a} if loss == "cross_entropy" else {"logprobs": q, "advantages": a}
        mask = {"sequence_ratio_mask": marks(len(a))} if loss == "gspo" else {}
        found.append(datum(tokens, **inputs, **mask))
    return found


@pytest.mark.parametrize("micro_tokens", [8192, 16], ids=["at-once", "in-parts"])
def test_losses_and_gradients_are_those_of_float64(
    one_rank: Ranks, small_models: dict[str, str], tmp_path: Path, micro_tokens: int
) -> None:
    path = small_models["qwen3"]
    batches = [body(loss, options, data_for(loss, 3)) for loss, options, _ in CASES]
    warm = body("cross_entropy", {}, data_for("cross_entropy", 1))
    said = one_rank.call(
        "tenant_losses", path=path, directory=str(tmp_path), warm=warm, batches=batches, micro_tokens=micro_tokens
    )[0]
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    model = peft.PeftModel.from_pretrained(base, str(tmp_path), is_trainable=True).double()
    for number, (_, _, reference) in enumerate(CASES):
        model.zero_grad()
        total, right = torch.zeros((), dtype=torch.float64), 0
        for (tokens, q, a), row in zip(numbers(3), said[number]["logprobs"], strict=True):
            logits = model(torch.tensor([tokens[:-1]])).logits[0]
            right += int((logits.argmax(-1) == torch.tensor(tokens[1:])).sum())
            p = logits.log_softmax(-1).gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0]
            assert torch.allclose(torch.tensor(row, dtype=torch.float64), p, atol=1e-5)
            total = total + reference(p, torch.tensor(q).double(), torch.tensor(a).double()).sum()
        total.backward()
        assert said[number]["metrics"]["loss:sum"] == pytest.approx(total.item(), rel=1e-4), CASES[number][0]
        if CASES[number][0] == "cross_entropy":
            assert said[number]["metrics"]["correct_tokens:sum"] == right
        found = load_file(tmp_path / f"gradient-{number}.st")
        named = [(n.replace(".default", ""), p) for n, p in model.named_parameters() if p.requires_grad]
        expected = {name: p.grad for name, p in named}
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            assert gradient.abs().max() > 0
            close = torch.allclose(found[name].double(), gradient, rtol=1e-3, atol=1e-4 * gradient.abs().max().item())
            assert close, (CASES[number][0], name)


def test_gradients_add_up_and_nothing_else_counts(one_rank: Ranks, small_models: dict[str, str]) -> None:
    batch = body("cross_entropy", {}, data_for("cross_entropy", 1))
    norms: dict[str, Any] = one_rank.call("accumulated", path=small_models["qwen2"], body=batch)[0]
    assert norms["once"] > 0
    assert norms["twice"] == pytest.approx(2 * norms["once"], rel=1e-6)
    assert norms["refused"] == norms["forward"] == norms["twice"]


@pytest.mark.parametrize(("dtype", "rounding"), [("float32", 0.0), ("bfloat16", 4e-3)])
def test_steps_are_those_of_adamw(
    one_rank: Ranks, small_models: dict[str, str], tmp_path: Path, dtype: str, rounding: float
) -> None:
    """On fp32 weights, of which a model in bfloat16 computes with the rounded ones."""
    batch = body("cross_entropy", {}, data_for("cross_entropy", 1))
    arguments = {"path": small_models["llama"], "dtype": dtype, "file": str(tmp_path / "state")}
    found: dict[str, float] = one_rank.call("stepped", body=batch, **arguments)[0]
    assert found["moved"] > 1e-3
    assert found["difference"] < 1e-6
    assert found["rounding"] <= rounding
    assert (found["rounding"] > 0) == (rounding > 0)
