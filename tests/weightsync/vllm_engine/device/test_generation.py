"""Commit and rollback of generations on a plain module: references on CPU, contents on an accelerator."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import nn

from tests.weightsync.vllm_engine.device.test_cuda import value
from weightsync.vllm_engine.device.cuda import CopyGeneration
from weightsync.vllm_engine.device.generation import Flips, Generation, build_flips
from weightsync.vllm_engine.model.layout import plan_layout
from weightsync.vllm_engine.model.placement import UnsupportedModelError, pair_parameters
from weightsync.vllm_engine.model.processing import GONE, Change

KINDS = [Generation, CopyGeneration]


def flips(module: nn.Linear, value: float) -> Flips:
    return Flips([(module.weight, torch.full((2, 3), value))])


def test_what_a_flip_replaced_is_handed_to_the_caller() -> None:
    module = nn.Linear(3, 2, bias=False).requires_grad_(False)
    kernel = object()
    module.__dict__["kernel"] = "before"
    one = Generation(1, "d1", Flips(flips(module, 1.0).tensors, [Change("kernel", module.__dict__, "kernel", kernel)]))
    two = Generation(2, "d2", Flips([], [Change("kernel", module.__dict__, "kernel", GONE)]))
    before, former = one.commit()
    assert before.shape == (2, 3)
    assert former == "before"
    assert module.__dict__["kernel"] is kernel
    assert two.commit() == [kernel]
    assert "kernel" not in module.__dict__


@pytest.mark.parametrize("kind", KINDS)
def test_a_flip_that_failed_halfway_is_undone_by_the_version_before(kind: type[Generation]) -> None:
    """What is staged never changes, so committing the old version again puts all of it back."""

    refuses: Any = MappingProxyType({})
    module = nn.Linear(3, 2, bias=False).requires_grad_(False)
    one, two = (kind(v, f"d{v}", flips(module, float(v))) for v in (1, 2))
    two.flips.changes.append(Change("broken", refuses, "broken", 1))
    one.commit()
    with pytest.raises(TypeError, match="item assignment"):
        two.commit()
    assert value(module) == 2
    one.commit()
    assert value(module) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_tied_weight_is_flipped_once_for_both_of_its_modules(kind: type[Generation]) -> None:
    live, twin = (nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)) for _ in range(2))
    for model in (live, twin):
        model[1].weight = model[0].weight
        model.requires_grad_(False)
    address, holder = live[0].weight.data_ptr(), live[0].weight
    pairs = pair_parameters(live, twin)
    layout = plan_layout(pairs, torch.device("cpu"), 0, 1)
    for version in (1, 2, 1):
        data = torch.zeros(layout.nbytes, dtype=torch.uint8)
        layout.plain["0.weight"].view(data).fill_(version)
        found = build_flips(pairs, layout, data, {})
        assert len(found.tensors) == 1
        kind(version, "d", found).commit()
        assert value(live[0]) == value(live[1]) == version
        assert holder is live[0].weight, "holders of the tensor follow"
        assert (holder.data_ptr() == address) == (kind is CopyGeneration)


def test_tied_weights_share_a_source() -> None:
    live, twin = (nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)) for _ in range(2))
    twin[1].weight = twin[0].weight
    assert {s.name: s.source for s in pair_parameters(live, twin)} == {"0.weight": "0.weight", "1.weight": "0.weight"}


def test_a_tied_tensor_that_a_version_has_twice_is_refused_unless_both_are_equal() -> None:
    """The running model looks up and multiplies by one tensor: the head's bytes would be the embedding's, too."""
    live, twin = (nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)) for _ in range(2))
    live[1].weight = live[0].weight
    for model in (live, twin):
        model.requires_grad_(False)
    pairs = pair_parameters(live, twin)
    layout = plan_layout(pairs, torch.device("cpu"), 0, 1)
    data = torch.zeros(layout.nbytes, dtype=torch.uint8)
    for name in ("0.weight", "1.weight"):
        layout.plain[name].view(data).fill_(7)
    Generation(1, "d", build_flips(pairs, layout, data, {})).commit()
    assert value(live[0]) == 7
    layout.plain["1.weight"].view(data)[0, 0] = 8
    with pytest.raises(UnsupportedModelError, match=r"'0.weight' and '1.weight' are one tensor"):
        build_flips(pairs, layout, data, {})
