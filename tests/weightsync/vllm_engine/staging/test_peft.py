"""Adapters that PEFT makes, published as they are: what an instance builds of each has PEFT's effect, or is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.weightsync.codes import refused
from weightsync import Adapter, Publisher
from weightsync.vllm_engine.staging.bundle import PartOrder
from weightsync.vllm_engine.staging.lora import LoraHost

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
QV = ["q_proj", "v_proj"]
ALL = [*QV, "k_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SERVED = {
    "plain": {"target_modules": QV},
    "all linear layers": {"target_modules": "all-linear", "lora_dropout": 0.1},
    "another alpha": {"target_modules": set(ALL), "lora_alpha": 5},
    "rsLoRA": {"target_modules": ALL, "use_rslora": True, "lora_alpha": 7},
    "ranks by pattern": {"target_modules": ALL, "rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\..*": 8}},
    "alphas by pattern": {"target_modules": QV, "alpha_pattern": {"v_proj": 31}},
    "some layers": {"target_modules": QV, "layers_to_transform": [1]},
    "by expression": {"target_modules": r".*layers\.0\.self_attn\.(q|o)_proj"},
    "embedding": {"target_modules": [*QV, "embed_tokens"]},
    "head": {"target_modules": [*QV, "lm_head"]},
    "embedding and head": {"target_modules": ["embed_tokens", "lm_head"], "lora_alpha": 3},
    "gaussian": {"target_modules": QV, "init_lora_weights": "gaussian"},
}
REFUSED = {
    "DoRA": ({"use_dora": True}, "adapter_refused", "does not yet support DoRA"),
    "a layer in full": (
        {"modules_to_save": ["lm_head"]},
        "adapter_refused",
        r"Unsupported modules_to_save: .'lm_head'.",
    ),
    "biases": ({"bias": "all"}, "adapter_refused", "bias"),
    "biases of the adapter": ({"lora_bias": True}, "adapter_refused", "LoRA bias"),
    "tokens": ({"trainable_token_indices": [3]}, "unexpected_tensor", "train the adapter without it"),
    "PiSSA": ({"init_lora_weights": "pissa"}, "adapter_refused", "does not support init_lora_weights='pissa'"),
    "layers repeated": ({"layer_replication": [[0, 2], [1, 2]]}, "adapter_refused", "layer_replication"),
}


def base() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM  # seconds, for these tests alone

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, tie_word_embeddings=False, **sizes)).eval()


def with_adapters(*variants: dict[str, Any]) -> Any:
    """Of PEFT; the adapters `default`, `second` and so on, none of which is as it began."""
    from peft import LoraConfig, get_peft_model

    names = ("default", "second")
    configs = [LoraConfig(**({"r": 4, "target_modules": QV, "task_type": "CAUSAL_LM"} | more)) for more in variants]
    model = get_peft_model(base(), configs[0])
    for name, config in list(zip(names, configs, strict=False))[1:]:
        model.add_adapter(name, config)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3
    return model.eval()


@pytest.fixture
def host() -> LoraHost:
    """The adapters of a worker that has the layers of `base`."""
    from vllm.config.lora import LoRAConfig

    model = base()
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)}
    sizes = {n: {"input_size": layer.in_features, "output_size": layer.out_features} for n, layer in layers.items()}
    sizes["model.embed_tokens"] = {"org_vocab_size": 32, "embedding_dim": 16}
    manager = SimpleNamespace(
        model=SimpleNamespace(),
        modules={name: SimpleNamespace(base_layer=SimpleNamespace(**size)) for name, size in sizes.items()},
        packed_modules={},
        _validate_moe_lora_format=lambda _: None,
        _create_merged_loras_inplace=lambda _: None,
    )
    config = LoRAConfig(max_lora_rank=16, lora_dtype=torch.float32)
    worker = SimpleNamespace(_adapter_manager=manager, lora_config=config, vocab_size=32, _load_adapter=None)
    return LoraHost(SimpleNamespace(lora_manager=worker))


def built(publisher: Publisher, host: LoraHost, adapter: Adapter) -> dict[str, Any]:
    """By layer, what an instance makes of the adapter as it was published."""
    publisher.publish(base().state_dict(), parts={"lora/x": adapter}, activate=False)
    (part,) = publisher.versions()[-1].parts
    generation, _ = host.build(PartOrder("lora/x", part.version, str(Path(part.slot)), part.manifest_digest, 1))
    return dict(generation.model.loras)


@torch.no_grad()
def logits(loras: dict[str, Any]) -> torch.Tensor:
    """Of the base model with the matrices of an instance added to its weights."""
    model = base()
    for name, lora in loras.items():
        change = lora.lora_b @ lora.lora_a * lora.scaling
        model.get_submodule(name).weight += change.T if name == "model.embed_tokens" else change
    return model(IDS).logits


@pytest.mark.parametrize("variant", SERVED)
@torch.no_grad()
def test_its_effect_is_that_of_peft(publisher: Publisher, host: LoraHost, variant: str) -> None:
    model = with_adapters(SERVED[variant])
    found, expected = logits(built(publisher, host, Adapter.from_peft(model))), model(IDS).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(found, base()(IDS).logits, atol=1e-2), "an adapter without an effect shows nothing"


@torch.no_grad()
def test_one_of_several_is_taken_by_its_name(publisher: Publisher, host: LoraHost) -> None:
    model = with_adapters(SERVED["plain"], SERVED["rsLoRA"])
    for name in ("default", "second"):
        model.set_adapter(name)
        found = logits(built(publisher, host, Adapter.from_peft(model, name)))
        torch.testing.assert_close(found, model(IDS).logits, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_one_that_was_compiled(publisher: Publisher, host: LoraHost) -> None:
    model = with_adapters(SERVED["plain"])
    found = logits(built(publisher, host, Adapter.from_peft(torch.compile(model))))
    torch.testing.assert_close(found, model(IDS).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("variant", REFUSED)
def test_what_no_engine_runs_is_refused_with_a_sentence(publisher: Publisher, host: LoraHost, variant: str) -> None:
    config, code, said = REFUSED[variant]
    with refused(code, match=said):
        built(publisher, host, Adapter.from_peft(with_adapters(config)))


@pytest.mark.parametrize("kind", ["LoHaConfig", "VeraConfig", "IA3Config"])
def test_what_is_no_lora_is_refused_before_it_is_published(kind: str) -> None:
    import peft

    more = {"feedforward_modules": []} if kind == "IA3Config" else {}
    model = peft.get_peft_model(base(), getattr(peft, kind)(target_modules=QV, task_type="CAUSAL_LM", **more))
    with refused("bad_part", match=r"is of the kind .*: make it with peft.LoraConfig"):
        Adapter.from_peft(model)
