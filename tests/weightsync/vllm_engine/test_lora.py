"""What vLLM's kernels for adapters do in a worker of ours, with vLLM's own wrapper."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from weightsync.vllm_engine.lora import spare_prompts

HIDDEN, VOCABULARY, RANK = 16, 32, 4


def test_prompts_have_log_probs_where_adapters_reach_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sequences get a token, and a prompt of five tokens its log-probs, which ended the engine."""
    from vllm.lora.layers.utils import LoRAMapping
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    monkeypatch.setattr(PunicaWrapperCPU, "add_lora_logits", PunicaWrapperCPU.add_lora_logits)  # put back at the end
    wrapper = PunicaWrapperCPU(64, 8, "cpu")
    wrapper.update_metadata(LoRAMapping((1, 2), (1, 2)), [1, 2], 2, VOCABULARY)
    down, up = torch.randn(2, 1, RANK, HIDDEN), torch.randn(2, 1, VOCABULARY, RANK)
    sequences, prompt = torch.randn(2, HIDDEN), torch.randn(5, HIDDEN)
    with pytest.raises(RuntimeError, match="does not broadcast"):
        wrapper.add_lora_logits(torch.zeros(5, VOCABULARY), prompt, down, up, 1.0)
    spare_prompts(SimpleNamespace(lora_config=object(), device=torch.device("cpu")))
    logits = torch.zeros(5, VOCABULARY)
    wrapper.add_lora_logits(logits, prompt, down, up, 1.0)
    assert not logits.any()
    logits = torch.zeros(2, VOCABULARY)
    wrapper.add_lora_logits(logits, sequences, down, up, 1.0)
    expected = torch.stack([up[i, 0] @ (down[i, 0] @ sequences[i]) for i in range(2)])
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
