"""Decisions of the device, where there is none: its numbers, and tensors that hold nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from trainer.config import FaultsConfig, ParallelConfig
from trainer.errors import ConfigError
from trainer.launch import launch
from trainer.megatron import optimizer, parallel
from trainer.megatron.attention import CausalAttention, _for_each_head
from trainer.megatron.optimizer import HostAdam


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_main_weights_on_the_host_are_pinned_in_any_precision(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """The thread that computes would wait for each copy of them otherwise."""
    given: list[torch.Tensor] = []

    def pinned(nbytes: int, _device: torch.device) -> tuple[torch.Tensor, int]:
        given.append(torch.empty(nbytes, dtype=torch.uint8))
        return given[-1], 0

    monkeypatch.setattr(optimizer, "pinned", pinned)
    weight = torch.randn(3, 5).to(dtype)
    groups = SimpleNamespace(param_groups=[{"params": [weight]}])
    _, _, copies, *_ = HostAdam._get_sub_optimizer_param_groups(groups, 1.0)  # type: ignore[arg-type]
    assert torch.equal(copies[weight], weight.float())
    assert [copies[weight].data_ptr()] == [memory.data_ptr() for memory in given]


@pytest.mark.parametrize("place", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_float32_on_a_gpu_takes_a_kernel_that_knows_no_groups(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, place: str
) -> None:
    """The only other one writes out the scores."""
    asked: list[tuple[int, bool]] = []

    def attention(query: torch.Tensor, key: torch.Tensor, _: torch.Tensor, **options: Any) -> torch.Tensor:
        asked.append((key.shape[1], options["enable_gqa"]))
        return query

    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    with FakeTensorMode():
        query, key = (torch.empty(2, 5, heads, 8, dtype=dtype, device=place) for heads in (4, 2))
        CausalAttention._causal(SimpleNamespace(scale=None), query, key, key)  # type: ignore[arg-type]
    grouped = dtype is torch.bfloat16 or place == "cpu"
    assert asked == [(2, True) if grouped else (4, False)]


def test_repeated_keys_are_those_of_their_group() -> None:
    key = torch.randn(2, 5, 2, 8)
    query, value = torch.randn(2, 5, 4, 8), torch.randn(2, 5, 2, 8)
    grouped, single = (
        F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (query, k, v)), is_causal=True, enable_gqa=gqa)
        for k, v, gqa in ((key, value, True), (_for_each_head(key, 4), _for_each_head(value, 4), False))
    )
    torch.testing.assert_close(single, grouped)
