"""What is decided by the device, where there is none: its numbers, and tensors that hold nothing."""

from __future__ import annotations

import pytest
import torch

from trainer.config import FaultsConfig, ParallelConfig
from trainer.errors import ConfigError
from trainer.launch import launch
from trainer.megatron import parallel


@pytest.mark.parametrize(("visible", "rank", "device"), [(1, "0", 0), (1, "3", 0), (4, "3", 3)])
def test_a_rank_takes_the_gpu_that_it_sees_or_that_of_its_number(
    monkeypatch: pytest.MonkeyPatch, visible: int, rank: str, device: int
) -> None:
    """Slurm may show each rank a single one, whatever the rank's number."""
    assert chosen(monkeypatch, visible, rank) == [device]


def test_a_rank_without_a_gpu_names_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="this is rank 4 of its host, which shows it 4 GPUs"):
        chosen(monkeypatch, 4, "4")


def test_a_host_with_fewer_gpus_than_ranks_is_refused_before_one_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, whatever `max_restarts` says."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(ConfigError, match="4 ranks want a GPU each, and this host shows 2"):
        launch("trainer.main", [], ParallelConfig(data=4), FaultsConfig(max_restarts=3))


def chosen(monkeypatch: pytest.MonkeyPatch, visible: int, rank: str) -> list[int]:
    """The devices that a thread of a rank takes."""
    taken: list[int] = []
    monkeypatch.setenv("LOCAL_RANK", rank)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    parallel.use_device()
    return taken
