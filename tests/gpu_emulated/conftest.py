"""Tests on the emulated GPU: `make gpu-emulated` has torch's build for CUDA and the stand-in. Elsewhere there are none.

pytest's own process imports vLLM and makes checkpoints; each test forks (`forks.py`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.gpu_emulated import standin

SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # gloo for tensors of the device alone warns for each group
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_USE_DEEP_GEMM": "0",  # it asks for a newer torch
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # a question by CUDA's runtime would keep forks from a device
}
if standin.is_loaded():
    os.environ |= SETTINGS
else:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def imported() -> None:
    """vLLM and Hotswap's part of it, before any test forks; no device is asked for."""
    import torch
    import vllm.model_executor.model_loader
    import vllm.model_executor.models.registry
    import vllm.v1.spec_decode.llm_base_proposer
    import vllm.v1.worker.gpu.spec_decode.speculator
    import vllm.v1.worker.gpu_model_runner  # noqa: F401
    from vllm.device_allocator import cumem
    from vllm.distributed.device_communicators import cuda_wrapper

    import weightsync.vllm_engine.backend  # noqa: F401
    from weightsync.format import fingerprint
    from weightsync.vllm_plugin import OWNER_ENV, register

    # torch loads CUDA's own runtime, too, by its path: vLLM would take that one.
    cuda_wrapper.find_loaded_library = lambda _: os.environ["LD_PRELOAD"].partition(":")[0]
    cumem.libcudart = cuda_wrapper.CudaRTLibrary()
    os.environ[OWNER_ENV] = str(os.getpid())
    register()
    fingerprint._kernels()  # compiled once
    assert not torch.cuda.is_initialized(), "an import asked for a device: forks cannot have one now"


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Directories of models that the trainer trains. Megatron-Core and the trainer are imported before a test forks."""
    import torch

    import tests.trainer.cases  # noqa: F401
    from trainer.main import quiet
    from trainer.tiny_model import write_tiny_model

    quiet()
    assert not torch.cuda.is_initialized(), "an import asked for a device: forks cannot have one now"
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    small = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, **heads}
    root = tmp_path_factory.mktemp("models")
    write_tiny_model(root / "llama", "llama", **small)
    write_tiny_model(root / "tied", "qwen2", tie_word_embeddings=True, **small)
    write_tiny_model(root / "mixture", "qwen3_moe", moe_intermediate_size=48, **small)
    write_tiny_model(root / "larger", "llama", hidden_size=256, intermediate_size=1024, **heads)
    return {path.name: str(path) for path in root.iterdir()}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, imported: None) -> Callable[[str], Path]:
    """The checkpoint of a kind, made once."""
    from tests.gpu_emulated.kinds import KINDS

    made: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in made:
            path = tmp_path_factory.mktemp(kind)
            KINDS[kind](path)
            made[kind] = path
        return made[kind]

    return make
