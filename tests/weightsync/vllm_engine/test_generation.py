"""Commit and rollback of generations on a plain module: references on CPU, contents on an accelerator."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from weightsync.vllm_engine.generation import DevicePool, ExchangeGeneration, Flip, Generation
from weightsync.vllm_engine.placement import UnsupportedModelError, pair_parameters


def flips(module: nn.Module, value: float) -> list[Flip]:
    weight = nn.Parameter(torch.full((2, 3), value), requires_grad=False)
    return [Flip(module, {"weight": weight}, None)]


def value(module: nn.Linear) -> float:
    assert len(set(module.weight.flatten().tolist())) == 1
    return float(module.weight[0, 0])


def test_reference_commit_and_back() -> None:
    module = nn.Linear(3, 2, bias=False)
    one, two = (Generation(v, f"d{v}", flips(module, float(v))) for v in (1, 2))
    one.commit()
    assert value(module) == 1
    assert two.displaced(one) is one
    (replaced,) = two.commit()
    assert value(module) == 2
    assert float(replaced[0, 0]) == 1
    one.commit()
    assert value(module) == 1


def test_exchange_keeps_addresses_and_can_be_undone() -> None:
    module = nn.Linear(3, 2, bias=False)
    address = module.weight.data_ptr()
    one = ExchangeGeneration(1, "d1", flips(module, 1.0), DevicePool(64, torch.device("cpu")).acquire("d1"))
    one.commit()
    assert one.displaced(None) is None
    two = ExchangeGeneration(2, "d2", flips(module, 2.0), DevicePool(64, torch.device("cpu")).acquire("d2"))
    two.commit()
    assert value(module) == 2
    back = two.displaced(one)
    assert back is not None
    assert (back.version, back.digest) == (1, "d1")
    back.commit()
    assert value(module) == 1
    forward = back.displaced(two)
    assert forward is not None
    forward.commit()
    assert value(module) == 2
    assert module.weight.data_ptr() == address


def test_a_layer_with_processed_weights_is_refused_by_name() -> None:
    """Quantized layers keep what vLLM made of the checkpoint, which staging would not build."""

    class Fp8LinearMethod:
        """Stands for any quantization method of vLLM."""

    live, twin = (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(2))
    assert [s.name for s in pair_parameters(live, twin)] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    twin[1].quant_method = Fp8LinearMethod()
    with pytest.raises(UnsupportedModelError, match=r"layer '1' uses Fp8LinearMethod.*unquantized"):
        pair_parameters(live, twin)


def test_tied_weights_share_a_source() -> None:
    live, twin = (nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)) for _ in range(2))
    twin[1].weight = twin[0].weight
    assert [(s.name, s.source) for s in pair_parameters(live, twin)] == [
        ("0.weight", "0.weight"),
        ("1.weight", "0.weight"),
    ]
