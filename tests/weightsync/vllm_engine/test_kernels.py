"""Packing, layouts and layout slots, without an engine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.lacking import bf16_only
from tests.weightsync.memory.test_arena import small_file_system
from weightsync.vllm_engine.placement import group_by_layer, layer_of
from weightsync.vllm_engine.pool import HEADER, LayoutPool, LayoutPoolError, Notes


@bf16_only
@pytest.mark.engine
@pytest.mark.parametrize("shape", [(32, 64), (48, 32), (1040, 96), (4096, 256), (176, 2816)])
def test_pack_in_pieces_equals_pack_as_a_whole(shape: tuple[int, int]) -> None:
    import vllm._custom_ops  # noqa: F401 - loads the kernels

    from weightsync.vllm_engine import layout

    weight = torch.randn(shape).bfloat16()
    target = torch.zeros_like(weight)
    layout.pack_into(target, weight)
    assert torch.equal(target, torch.ops._C.convert_weight_packed(weight))


@bf16_only
@pytest.mark.engine
@pytest.mark.parametrize("bias", [True, False])
def test_kernels_agree(bias: bool) -> None:
    """packed, oneDNN and plain compute the same function, up to bf16 rounding."""
    import vllm._custom_ops  # noqa: F401 - loads the kernels

    from weightsync.vllm_engine import layout

    torch.manual_seed(0)
    weight, x = torch.randn(96, 128).bfloat16(), torch.randn(7, 128).bfloat16()
    b = torch.randn(96).bfloat16() if bias else None
    packed = torch.empty_like(weight)
    layout.pack_into(packed, weight)
    expected = torch.nn.functional.linear(x.float(), weight.float(), None if b is None else b.float())
    got = layout.packed_linear(packed)(x, weight, None if b is None else b.float())
    for y in (got, layout.onednn_linear(weight)(x, weight, b), layout.plain_linear(x, weight, b)):
        torch.testing.assert_close(y.float(), expected, rtol=2e-2, atol=0.15)


def test_choice_of_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    from weightsync.vllm_engine.layout import choose_kernel, onednn_takes

    cpu, bf16 = torch.device("cpu"), torch.bfloat16
    general = "onednn" if onednn_takes(bf16) else "plain"  # on a CPU without AVX-512
    fast = "packed" if torch.cpu._is_avx512_bf16_supported() else general
    assert choose_kernel((64, 64), bf16, cpu) == fast
    assert choose_kernel((64, 63), bf16, cpu) == general
    assert choose_kernel((64, 64), torch.float32, cpu) == "onednn"
    assert choose_kernel((64, 64), bf16, torch.device("cuda")) == "plain"
    monkeypatch.setenv("HOTSWAP_LINEAR_KERNEL", "onednn")
    assert choose_kernel((64, 64), bf16, cpu) == general
    monkeypatch.setenv("HOTSWAP_LINEAR_KERNEL", "plain")
    assert choose_kernel((64, 64), bf16, cpu) == "plain"


def test_a_cpu_for_which_onednn_has_no_kernel_multiplies_as_vllm_then_does(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import _custom_ops as ops

    from weightsync.vllm_engine.layout import choose_kernel, onednn_takes

    def refuses(*_: object) -> None:
        raise RuntimeError("could not create a primitive descriptor for the matmul primitive")

    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    monkeypatch.setattr(ops, "create_onednn_mm", refuses)
    onednn_takes.cache_clear()
    try:
        assert choose_kernel((64, 64), torch.bfloat16, torch.device("cpu")) == "plain"
    finally:
        onednn_takes.cache_clear()


def test_groups_follow_decoder_layers() -> None:
    names = [
        "lm_head.weight",
        "model.embed_tokens.weight",
        "model.layers.0.mlp.x",
        "model.layers.1.y",
        "model.layers.0.z",
    ]
    groups = group_by_layer(names)
    assert groups[0] == ["model.layers.0.mlp.x", "model.layers.0.z"]
    assert groups[-1] == ["lm_head.weight", "model.embed_tokens.weight"]
    assert layer_of("language_model.model.layers.12.mlp.experts.3.w1") == "language_model.model.layers.12"


def test_slot_is_built_once_and_shared(tmp_path: Path) -> None:
    pool, other = LayoutPool(tmp_path, "f", 1000), LayoutPool(tmp_path, "f", 1000)
    slot = pool.acquire("v1")
    assert not slot.built
    slot.data.fill_(7)
    notes = Notes({"w": [[1, 2, 0, 1, 0, 2, 7]]}, {"attn._k_scale_float": 0.5})
    slot.seal("v1", notes)
    again = other.acquire("v1")
    assert again.built
    assert int(again.data.sum()) == 7000
    assert again.notes == notes
    assert len(list(tmp_path.glob("layout-f-[0-9]*"))) == 1


def test_slots_in_use_are_kept_and_released_ones_reused(tmp_path: Path) -> None:
    pool = LayoutPool(tmp_path, "f", 64)
    slots = []
    for key in ("v1", "v2", "v3"):
        slots.append(pool.acquire(key))
        slots[-1].seal(key, Notes())
    assert len({s.path for s in slots}) == 3
    slots[0].release()
    fourth = pool.acquire("v4")
    assert fourth.path == slots[0].path
    assert pool.acquire("v2").path == slots[1].path


def test_what_a_killed_builder_left_is_built_again(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from weightsync.vllm_engine.pool import LayoutPool\n"
        "slot = LayoutPool(Path(sys.argv[1]), 'f', 64).acquire('v1'); print('building', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) as builder:
        assert builder.stdout is not None
        assert builder.stdout.readline() == "building\n"
        pool = LayoutPool(tmp_path, "f", 64)
        with pytest.raises(LayoutPoolError, match="building v1"):
            pool.acquire("v1", timeout_s=0.05)
        os.kill(builder.pid, signal.SIGKILL)
        builder.wait()
        slot = pool.acquire("v1")
    assert not slot.built


def test_a_full_shared_memory_is_a_typed_error() -> None:
    room = 1 << 20
    with small_file_system(room) as directory:
        pool = LayoutPool(directory, "f", 2 * room)
        with pytest.raises(LayoutPoolError, match="no room"):
            pool.acquire("v1")
        assert not list(directory.glob("layout-f-[0-9]*"))


def test_header_names_the_version(tmp_path: Path) -> None:
    pool = LayoutPool(tmp_path, "f", 64)
    slot = pool.acquire("digest-of-v1")
    assert b"digest-of-v1" in slot.path.read_bytes()[:HEADER]
