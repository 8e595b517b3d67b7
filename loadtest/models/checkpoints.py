"""Small checkpoints with a real Hugging Face layout (config, tokenizer, safetensors), made here, not downloaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SPECIAL = ["<pad>", "<eos>"]
BENCH_SHAPE = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 26,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
"""About 0.4 B parameters, 0.8 GB in bf16: the size the swap benchmark is quoted for."""

TINY_SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}


def make_checkpoint(
    path: Path, *, family: str = "qwen2", dtype: str = "bfloat16", seed: int = 0, scale: float = 1.0, **shape: Any
) -> Path:
    """Write a randomly initialised checkpoint of `family` ("qwen2", "qwen3", "llama") into `path` and return it.

    `scale` multiplies every matrix, so that two seeds answer differently and greedy decoding does not fall into a
    fixed point at once. `shape` overrides TINY_SHAPE.
    """
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

    classes = {"qwen2": Qwen2Config, "qwen3": Qwen3Config, "llama": LlamaConfig}
    config = classes[family](**{**TINY_SHAPE, **shape}, eos_token_id=1, bos_token_id=1, pad_token_id=0)
    torch.manual_seed(seed)
    with torch.device("cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1 and scale != 1.0:
                parameter.mul_(scale)
    model.save_pretrained(path)
    write_tokenizer(path, config.vocab_size)
    return path


def make_constant_checkpoint(path: Path, *, token: int, **shape: Any) -> Path:
    """A model that answers `token` whatever it is asked: each answered token then says which weights wrote it."""
    import torch
    from safetensors.torch import load_file, save_file

    make_checkpoint(path, **shape)
    file = path / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if "o_proj" in name or "down_proj" in name:
            tensor.zero_()  # the residual stream stays what the embedding put there
    tensors["model.embed_tokens.weight"].fill_(0.5)
    head = torch.zeros_like(tensors["lm_head.weight"])
    head[token] = 1.0
    tensors["lm_head.weight"] = head
    save_file(tensors, file, metadata={"format": "pt"})
    return path


def make_adapter(path: Path, *, seed: int, rank: int = 8, ends: bool = False, **shape: Any) -> Path:
    """Write a random LoRA adapter for a model of TINY_SHAPE, as PEFT saves one, into `path` and return it. `ends`: it
    changes embedding and head as well, whose base weights PEFT then saves, too."""
    import torch
    from safetensors.torch import save_file

    sizes = {**TINY_SHAPE, **shape}
    hidden, inner = sizes["hidden_size"], sizes["intermediate_size"]
    layers = {"self_attn.q_proj": (hidden, hidden), "self_attn.o_proj": (hidden, hidden)}
    layers |= {"mlp.gate_proj": (hidden, inner), "mlp.down_proj": (inner, hidden)}
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(sizes["num_hidden_layers"]):
        for name, (size, out) in layers.items():
            stem = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{stem}.lora_A.weight"] = torch.randn(rank, size, generator=generator) / 10
            tensors[f"{stem}.lora_B.weight"] = torch.randn(out, rank, generator=generator)
    if ends:
        embedding, head, vocab = "base_model.model.model.embed_tokens", "base_model.model.lm_head", sizes["vocab_size"]
        tensors[f"{embedding}.lora_embedding_A"] = torch.randn(rank, vocab, generator=generator) / 10
        tensors[f"{embedding}.lora_embedding_B"] = torch.randn(hidden, rank, generator=generator)
        tensors[f"{head}.lora_A.weight"] = torch.randn(rank, hidden, generator=generator) / 10
        tensors[f"{head}.lora_B.weight"] = torch.randn(vocab, rank, generator=generator)
        tensors |= {f"{layer}.base_layer.weight": torch.zeros(vocab, hidden) for layer in (embedding, head)}
        layers |= {".embed_tokens": (vocab, hidden), ".lm_head": (hidden, vocab)}
    path.mkdir(parents=True)
    save_file(tensors, path / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": [n.split(".")[1] for n in layers],
    }
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


def write_tokenizer(path: Path, vocab_size: int) -> None:
    """A word-level tokenizer of printable characters and filler words `w17`, with a chat template, in `path`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    chars = [chr(c) for c in range(32, 127)]
    words = [*SPECIAL, *chars][:vocab_size]
    vocab = {w: i for i, w in enumerate(words + [f"w{i}" for i in range(len(words), vocab_size)])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=" " if " " in vocab else SPECIAL[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")
    fast.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    fast.save_pretrained(path)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": 1, "pad_token_id": 0}))
