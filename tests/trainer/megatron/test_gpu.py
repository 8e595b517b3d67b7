"""Facts that only a GPU can show: 8-bit layers, an optimizer that leaves the device, variable-length flash attention,
and what a checkpoint takes of the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.trainer.ranks import Ranks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def run(ranks: Ranks, path: str, model: dict[str, Any], **config: Any) -> dict[str, Any]:
    found: dict[str, Any] = ranks.call("on_gpu", path=path, steps=4, model={"path": path} | model, **config)[0]
    return found


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_an_offloaded_optimizer_frees_the_device(one_rank: Ranks, deep: str, dtype: str) -> None:
    optimizer = {"lr": 1e-2, "weight_decay": 0.1}
    here = run(one_rank, deep, {"dtype": dtype}, optimizer=optimizer)
    host = run(one_rank, deep, {"dtype": dtype}, optimizer=optimizer | {"offload": True})
    assert (here["states"], host["states"], host["pinned"]) == (["cuda"], ["cpu"], [True])
    assert host["losses"] == pytest.approx(here["losses"], rel=1e-3)
    assert host["bytes"] < here["bytes"]


def test_8_bits_train_close_to_16(one_rank: Ranks, deep: str) -> None:
    pytest.importorskip("transformer_engine")
    plain = run(one_rank, deep, {"dtype": "bfloat16"})["losses"]
    eight = run(one_rank, deep, {"dtype": "bfloat16", "fp8": "hybrid"})["losses"]
    assert eight == pytest.approx(plain, rel=0.05)
    assert eight != plain


@pytest.mark.parametrize("model", ["qwen2", "mixtral", "qwen3_moe"])
def test_half_precision_and_recompute_train_on_a_gpu(one_rank: Ranks, path: str) -> None:
    exact = run(one_rank, path, {})["losses"]
    half = run(one_rank, path, {"dtype": "bfloat16", "recompute": "full"})["losses"]
    assert half == pytest.approx(exact, rel=0.05)


def test_packed_rows_train_alike_by_variable_length_attention(one_rank: Ranks, deep: str) -> None:
    how: dict[str, Any] = {"path": deep, "parallel": {}, "model": {"path": deep, "dtype": "bfloat16"}}
    alone, packed = (one_rank.call("packed", **how, rows=rows)[0] for rows in (True, False))
    assert packed == [pytest.approx(step, rel=0.02) for step in alone]


def test_a_checkpoint_takes_no_tensor_of_the_device(one_rank: Ranks, deep: str) -> None:
    taken, parameters = one_rank.call("saving_on_gpu", path=deep, dtype="bfloat16")[0]
    assert taken < parameters
