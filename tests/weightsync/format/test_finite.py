"""NaN and infinities are found in every type of element, wherever they lie, and nothing else is taken for them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightsync.format.fingerprint import is_finite

TYPES = ["float64", "float32", "bfloat16", "float16", "float8_e5m2", "float8_e4m3fn"]
WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.view(torch.uint8).numpy().tobytes())


@pytest.mark.parametrize("dtype", TYPES)
def test_every_word_is_judged_as_torch_judges_it(dtype: str) -> None:
    """All words of the narrow types; of the wide ones those around every limit, and many others."""
    kind = getattr(torch, dtype)
    word = WORDS[kind.itemsize]
    if kind.itemsize <= 2:
        words = torch.arange(1 << (8 * kind.itemsize)).to(word)
    else:
        info = torch.iinfo(word)
        edges = [torch.tensor(v, dtype=kind).view(word).item() for v in (torch.inf, -torch.inf, 0.0, -0.0, torch.nan)]
        near = [min(max(edge + step, info.min), info.max) for edge in edges for step in range(-3, 4)]
        words = torch.tensor([*near, info.min, info.max, *range(-100, 100)], dtype=word)
    expected = torch.isfinite(words.view(kind).float() if kind.itemsize == 1 else words.view(kind))
    for one, finite in zip(words, expected.tolist(), strict=True):
        assert is_finite(bits(one.reshape(1)), dtype) == finite, one


@pytest.mark.parametrize("dtype", TYPES)
@given(at=st.integers(0, 999), sign=st.sampled_from([1.0, -1.0]))
def test_one_among_many(dtype: str, at: int, sign: float) -> None:
    values = torch.randn(1000).to(getattr(torch, dtype))
    assert is_finite(bits(values), dtype)
    values[at] = sign * torch.nan
    assert not is_finite(bits(values), dtype)


def test_what_has_neither() -> None:
    assert is_finite(b"\xff" * 64, "int8")
    assert is_finite(b"\xff" * 64, "uint8")
    assert is_finite(b"", "float32")
