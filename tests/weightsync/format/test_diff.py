"""What changed between two versions: counted from the bits, measured from the values, in every element type."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from weightsync import Publisher
from weightsync.errors import UnknownVersion
from weightsync.format.delta_codec import WORD
from weightsync.format.dtypes import ITEMSIZE
from weightsync.format.versions import as_floats, compare, diff


def tensors(**named: Any) -> dict[str, np.ndarray[Any, Any]]:
    return {name: np.asarray(value, np.float32) for name, value in named.items()}


def test_tensors_are_listed_by_how_far_they_moved(publisher: Publisher, store_url: str) -> None:
    rest = np.linspace(1, 2, 500)
    publisher.publish(tensors(same=rest, little=[1.0, 2.0, 4.0], much=[0.0, 8.0, -4.0, 1.0]), activate=False)
    publisher.publish(tensors(same=rest, little=[1.0, 2.5, 4.0], much=[3.0, 8.0, -4.0, 2.0]), activate=False)
    found = diff(store_url, "demo", 1, 2)
    assert [(t.name, t.state) for t in found.tensors] == [("much", "changed"), ("little", "changed"), ("same", "same")]
    much, little, same = found.tensors
    assert (much.elements, much.changed, much.max_abs, much.max_rel, much.mean_abs) == (4, 2, 3.0, 1.0, 1.0)
    assert (little.changed, little.max_abs, little.max_rel) == (1, 0.5, 0.25)
    assert little.mean_abs == pytest.approx(0.5 / 3)
    assert (same.changed, same.elements) == (0, 500)
    assert (found.changed, found.elements) == (3, 507)


def test_both_versions_must_be_held(publisher: Publisher, store_url: str) -> None:
    publisher.publish(tensors(a=[1.0]), activate=False)
    with pytest.raises(UnknownVersion):
        diff(store_url, "demo", 1, 2)


@pytest.mark.parametrize("dtype", sorted(ITEMSIZE))
def test_every_element_type_is_read_as_torch_reads_it(dtype: str) -> None:
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 256, 8 * 4096, np.uint8)
    if dtype == "bool":
        raw &= 1
    expected = torch.frombuffer(bytearray(raw), dtype=getattr(torch, dtype)).to(torch.float64).numpy()
    with np.errstate(invalid="ignore"):
        values = as_floats(raw.view(WORD[ITEMSIZE[dtype]]), dtype).astype(np.float64)
    np.testing.assert_array_equal(values, expected)


def test_a_large_tensor_in_bf16_is_measured_as_torch_does() -> None:
    generator = torch.Generator().manual_seed(0)
    old = torch.randn(1_200_000, generator=generator).bfloat16()
    new = torch.where(torch.rand(old.shape, generator=generator) < 0.01, old * 1.01, old).bfloat16()
    step = (new.float() - old.float()).abs()
    found = compare("w", "bfloat16", *(memoryview(t.view(torch.uint8).numpy()) for t in (old, new)))
    assert found.changed == int((old != new).sum()) > 5000
    assert found.max_abs == float(step.max())
    assert found.mean_abs == pytest.approx(float(step.double().mean()), rel=1e-9)
    assert found.max_rel == pytest.approx(float((step.double() / old.double().abs()).nan_to_num().max()), rel=1e-6)


def test_what_is_not_a_number_is_counted_and_not_measured() -> None:
    old = np.array([1.0, 2.0, np.nan, 3.0, 0.0], np.float32)
    new = np.array([1.0, np.inf, np.nan, 3.5, -0.0], np.float32)
    found = compare("w", "float32", memoryview(old.view(np.uint8)), memoryview(new.view(np.uint8)))
    assert (found.changed, found.not_finite, found.max_abs) == (3, 2, 0.5)  # minus zero is another bit pattern
    assert found.mean_abs == pytest.approx(0.5 / 3)


def test_nothing_is_compared_of_an_empty_tensor() -> None:
    found = compare("w", "bfloat16", memoryview(b""), memoryview(b""))
    assert (found.elements, found.changed, found.max_abs, found.mean_abs) == (0, 0, 0.0, 0.0)
