"""Small mixtures of experts beside the dense models of tests/trainer/conftest.py."""

from __future__ import annotations

from typing import Any

import pytest

from tests.trainer.conftest import SMALL, _expect, _perturb
from trainer.tiny_model import write_tiny_model

# Four layers, so that two pipeline stages can hold two chunks each.
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {}),
    "qwen3_moe": ("qwen3_moe", {"moe_intermediate_size": 48}),
    "qwen3_moe-raw": ("qwen3_moe", {"moe_intermediate_size": 48, "norm_topk_prob": False}),
}


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Directories by name: the mixtures, and two dense models of four layers."""
    root, paths = tmp_path_factory.mktemp("layouts"), {}
    dense = {"qwen2": ("qwen2", {}), "llama-tied": ("llama", {"tie_word_embeddings": True})}
    for name, (family, sizes) in (MIXTURES | dense).items():
        write_tiny_model(root / name, family, **SMALL | {"num_hidden_layers": 4} | sizes)
        _perturb(root / name)
        _expect(root / name)
        paths[name] = str(root / name)
    return paths
