"""What every layout publishes is the very checkpoint it loaded, written by the ranks that hold it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.trainer.fleet import fleet
from tests.trainer.megatron.test_conversion import CUT_FOUR, CUT_TWO, named
from tests.trainer.ranks import Ranks
from trainer.config import ParallelConfig
from weightsync.publish.quantize import Quantizer

CASES = CUT_TWO + CUT_FOUR
MODELS = sorted({model for model, _ in CASES})


@pytest.mark.sample(2)
@pytest.mark.parametrize("model", MODELS)
def test_every_layout_publishes_the_loaded_bytes(
    one_rank: Ranks, models: dict[str, str], tmp_path: Path, model: str
) -> None:
    path = models[model]
    original = load_file(Path(path) / "model.safetensors")
    received: list[dict[str, torch.Tensor]] = []
    with fleet(path, tmp_path) as running:
        # transformers holds experts fused, so the instance keeps what it is given instead of loading it.
        running.server.load = lambda tensors, version: received.append(tensors)  # type: ignore[method-assign]
        for parallel in [layout for name, layout in CASES if name == model]:
            ranks = one_rank.sharing(ParallelConfig(**parallel).world_size)
            ranks.call("publish", path=path, store=running.store_url, dtype="float32", steps=0, parallel=parallel)
            assert received[-1].keys() == original.keys()
            assert all(torch.equal(original[name], tensor) for name, tensor in received[-1].items()), parallel
    assert len(received) == len([1 for name, _ in CASES if name == model])


@pytest.mark.sample(1)
@pytest.mark.parametrize(("model", "parallel"), CUT_TWO[-2:], ids=named(CUT_TWO[-2:]))
def test_trained_weights_arrive_whole(
    two_ranks: Ranks, one_rank: Ranks, models: dict[str, str], tmp_path: Path, model: str, parallel: dict[str, Any]
) -> None:
    """Every tensor of a mixture moves in training, and reaches the instance as one rank alone would have sent it."""
    path = models[model]
    received: list[dict[str, torch.Tensor]] = []
    with fleet(path, tmp_path) as running:
        running.server.load = lambda tensors, version: received.append(tensors)  # type: ignore[method-assign]
        for ranks, layout in ((one_rank, {}), (two_ranks, parallel)):
            ranks.call("publish", path=path, store=running.store_url, dtype="float32", steps=1, parallel=layout)
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
    ("llama-tied", {"data": 2, "shard": "full"}),
    ("mixtral", {"tensor": 2, "sequence": True}),
    ("qwen3_moe", {"tensor": 2, "sequence": True}),
    ("qwen3_moe", {"data": 2, "expert": 2}),
    ("qwen3_moe", {"tensor": 2, "sequence": True, "expert": 2, "expert_tensor": 1}),
]


@pytest.mark.sample(3)
@pytest.mark.parametrize("quantize", SCHEMES, ids=lambda scheme: scheme["scheme"])
@pytest.mark.parametrize(("model", "parallel"), QUANTIZED, ids=named(QUANTIZED))
def test_quantised_versions_are_those_of_the_export(
    one_rank: Ranks,
    models: dict[str, str],
    tmp_path: Path,
    model: str,
    parallel: dict[str, Any],
    quantize: dict[str, Any],
) -> None:
    """Bit for bit what `Quantizer` makes of the whole bfloat16 tensors, whatever ranks cut through them."""
    ranks = one_rank.sharing(ParallelConfig(**parallel).world_size)
    received: list[dict[str, torch.Tensor]] = []
    with fleet(models[model], tmp_path) as running:
        running.server.load = lambda tensors, version: received.append(tensors)  # type: ignore[method-assign]
        arguments = {"path": models[model], "store": running.store_url, "directory": str(tmp_path)}
        written = ranks.call("publish_quantized", **arguments, parallel=parallel, quantize=quantize)
    exported = {name: tensor for file in tmp_path.glob("*.safetensors") for name, tensor in load_file(file).items()}
    expected = dict(Quantizer(**quantize).tensors(exported.items()))
    (found,) = received
    assert len(expected) > len(exported)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype is tensor.dtype
        assert torch.equal(found[name].view(torch.uint8), tensor.contiguous().view(torch.uint8)), name
    routers = [name for name in found if name.endswith(".gate.weight")]
    assert all(found[name].dtype is torch.bfloat16 for name in routers)
    if quantize["scheme"] != "w4a16" and "shard" not in parallel:
        assert all(share > 0 for (share,) in written), "one rank quantises for all"
