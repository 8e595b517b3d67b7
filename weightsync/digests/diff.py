"""Which tensors two versions differ in, and by how much: numpy over the slots, without torch."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from weightsync.delta.codec import WORD
from weightsync.dtypes import ITEMSIZE
from weightsync.receiver import SlotReader
from weightsync.versions import Records, label, opened

BLOCK = 1 << 19  # elements
Floats = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True)
class TensorDiff:
    """One tensor. Sizes of change are of finite values; `max_rel` is over elements that were not zero.

    `state`: "changed", "same", or that it is only in one of the two ("added", "removed", "reshaped": nothing else is
    then compared). `not_finite` counts NaN and infinity in the second version.
    """

    name: str
    dtype: str
    elements: int
    state: str = "changed"
    changed: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0
    mean_abs: float = 0.0
    not_finite: int = 0


@dataclass(frozen=True)
class VersionDiff:
    """Two versions: every tensor, those that changed most (by `max_abs`) first."""

    a: int
    b: int
    tensors: tuple[TensorDiff, ...]

    @property
    def elements(self) -> int:
        return sum(t.elements for t in self.tensors)

    @property
    def changed(self) -> int:
        return sum(t.changed for t in self.tensors)


def diff(store_url: str, model: str, a: int, b: int) -> VersionDiff:
    """Compare two versions held on this host. Raises UnknownVersion, ManifestError, SlotBusy, StoreUnavailable."""
    records = Records.read(store_url, model)
    with opened(records.ready(a)) as old, opened(records.ready(b)) as new:
        found = []
        for part in old.keys() | new.keys():
            found += _diff_part(part, old.get(part), new.get(part))
    found.sort(key=lambda t: (-_rank(t), -t.changed, t.name))
    return VersionDiff(a, b, tuple(found))


def _rank(tensor: TensorDiff) -> float:
    return float("inf") if tensor.state in ("added", "removed", "reshaped") else tensor.max_abs


def _diff_part(part: str, old: SlotReader | None, new: SlotReader | None) -> list[TensorDiff]:
    before, after = (slot.manifest.tensors if slot is not None else {} for slot in (old, new))

    def one(name: str) -> TensorDiff:
        a, b = before.get(name), after.get(name)
        entry = b or a
        assert entry is not None
        shown, elements = label(part, name), entry.nbytes // ITEMSIZE[entry.dtype]
        if a is None or b is None or a.spec != b.spec:
            state = "added" if a is None else "removed" if b is None else "reshaped"
            return TensorDiff(shown, entry.dtype, elements, state)
        if a.digest == b.digest:
            return TensorDiff(shown, entry.dtype, elements, "same")
        assert old is not None
        assert new is not None
        return compare(shown, entry.dtype, old.buffer(name), new.buffer(name))

    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        return list(pool.map(one, sorted(before.keys() | after.keys())))


def compare(name: str, dtype: str, old: memoryview, new: memoryview) -> TensorDiff:
    """Two tensors of one dtype and length, from their bytes."""
    word = WORD[ITEMSIZE[dtype]]
    a, b = np.frombuffer(old, word), np.frombuffer(new, word)
    changed = not_finite = finite = 0
    max_abs = max_rel = total = 0.0
    for start in range(0, len(a), BLOCK):
        x, y = a[start : start + BLOCK], b[start : start + BLOCK]
        changed += int(np.count_nonzero(x != y))
        before, after = as_floats(x, dtype), as_floats(y, dtype)
        not_finite += int(np.count_nonzero(~np.isfinite(after)))
        with np.errstate(invalid="ignore", over="ignore"):
            steps = np.abs(after - before)
        sound = np.isfinite(steps)
        finite += int(np.count_nonzero(sound))
        total += float(np.sum(steps, where=sound, dtype=np.float64))
        max_abs = max(max_abs, float(np.max(steps, initial=0.0, where=sound)))
        max_rel = max(max_rel, _largest_ratio(steps, before, sound))
    mean = total / finite if finite else 0.0
    return TensorDiff(name, dtype, len(a), "changed", changed, max_abs, max_rel, mean, not_finite)


def _largest_ratio(steps: Floats, before: Floats, sound: npt.NDArray[np.bool_]) -> float:
    use = sound & (before != 0)
    with np.errstate(over="ignore"):
        ratios = np.divide(steps, np.abs(before), out=np.zeros(len(steps), np.float64), where=use)
    return float(np.max(ratios, initial=0.0, where=np.isfinite(ratios)))


def as_floats(words: npt.NDArray[Any], dtype: str) -> Floats:
    """The values of unsigned words as float32, or as float64 where that would lose digits."""
    with np.errstate(invalid="ignore"):  # a signalling NaN is a value like others here
        return _as_floats(words, dtype)


def _as_floats(words: npt.NDArray[Any], dtype: str) -> Floats:
    if dtype == "bfloat16":
        return (words.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype == "float8_e5m2":
        return (words.astype(np.uint16) << np.uint16(8)).view(np.float16).astype(np.float32)
    if dtype == "float8_e4m3fn":
        return _e4m3fn()[words]
    values = words.view(np.uint8 if dtype == "bool" else np.dtype(dtype))
    return values.astype(np.float32 if dtype in ("float16", "float32") else np.float64)


@cache
def _e4m3fn() -> npt.NDArray[np.float32]:
    """Every value of OCP's 8-bit float with 4 exponent bits (bias 7), 3 of mantissa, no infinity, NaN at S.1111.111."""
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    size = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    size[(codes & 127) == 127] = np.nan
    return np.where(codes & 128, -size, size).astype(np.float32)
