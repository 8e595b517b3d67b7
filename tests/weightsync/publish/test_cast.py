"""Checkpoints in another dtype than the served one: every number is rounded as torch does it, without torch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from weightsync.format.manifest import Schema, TensorSpec
from weightsync.publish.cast import CASTS, cast_schema, converted
from weightsync.publish.checkpoint import Checkpoint
from weightsync.publish.writer import copy_sums

EDGES = [0.0, -0.0, 1.0, 1.00390625, 1.01171875, 65504.0, 65520.0, 3.4e38, -3.4e38, 1e-45, 6e-8, float("inf")]
PAIRS = [(given, wanted) for given in CASTS for wanted in CASTS if given != wanted]


@pytest.mark.parametrize(("given", "wanted"), PAIRS)
def test_each_number_of_a_file_is_rounded_as_torch_rounds_it(given: str, wanted: str, tmp_path: Path) -> None:
    """Over several chunks of the writer, with ties, overflow, subnormals and NaN."""
    generator = torch.Generator().manual_seed(7)
    bits = torch.randint(-(2**31), 2**31, (400_001,), generator=generator, dtype=torch.int64).to(torch.int32)
    numbers = torch.cat([torch.tensor(EDGES), bits.view(torch.float32), torch.randn(9, generator=generator)])
    tensor = numbers.to(getattr(torch, given))
    save_file({"a": tensor}, tmp_path / "model.safetensors")
    spec = TensorSpec(wanted, tuple(tensor.shape))
    target = bytearray(spec.nbytes)
    for name, stored in Checkpoint(tmp_path).tensors():
        made = converted(stored, spec)
        assert made.spec == spec
        copy_sums(memoryview(target), made, spec)
        assert name == "a"
    found, expected = torch.frombuffer(target, dtype=getattr(torch, wanted)), tensor.to(getattr(torch, wanted))
    assert torch.equal(torch.isnan(found), torch.isnan(expected))
    assert torch.equal(torch.nan_to_num(found), torch.nan_to_num(expected))


def test_only_numbers_without_scales_change() -> None:
    given = {"a": "float32", "b": "float32", "c": "int8", "d": "float8_e4m3fn", "new": "float32", "same": "bfloat16"}
    served = {"a": "bfloat16", "b": "int8", "c": "bfloat16", "d": "bfloat16", "same": "bfloat16"}
    there, here = (Schema({n: TensorSpec(d, (2,)) for n, d in side.items()}) for side in (given, served))
    found = {name: spec.dtype for name, spec in cast_schema(there, here).tensors.items()}
    assert found == given | {"a": "bfloat16"}
    assert cast_schema(there, None) == there
    for tensor in (torch.ones(2, dtype=torch.int8), np.ones(2, np.float32)):
        assert converted(tensor, TensorSpec("bfloat16", (2,))) is tensor, "numpy has no bfloat16"
    assert converted(np.ones(2), TensorSpec("float32", (2,))).dtype == np.float32
