"""How much of a device there is for components where the configuration does not say."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trainer.config import MemoryConfig, TrainerConfig, strict
from trainer.megatron.hf_config import load_shape
from trainer.memory import build
from trainer.memory.build import budget_bytes, reserve_bytes
from trainer.memory.ledger import GIB
from trainer.plan import estimate
from trainer.plan.report import workload_of


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """80 GiB, of which other processes hold 20 and this one 10; another rank has 3 GiB less."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (50 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 10 * GIB)
    monkeypatch.setattr(build, "gather_json", lambda mine: [mine, mine - 3 * GIB])


def configured(path: str, **memory: Any) -> TrainerConfig:
    given: dict[str, Any] = {"model": {"path": path}, "data": {"kind": "arithmetic"}, "algorithm": {"name": "sft"}}
    return strict.build(TrainerConfig, given | {"steps": 1, "memory": memory})


@pytest.mark.usefixtures("gpu")
def test_a_gpu_s_budget_is_what_others_leave_less_what_libraries_take() -> None:
    """What this process holds counts, and a server that is awake; 2 GiB are CUDA's and NCCL's."""
    assert budget_bytes(MemoryConfig(), 0) == (50 + 10 - 2 - 3) * GIB
    assert budget_bytes(MemoryConfig(), 20 * GIB) == (50 + 10 + 20 - 2 - 3) * GIB
    assert budget_bytes(MemoryConfig(budget_gib=70), 20 * GIB) == 70 * GIB


@pytest.mark.usefixtures("gpu")
def test_a_gpu_keeps_room_for_activations(tiny_model: str) -> None:
    """Of components alone a device may be full; the first forward pass would not fit then."""
    config, shape = configured(tiny_model), load_shape(tiny_model)
    found = estimate(shape, config.parallel, workload_of(config, min(4096, shape.max_positions)))
    assert reserve_bytes(config, shape) == found.activations + found.logits > 0
    assert reserve_bytes(configured(tiny_model, reserve_gib=0), shape) == 0


def test_a_host_gives_all_that_it_has(tiny_model: str) -> None:
    """Activations come and go in the memory that the budget leaves."""
    assert reserve_bytes(configured(tiny_model), load_shape(tiny_model)) == 0
    assert reserve_bytes(configured(tiny_model, reserve_gib=2), load_shape(tiny_model)) == 2 * GIB
