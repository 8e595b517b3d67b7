"""The kernel that multiplies by a matrix, and what it computes; what vLLM's kernels for adapters compute in a worker of
ours; which tensors are built together; and which processing is recognised as moving words alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.cpu import bf16_only
from weightsync.vllm_engine.kernels import FLAGS, CpuKind, cpu_kind
from weightsync.vllm_engine.model import linear
from weightsync.vllm_engine.model.linear import WORD, choose_kernel, onednn_takes, pack_into
from weightsync.vllm_engine.model.moves import SHORT, Move, Moved, random_words, recognise
from weightsync.vllm_engine.model.placement import group_by_layer, layer_of
from weightsync.vllm_engine.model.processing import Leaf
from weightsync.vllm_engine.staging.lora import mend_kernels

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
            pack_into(packed, weight, linear.lanes(out, inner, dtype))
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


# moves of words -------------------------------------------------------------------------------------------------------


def packed(tensor: torch.Tensor, lanes: int, word: int = WORD) -> torch.Tensor:
    """Each matrix of it, packed on its own."""
    made = torch.empty_like(tensor)
    for target, source in zip(made.view(-1, *tensor.shape[-2:]), tensor.view(-1, *tensor.shape[-2:]), strict=True):
        pack_into(target, source, lanes, word)
    return made


def leaf(made: torch.Tensor) -> Leaf:
    return Leaf("layer.x", torch.empty_like(made), made)


@pytest.mark.parametrize(
    ("dtype", "lanes", "word"),
    [(dtype, lanes, WORD) for dtype in (torch.bfloat16, torch.float32) for lanes in (0, 16, 32, 48, 64)]
    + [(torch.bfloat16, lanes, SHORT) for lanes in (16, 32)],
)
def test_orders_of_words(dtype: torch.dtype, lanes: int, word: int) -> None:
    """Pairs of 16-bit weights, single ones and 32-bit weights, side by side or as they were."""
    loaded = random_words({f"layer.{name}": torch.empty(3, 192, 64, dtype=dtype) for name in "ab"})
    assert all(torch.isfinite(tensor).all() for tensor in loaded.values())
    made = packed(loaded["layer.b"], lanes, word) if lanes else loaded["layer.b"].clone()
    assert recognise(loaded, [leaf(made)]) == {"layer.x": Move("layer.b", lanes, word)}


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


# adapters -------------------------------------------------------------------------------------------------------------

IN, OUT, RANK = 16, 32, 4
DOWN, UP = torch.randn(2, 1, RANK, IN), torch.randn(2, 1, OUT, RANK)  # of two adapters: all places are taken


@pytest.fixture
def mended(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Mends vLLM's kernels for the time of a test."""
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    wrapper = punica_cpu.PunicaWrapperCPU
    kernels = [(owner, name) for owner in (lora_ops, punica_cpu) for name in ("bgmv_shrink", "bgmv_expand")]
    for owner, name in (*kernels, (wrapper, "add_lora_logits")):
        plain = getattr(getattr(owner, name), "__wrapped__", getattr(owner, name))
        monkeypatch.setattr(owner, name, plain)
    return lambda: mend_kernels(SimpleNamespace(lora_config=object(), device=torch.device("cpu")))


def wrapper_of(sequences: tuple[int, ...], *, prefill: bool = True) -> Any:
    """vLLM's own, for tokens of adapters 1 and 2, or of none (0)."""
    from vllm.lora.layers.utils import LoRAMapping
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    wrapper = PunicaWrapperCPU(64, 8, "cpu")
    wrapper.update_metadata(LoRAMapping(sequences, sequences, prefill), [1, 2], 2, OUT)
    return wrapper


@pytest.mark.parametrize("prefill", [True, False])
def test_a_token_of_the_base_model_gets_nothing_of_an_adapter_beside_it(mended: Any, prefill: bool) -> None:
    tokens = torch.randn(2, IN)

    def answered() -> torch.Tensor:
        found = torch.zeros(2, OUT)
        wrapper_of((1, 0), prefill=prefill).add_lora_linear(found, tokens, (DOWN,), (UP,), 1.0, (OUT,))
        return found

    assert answered()[1].any(), "vLLM's kernels know of no adapter now: nothing is to be mended any more"
    mended()
    found = answered()
    torch.testing.assert_close(found[0], UP[0, 0] @ (DOWN[0, 0] @ tokens[0]), rtol=1e-4, atol=1e-4)
    assert not found[1].any()


@pytest.mark.parametrize("prefill", [True, False])
def test_a_token_of_the_base_model_has_its_own_embedding(mended: Any, prefill: bool) -> None:
    rows = torch.randn(2, RANK)

    def answered() -> torch.Tensor:
        found = torch.zeros(2, OUT)
        wrapper_of((1, 0), prefill=prefill).add_lora_embedding(found, rows, UP)
        return found

    assert answered()[1].any(), "vLLM's kernels know of no adapter now: nothing is to be mended any more"
    mended()
    found = answered()
    torch.testing.assert_close(found[0], UP[0, 0] @ rows[0], rtol=1e-4, atol=1e-4)
    assert not found[1].any()


def test_prompts_have_log_probs_where_adapters_reach_the_head(mended: Any) -> None:
    """Two sequences get a token, and a prompt of five tokens its log-probs, which ended the engine."""
    wrapper = wrapper_of((1, 2))
    prompt, sequences = torch.randn(5, IN), torch.randn(2, IN)
    with pytest.raises(RuntimeError, match="does not broadcast"):
        wrapper.add_lora_logits(torch.zeros(5, OUT), prompt, DOWN, UP, 1.0)
    mended()
    logits = torch.zeros(5, OUT)
    wrapper.add_lora_logits(logits, prompt, DOWN, UP, 1.0)
    assert not logits.any()
    logits = torch.zeros(2, OUT)
    wrapper.add_lora_logits(logits, sequences, DOWN, UP, 1.0)
    expected = torch.stack([UP[i, 0] @ (DOWN[i, 0] @ sequences[i]) for i in range(2)])
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
