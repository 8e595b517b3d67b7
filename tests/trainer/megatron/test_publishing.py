"""Every layout publishes the very checkpoint it loaded, written by the ranks that hold it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.trainer.fleet import exported, fleet, keep, same_tensors
from tests.trainer.megatron.layouts import CUT_FOUR, CUT_TWO, FULL, SEQUENCE, SPREAD, TWO, Layout, named
from tests.trainer.ranks import Ranks
from weightsync.publish.quantize import Quantizer

CASES = TWO + CUT_FOUR
MODELS = sorted({model for model, _ in CASES})


@pytest.mark.sample(2)
@pytest.mark.parametrize("model", MODELS)
def test_every_layout_publishes_the_loaded_bytes(
    one_rank: Ranks, models: dict[str, str], tmp_path: Path, model: str
) -> None:
    original = load_file(Path(models[model]) / "model.safetensors")
    with fleet(models[model], tmp_path) as running:
        received = keep(running)
        for parallel in [layout for name, layout in CASES if name == model]:
            arguments = {"path": models[model], "store": running.store_url, "parallel": parallel}
            versions = one_rank.spread(parallel).call("publish", **arguments)
            assert all(rank == running.versions[-1:] for rank in versions)
            assert same_tensors(received[-1], original), parallel
    assert len(received) == len([1 for name, _ in CASES if name == model])


@pytest.mark.sample(1)
@pytest.mark.parametrize(("model", "parallel"), CUT_TWO[-2:], ids=named(CUT_TWO[-2:]))
def test_trained_weights_arrive_whole(
    two_ranks: Ranks, one_rank: Ranks, tmp_path: Path, path: str, parallel: Layout
) -> None:
    """Every tensor of a mixture moves in training, and reaches the instance as one rank alone would have sent it."""
    with fleet(path, tmp_path) as running:
        received = keep(running)
        for ranks, layout in ((one_rank, {}), (two_ranks, parallel)):
            ranks.call("publish", path=path, store=running.store_url, steps=1, parallel=layout)
    start, alone, again, cut = received
    for name, tensor in cut.items():
        assert torch.equal(start[name], again[name])
        assert not torch.equal(tensor, start[name]), name
        assert torch.allclose(tensor, alone[name], rtol=0, atol=2e-5), name


# The cuts of these models go through channels, blocks and groups.
SCHEMES: list[dict[str, Any]] = [
    {"scheme": "int8"},
    {"scheme": "fp8", "block": 24},
    {"scheme": "w4a16", "group_size": 16},
]
QUANTIZED: list[tuple[str, dict[str, Any]]] = [
    ("qwen2", {}),
    ("qwen2", {"tensor": 2}),
    ("llama-tied", FULL),
    ("mixtral", SEQUENCE),
    ("qwen3_moe", SEQUENCE),
    ("qwen3_moe", SPREAD),
    ("qwen3_moe", SEQUENCE | {"expert": 2, "expert_tensor": 1}),
]


@pytest.mark.sample(3)
@pytest.mark.parametrize("quantize", SCHEMES, ids=lambda scheme: scheme["scheme"])
@pytest.mark.parametrize(("model", "parallel"), QUANTIZED, ids=named(QUANTIZED))
def test_quantised_versions_are_those_of_the_export(
    one_rank: Ranks, tmp_path: Path, path: str, parallel: Layout, quantize: Any
) -> None:
    """Bit for bit what `Quantizer` makes of the whole bfloat16 tensors, whatever ranks cut through them."""
    with fleet(path, tmp_path) as running:
        received = keep(running)
        arguments = {"path": path, "store": running.store_url, "directory": str(tmp_path)}
        written = one_rank.spread(parallel).call("publish_quantized", **arguments, parallel=parallel, quantize=quantize)
    whole, (found,) = exported(tmp_path), received
    expected = dict(Quantizer(**quantize).tensors(whole.items()))
    assert len(expected) > len(whole)
    assert same_tensors(found, expected)
    routers = [name for name in found if name.endswith(".gate.weight")]
    assert all(found[name].dtype is torch.bfloat16 for name in routers)
    if quantize["scheme"] != "w4a16" and "shard" not in parallel:
        assert all(share > 0 for (share,) in written), "one rank quantises for all"
