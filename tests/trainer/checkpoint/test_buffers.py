"""The host memory that copies of shards lie in."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from trainer.checkpoint import shards
from trainer.checkpoint.shards import Buffers


def test_a_copy_is_pinned_once_and_as_large_as_its_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan counts it to the byte. Shards have all kinds of shapes: none at all, and no numbers."""
    asked: list[tuple[int, str]] = []

    def memory(nbytes: int, device: torch.device) -> tuple[torch.Tensor, int]:
        asked.append((nbytes, device.type))
        return torch.empty(nbytes, dtype=torch.uint8), 0

    monkeypatch.setattr(shards, "pinned", memory)
    buffers, index = Buffers(), MetadataIndex("weight")
    for shape, dtype in (((3, 5), torch.bfloat16), ((), torch.float32), ((0, 4), torch.float32)):
        for value in (1.0, 2.0):
            tensor = torch.full(shape, value, dtype=dtype)
            assert torch.equal(buffers.copy("actor", index, tensor), tensor)
    assert asked == [(30, "cpu"), (4, "cpu"), (0, "cpu")]
