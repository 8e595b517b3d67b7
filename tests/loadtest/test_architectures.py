"""The matrix of architectures: its page is what the command makes of its file, and a sample of it is tried again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadtest.architectures.report import JSON, PAGE, page
from loadtest.architectures.trial import forked, registered, warm

# Cheap ones, for each mechanism: tied heads, state spaces, experts, absorbed attention, encoders, sound, pooling.
SAMPLE = [
    "LlamaForCausalLM", "JambaForSequenceClassification", "BertForMaskedLM", "BloomForCausalLM",
    "DeepseekV3ForCausalLM", "FalconH1ForCausalLM", "Gemma2ForCausalLM", "Gemma3nForCausalLM",
    "GlmAsrForConditionalGeneration", "GptOssForCausalLM", "GPT2LMHeadModel", "GteModel", "Lfm2MoeForCausalLM",
    "Mamba2ForCausalLM", "MiniCPM3ForCausalLM", "MixtralForCausalLM", "ModernBertModel", "NemotronHForCausalLM",
    "OPTForCausalLM", "OlmoeForCausalLM", "PaliGemmaForConditionalGeneration", "PhiForCausalLM",
    "PhiMoEForCausalLM", "Qwen2ForRewardModel", "Qwen3NextForCausalLM", "SiglipModel",
    "TransformersMoEForCausalLM", "WhisperForConditionalGeneration", "XLMRobertaForTokenClassification",
    "Zamba2ForCausalLM",
]  # fmt: skip


def test_the_page_is_made_of_the_file() -> None:
    found = json.loads(JSON.read_text())
    assert page(PAGE.read_text(), found) == PAGE.read_text()
    assert {trial["outcome"] for trial in found["trials"]} == {"proven", "not started", "no checkpoint"}


@pytest.mark.engine
def test_the_file_has_every_architecture() -> None:
    assert [trial["architecture"] for trial in json.loads(JSON.read_text())["trials"]] == registered()


@pytest.mark.engine
@pytest.mark.sample(2)
@pytest.mark.parametrize("architecture", SAMPLE)
def test_a_swapped_model_is_the_one_that_stock_vllm_loads(architecture: str, tmp_path: Path) -> None:
    warm()
    trial = forked(architecture, tmp_path / "log")
    assert trial.outcome == "proven", f"{trial.reason}\n{(tmp_path / 'log').read_text()}"
