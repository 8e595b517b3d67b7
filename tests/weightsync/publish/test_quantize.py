"""Quantised checkpoints: what they stand for is close to what was quantised, and what stays is untouched."""

from __future__ import annotations

import pytest
import torch

from weightsync.publish.quantize import Quantizer, Scheme, pack_nibbles

NAME = "model.layers.0.mlp.up_proj.weight"


def quantized(quantizer: Quantizer, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    return dict(quantizer.tensors([(NAME, weight)]))


def nibbles(packed: torch.Tensor) -> torch.Tensor:
    """The 0..15 of a packed [rows, columns / 8], lowest bits first."""
    wide = packed.long() & 0xFFFFFFFF
    return torch.stack([(wide >> (4 * i)) & 15 for i in range(8)], dim=-1).flatten(1)


def test_int8_is_within_half_a_step_of_each_channel() -> None:
    weight = torch.randn(16, 64).bfloat16() * torch.logspace(-3, 3, 16)[:, None].bfloat16()
    found = quantized(Quantizer("int8"), weight)
    assert found.keys() == {NAME, f"{NAME}_scale"}
    assert found[NAME].dtype is torch.int8
    scale = found[f"{NAME}_scale"]
    assert scale.shape == (16, 1)
    assert ((found[NAME].float() * scale - weight.float()).abs() <= scale * 0.5001).all()
    assert (found[NAME].abs().amax(1) == 127).all()


@pytest.mark.parametrize("shape", [(128, 256), (130, 200)])
def test_fp8_has_a_scale_per_block(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape).bfloat16()
    found = quantized(Quantizer("fp8"), weight)
    assert found.keys() == {NAME, f"{NAME}_scale_inv"}
    scale = found[f"{NAME}_scale_inv"]
    assert scale.shape == (-(-shape[0] // 128), -(-shape[1] // 128))
    wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: shape[0], : shape[1]]
    # e4m3 has three bits of mantissa: within a sixteenth, and within its smallest step near zero
    error = (found[NAME].float() * wide - weight.float()).abs()
    assert (error <= weight.float().abs() / 16 + wide * 2**-9).all()


def test_w4a16_is_within_half_a_step_of_each_group() -> None:
    weight = torch.randn(8, 128).bfloat16()
    found = quantized(Quantizer("w4a16", group_size=32), weight)
    assert found[f"{NAME}_shape"].tolist() == [8, 128]
    scale = found[f"{NAME}_scale"]
    assert scale.shape == (8, 4)
    assert scale.dtype is torch.bfloat16
    wide = scale.float().repeat_interleave(32, 1)
    restored = (nibbles(found[f"{NAME}_packed"]) - 8) * wide
    assert ((restored - weight.float()).abs() <= wide * 0.51 + 8 * wide * 2**-8).all()  # and the scale is rounded


def test_groups_that_do_not_divide_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=rf"{NAME}: its 96 columns do not divide into groups of 64"):
        quantized(Quantizer("w4a16", group_size=64), torch.randn(8, 96))


@pytest.mark.parametrize("scheme", ["int8", "fp8", "w4a16"])
def test_routers_norms_embeddings_and_the_head_stay(scheme: Scheme) -> None:
    names = ["model.embed_tokens.weight", "lm_head.weight", "model.layers.0.mlp.gate.weight", "model.norm.weight"]
    tensors = [(name, torch.randn(128, 128)) for name in names]
    assert [(n, t is own) for (n, t), (_, own) in zip(Quantizer(scheme).tensors(tensors), tensors, strict=True)] == [
        (name, True) for name in names
    ]


def test_a_weight_of_zeros_stays_zero() -> None:
    for scheme, key in (("int8", NAME), ("fp8", NAME)):
        found = quantized(Quantizer(scheme), torch.zeros(128, 128))  # type: ignore[arg-type]
        assert not found[key].float().any()
        assert all(tensor.float().isfinite().all() for tensor in found.values())


def test_nibbles_are_packed_in_the_order_asked_for() -> None:
    values = torch.arange(16).view(2, 8)
    assert torch.equal(nibbles(pack_nibbles(values)), values)
    assert nibbles(pack_nibbles(values, (7, 6, 5, 4, 3, 2, 1, 0))).tolist() == values.flip(1).tolist()
