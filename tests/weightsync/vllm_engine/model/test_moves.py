"""Which processing is recognised as moving words alone."""

from __future__ import annotations

import pytest
import torch

from weightsync.vllm_engine.model.linear import WORD, pack_into
from weightsync.vllm_engine.model.moves import SHORT, Move, Moved, random_words, recognise
from weightsync.vllm_engine.model.processing import Leaf


def packed(tensor: torch.Tensor, lanes: int, word: int = WORD) -> torch.Tensor:
    """Each matrix of it, packed on its own."""
    made = torch.empty_like(tensor)
    for target, source in zip(made.view(-1, *tensor.shape[-2:]), tensor.view(-1, *tensor.shape[-2:]), strict=True):
        pack_into(target, source, lanes, word)
    return made


def leaf(made: torch.Tensor) -> Leaf:
    return Leaf("layer.x", torch.empty_like(made), made)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("lanes", [0, 16, 32, 48, 64])
def test_orders_of_words(lanes: int, dtype: torch.dtype) -> None:
    loaded = random_words(
        {"layer.a": torch.empty(3, 192, 64, dtype=dtype), "layer.b": torch.empty(3, 192, 64, dtype=dtype)}
    )
    assert all(torch.isfinite(tensor).all() for tensor in loaded.values())
    made = packed(loaded["layer.b"], lanes) if lanes else loaded["layer.b"].clone()
    assert recognise(loaded, [leaf(made)]) == {"layer.x": Move("layer.b", lanes)}


@pytest.mark.parametrize("lanes", [16, 32])
def test_single_16_bit_weights_side_by_side(lanes: int) -> None:
    loaded = random_words({"layer.a": torch.empty(3, 64, 64, dtype=torch.bfloat16)})
    made = packed(loaded["layer.a"], lanes, SHORT)
    assert recognise(loaded, [leaf(made)]) == {"layer.x": Move("layer.a", lanes, SHORT)}


def test_a_transposed_matrix_is_one_block() -> None:
    loaded = random_words({"layer.a": torch.empty(2, 64, 64, dtype=torch.bfloat16)})
    made = loaded["layer.a"].transpose(1, 2).contiguous()
    assert recognise(loaded, [leaf(made)]) == {"layer.x": Move("layer.a", 64, SHORT)}


def test_bytes_are_not_packed() -> None:
    """Their checksums are of single bytes, which a packed order would tear apart."""
    loaded = random_words({"layer.a": torch.empty(3, 64, 64, dtype=torch.int8)})
    assert recognise(loaded, [leaf(packed(loaded["layer.a"], 16))]) is None


def test_anything_else_is_not_recognised() -> None:
    loaded = random_words({"layer.a": torch.empty(2, 64, 64, dtype=torch.bfloat16)})
    a = loaded["layer.a"]
    one_other = packed(a, 32)
    one_other.view(torch.int16).flatten()[-1] ^= 1
    swapped = packed(a, 32)[[1, 0]].contiguous()
    for made in (one_other, swapped, a.transpose(0, 2).contiguous(), a.transpose(1, 2), a.float(), a[:1].clone(), -a):
        assert recognise(loaded, [leaf(made)]) is None
    assert recognise(loaded, [leaf(a), leaf(one_other)]) is None


def test_a_layer_of_the_same_form() -> None:
    moved = Moved({"m.layers.1.x": Move("m.layers.1.w", 16)}, {"m.layers.1.n": 4})
    assert moved.at("m.layers.1", "m.layers.12") == Moved(
        {"m.layers.12.x": Move("m.layers.12.w", 16)}, {"m.layers.12.n": 4}
    )
