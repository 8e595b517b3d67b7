"""A small model directory in the real Hugging Face layout, made without a download, and what a run that trains one
takes in place of the trainer's defaults: for demos, tests and first tries.

python -m trainer.tiny_model DIR [--family qwen2]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

ARITHMETIC = "0123456789+=-"
SPECIAL = ("<pad>", "<eos>", "<unk>")
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
_CLASSES = {
    "llama": "Llama",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "mixtral": "Mixtral",
    "qwen3_moe": "Qwen3Moe",
}
_MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 192,
        "norm_topk_prob": True,
    },
}


TINY_RUN: dict[str, Any] = {
    "model": {"dtype": "float32"},
    "packing": None,
    "batch": 16,
    "micro_batch": 128,
    "optimizer": {"lr": 1e-4, "beta2": 0.95},
    "rollout": {"max_tokens": 16},
}
TINY_GATEWAY = {"concurrency": 64}


def tiny_run(config: dict[str, Any]) -> dict[str, Any]:
    """A run's configuration with the values for a tiny model wherever it gives none: fp32, a few tokens, one padded
    forward pass, large steps."""
    sections = {name: values | config.get(name, {}) for name, values in TINY_RUN.items() if isinstance(values, dict)}
    if config.get("gateway") is not None:
        sections["gateway"] = TINY_GATEWAY | config["gateway"]
    return TINY_RUN | config | sections


def write_tiny_model(
    directory: str | Path, family: str = "qwen2", *, characters: str = ARITHMETIC, seed: int = 0, **sizes: Any
) -> None:
    """Write config, one token per character, and seeded random weights (about 1 M parameters, fp32).

    `family` is llama, qwen2, qwen3, mixtral or qwen3_moe (four experts, two per token); `sizes` override fields of the
    Hugging Face configuration. Raises ValueError for characters outside ASCII, which are several bytes each.
    """
    import torch
    import transformers

    if not characters.isascii():
        raise ValueError("a character outside ASCII is several bytes, and has no token. Leave it out of `characters`.")
    config: dict[str, Any] = {
        "vocab_size": len(SPECIAL) + len(characters),
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 1,
    }
    config |= _MIXTURES.get(family, {}) | sizes
    torch.manual_seed(seed)
    model_config = getattr(transformers, f"{_CLASSES[family]}Config")(**config)
    model = getattr(transformers, f"{_CLASSES[family]}ForCausalLM")(model_config)
    model.save_pretrained(directory)
    _tokenizer(characters).save_pretrained(directory)


def _tokenizer(characters: str) -> Any:
    """A byte-level BPE without merges, a token for each character: transformers makes a Qwen2's tokenizer one whatever
    its file says, so any other kind would be another one in an engine."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    pad, eos, unknown = SPECIAL
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    names = [as_bytes.pre_tokenize_str(character)[0][0] for character in characters]
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *names])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token=unknown))
    tokenizer.pre_tokenizer = as_bytes
    tokenizer.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad,
        eos_token=eos,
        unk_token=unknown,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write a small random model with a character tokenizer.")
    parser.add_argument("directory")
    parser.add_argument("--family", choices=tuple(_CLASSES), default="qwen2")
    parser.add_argument("--characters", choices=("arithmetic", "code"), default="arithmetic", help="of which task")
    chosen = parser.parse_args()
    from trainer.data.problems import CHARACTERS

    characters = CHARACTERS if chosen.characters == "code" else ARITHMETIC
    write_tiny_model(chosen.directory, chosen.family, characters=characters)
