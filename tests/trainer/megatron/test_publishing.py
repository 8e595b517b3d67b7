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
