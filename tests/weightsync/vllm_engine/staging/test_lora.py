"""What vLLM's kernels for adapters on CPUs compute in a worker of ours."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weightsync.vllm_engine.staging.lora import mend_kernels

IN, OUT, RANK = 16, 32, 4
DOWN, UP = torch.randn(2, 1, RANK, IN), torch.randn(2, 1, OUT, RANK)  # of two adapters: all places are taken


@pytest.fixture
def mended(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Mends vLLM's kernels for the time of a test."""
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    wrapper = punica_cpu.PunicaWrapperCPU
    for owner, name in ((lora_ops, "bgmv_shrink"), (punica_cpu, "bgmv_shrink"), (wrapper, "add_lora_logits")):
        plain = getattr(getattr(owner, name), "__wrapped__", getattr(owner, name))
        monkeypatch.setattr(owner, name, plain)
    return lambda: mend_kernels(SimpleNamespace(lora_config=object(), device=torch.device("cpu")))


def wrapper_of(sequences: tuple[int, ...], *, prefill: bool = True) -> Any:
    """vLLM's own, for tokens of adapters 1 and 2, or of none (0)."""
    from vllm.lora.layers.utils import LoRAMapping
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    wrapper = PunicaWrapperCPU(64, 8, "cpu")
    wrapper.update_metadata(LoRAMapping(sequences, sequences, prefill), [1, 2], 2, OUT)
    return wrapper


@pytest.mark.parametrize("prefill", [True, False])
def test_a_token_of_the_base_model_gets_nothing_of_an_adapter_beside_it(mended: Any, prefill: bool) -> None:
    tokens = torch.randn(2, IN)

    def answered() -> torch.Tensor:
        found = torch.zeros(2, OUT)
        wrapper_of((1, 0), prefill=prefill).add_lora_linear(found, tokens, (DOWN,), (UP,), 1.0, (OUT,))
        return found

    assert answered()[1].any(), "vLLM's kernels know of no adapter now: nothing is to be mended any more"
    mended()
    found = answered()
    torch.testing.assert_close(found[0], UP[0, 0] @ (DOWN[0, 0] @ tokens[0]), rtol=1e-4, atol=1e-4)
    assert not found[1].any()


def test_prompts_have_log_probs_where_adapters_reach_the_head(mended: Any) -> None:
    """Two sequences get a token, and a prompt of five tokens its log-probs, which ended the engine."""
    wrapper = wrapper_of((1, 2))
    prompt, sequences = torch.randn(5, IN), torch.randn(2, IN)
    with pytest.raises(RuntimeError, match="does not broadcast"):
        wrapper.add_lora_logits(torch.zeros(5, OUT), prompt, DOWN, UP, 1.0)
    mended()
    logits = torch.zeros(5, OUT)
    wrapper.add_lora_logits(logits, prompt, DOWN, UP, 1.0)
    assert not logits.any()
    logits = torch.zeros(2, OUT)
    wrapper.add_lora_logits(logits, sequences, DOWN, UP, 1.0)
    expected = torch.stack([UP[i, 0] @ (DOWN[i, 0] @ sequences[i]) for i in range(2)])
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
