"""Which kernel multiplies by a matrix, and what it computes; and which tensors are built together."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.cpu import bf16_only
from weightsync.vllm_engine.kernels import FLAGS, CpuKind, cpu_kind
from weightsync.vllm_engine.model import linear
from weightsync.vllm_engine.model.linear import choose_kernel, onednn_takes
from weightsync.vllm_engine.model.placement import group_by_layer, layer_of

pytestmark = pytest.mark.engine
KINDS = [torch.bfloat16, torch.float32]
SHAPES = [(512, 2048), (1024, 1024), (2112, 896), (48, 64), (8, 128), (60, 100), (6400, 640)]


def stock_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
    """The layer that vLLM runs: its function of x."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
    layer.bias = None if bias is None else torch.nn.Parameter(bias.clone(), requires_grad=False)
    dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
    return lambda x: layer.cpu_linear(x, layer.weight, layer.bias)  # type: ignore[operator]


HIDDEN = {"avx2": True, "avx512_f": True, "amx_tile": True}  # a virtual machine may hide instructions


@pytest.mark.parametrize(
    ("has", "kind"),
    [({}, CpuKind.AVX2), (HIDDEN, CpuKind.AVX512)]
    + [({"avx2": True} | {flag: n < kind for n, flag in enumerate(FLAGS)}, kind) for kind in CpuKind],
)
def test_the_kind_of_a_cpu(has: dict[str, bool], kind: CpuKind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: has)
    assert cpu_kind() is kind
    asked = torch.cpu._is_avx512_supported, torch.cpu._is_avx512_bf16_supported, torch.cpu._is_amx_tile_supported
    assert [ask() for ask in asked] == [has.get(flag, False) for flag in FLAGS], "vLLM asks torch for the same flags"


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("bias", [True, False])
def test_the_kernels_compute_what_stock_vllm_computes(dtype: torch.dtype, bias: bool) -> None:
    """To the bit, however many rows there are."""
    found = set()
    for out, inner in SHAPES:
        weight = torch.randn(out, inner).to(dtype)
        b = torch.randn(out).to(dtype) if bias else None
        kernel = choose_kernel((out, inner), dtype, torch.device("cpu"))
        found.add(kernel)
        ours = linear.plain_linear
        if kernel == "packed":
            packed = torch.empty_like(weight)
            linear.pack_into(packed, weight, linear.lanes(out, inner, dtype))
            ours = linear.packed_linear(packed)
        elif kernel == "private":
            ours = linear.private_linear(weight)
        theirs = stock_linear(weight, b)
        if b is not None and linear.is_small(out, inner, dtype):
            b = b.float()
        for rows in (1, 3, 16, 70):
            x = torch.randn(rows, 2 * inner).to(dtype)[:, :inner]
            x = x.contiguous() if linear.is_small(out, inner, dtype) else x  # that kernel reads no strided one
            assert torch.equal(ours(x, weight, b), theirs(x)), (out, inner, rows, kernel)
    assert dtype is torch.bfloat16 or found == {"packed", "private"}


@bf16_only
def test_bf16_weights_are_shared_on_this_cpu() -> None:
    kernels = [choose_kernel(shape, torch.bfloat16, torch.device("cpu")) for shape in SHAPES]
    assert kernels.count("packed") >= 4


def test_choice_of_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, bf16 = torch.device("cpu"), torch.bfloat16
    assert onednn_takes(bf16) or cpu_kind() < CpuKind.AVX512
    general = "private" if onednn_takes(bf16) else "plain"
    assert choose_kernel((64, 63), bf16, cpu) == general
    assert choose_kernel((1024, 1024), torch.float32, cpu) == "packed"
    assert choose_kernel((64, 64), bf16, torch.device("cuda")) == "plain"
    monkeypatch.setenv("HOTSWAP_LINEAR_KERNEL", "private")
    assert choose_kernel((1024, 1024), torch.float32, cpu) == "private"
    monkeypatch.setenv("HOTSWAP_LINEAR_KERNEL", "plain")
    assert choose_kernel((64, 64), bf16, cpu) == "plain"


def test_a_cpu_for_which_onednn_has_no_kernel_multiplies_as_vllm_then_does(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import _custom_ops as ops

    def refuses(*_: object) -> None:
        raise RuntimeError("could not create a primitive descriptor for the matmul primitive")

    monkeypatch.setattr(linear, "_packed_by_onednn", refuses)
    monkeypatch.setattr(linear, "is_small", lambda *_: False)
    monkeypatch.setattr(ops, "create_onednn_mm", refuses)
    linear.onednn_takes.cache_clear()
    linear.onednn_order.cache_clear()
    try:
        assert choose_kernel((64, 64), torch.bfloat16, torch.device("cpu")) == "plain"
    finally:
        linear.onednn_takes.cache_clear()
        linear.onednn_order.cache_clear()


def test_groups_follow_decoder_layers() -> None:
    rest, layer = ["lm_head.weight", "model.embed_tokens.weight"], "model.layers."
    groups = group_by_layer([*rest, f"{layer}0.mlp.x", f"{layer}1.y", f"{layer}0.z"])
    assert groups == [[f"{layer}0.mlp.x", f"{layer}0.z"], [f"{layer}1.y"], rest]
    assert layer_of("language_model.model.layers.12.mlp.experts.3.w1") == "language_model.model.layers.12"
