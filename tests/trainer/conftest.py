"""Small models, real ranks and a real model behind `/generate`, shared by the trainer's tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.trainer.batches import random_batch
from tests.trainer.ranks import Ranks
from tests.trainer.zygote import Zygote
from trainer.batch import TOKENS
from trainer.data.records import Record
from trainer.data.tokenizer import Tokenizer
from trainer.tiny_model import write_tiny_model

if TYPE_CHECKING:
    from tests.trainer.rollouts.generate_server import GenerateServer

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 17,  # not a multiple of any number of ranks
}


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _perturb(directory: Path) -> None:
    """Initial norms are one and initial biases zero, which would hide a layout mistake: make every number count."""
    import torch
    from safetensors.torch import load_file, save_file

    generator = torch.Generator().manual_seed(5)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        tensors[name] = tensor + 0.15 * torch.randn(tensor.shape, generator=generator)
    save_file(tensors, file, metadata={"format": "pt"})


def _expect(directory: Path) -> None:
    """transformers' logits for the batch that the ranks compare with; the device shim would spoil them there."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(random_batch(SMALL["vocab_size"])[TOKENS][:, :-1]).logits
    save_file({"logits": logits.contiguous()}, directory / "expected.st")


@pytest.fixture(scope="session")
def small_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Directories by `family` and `family-tied`."""
    root = tmp_path_factory.mktemp("models")
    for family in ("llama", "qwen2", "qwen3"):
        for tied in (False, True):
            _write(root / (family + ("-tied" if tied else "")), family, tie_word_embeddings=tied)
    _write(root / "llama-scaled", "llama", rope_parameters=LLAMA3_ROPE)
    return {path.name: str(path) for path in root.iterdir()}


def _write(path: Path, family: str, **sizes: Any) -> None:
    write_tiny_model(path, family, **SMALL | sizes)
    _perturb(path)
    _expect(path)


# Four layers, so that two pipeline stages can hold two chunks each.
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {}),
    "qwen3_moe": ("qwen3_moe", {"moe_intermediate_size": 48}),
    "qwen3_moe-raw": ("qwen3_moe", {"moe_intermediate_size": 48, "norm_topk_prob": False}),
}


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Directories by name: the mixtures, and two dense models of four layers."""
    root = tmp_path_factory.mktemp("layouts")
    dense = {"qwen2": ("qwen2", {}), "llama-tied": ("llama", {"tie_word_embeddings": True})}
    for name, (family, sizes) in (MIXTURES | dense).items():
        _write(root / name, family, **{"num_hidden_layers": 4} | sizes)
    return {path.name: str(path) for path in root.iterdir()}


@pytest.fixture(scope="session")
def every_model(small_models: dict[str, str], models: dict[str, str]) -> dict[str, str]:
    """Of four layers where there is one."""
    return small_models | models


@pytest.fixture(scope="session")
def qwen2(small_models: dict[str, str]) -> str:
    """The directory of a small model."""
    return small_models["qwen2"]


@pytest.fixture(scope="session")
def deep(models: dict[str, str]) -> str:
    """The directory of a small model with four layers."""
    return models["qwen2"]


@pytest.fixture
def path(every_model: dict[str, str], model: str) -> str:
    """The directory of the model that a test is parametrized with."""
    return every_model[model]


@pytest.fixture(scope="session")
def one_rank() -> Iterator[Ranks]:
    with Ranks(1) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def two_ranks(one_rank: Ranks) -> Ranks:
    return one_rank.sharing(2)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The model of the arithmetic task, about 1 M parameters."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny_model(path)
    return str(path)


@pytest.fixture(scope="module")
def tokenizer(tiny_model: str) -> Tokenizer:
    return Tokenizer(tiny_model)


@pytest.fixture
def record(tokenizer: Tokenizer) -> Record:
    """A sum for the tiny model."""
    return Record(0, "1+2=", "03", tokenizer.prompt("1+2="), ())


@pytest.fixture(scope="module")
def server(tiny_model: str) -> Iterator[GenerateServer]:
    """The tiny model behind `/generate`."""
    from tests.trainer.rollouts.generate_server import GenerateServer, serve  # transformers, which few tests need

    with serve(GenerateServer(tiny_model)) as running:
        yield running


@pytest.fixture
def config(qwen2: str, tmp_path: Path) -> dict[str, Any]:
    """Fine-tuning of the smallest model, with a learning rate that depends on where the run is."""
    return {
        "model": {"path": qwen2},
        "data": {"kind": "arithmetic", "noise": 0.3},
        "algorithm": {"name": "sft"},
        "steps": 12,
        "batch": 6,
        "optimizer": {"lr": 1e-2, "warmup_steps": 2, "decay": "cosine"},
        "checkpoint": {"path": str(tmp_path / "checkpoints"), "every": 3},
        "metrics": str(tmp_path / "metrics.jsonl"),
    }


@pytest.fixture
def quiet_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that take one thread."""
    from loadtest.training.learning.recipes import ENVIRONMENT

    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="session")
def zygote() -> Zygote:
    """Starts runs that import nothing first."""
    return Zygote()
