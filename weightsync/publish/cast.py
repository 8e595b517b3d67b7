"""Floating-point tensors in the dtypes that are served: a trainer's float32 masters, a checkpoint saved in float32.

Numbers are rounded to the nearest, as torch does it. Checkpoints are read without torch, so bfloat16, which numpy
does not have, is made here of the upper half of a float32.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weightsync.format.dtypes import ITEMSIZE
from weightsync.format.manifest import Schema, TensorSpec
from weightsync.publish.writer import FileTensor, FilledTensor, is_torch, read_into

CASTS = ("float64", "float32", "bfloat16", "float16")  # others have scales beside them


def cast_schema(given: Schema, served: Schema | None) -> Schema:
    """`given` with the dtypes that are `served`, where both are in CASTS."""
    known: Mapping[str, TensorSpec] = served.tensors if served is not None else {}
    return Schema({
        name: replace(spec, dtype=known[name].dtype) if name in known and _between(spec, known[name]) else spec
        for name, spec in given.tensors.items()
    })  # fmt: skip


def converted(tensor: Any, spec: TensorSpec | None) -> Any:
    """The tensor in the dtype of `spec`, if both are in CASTS; else the tensor itself."""
    if spec is None or spec.dtype not in CASTS:
        return tensor
    if isinstance(tensor, FileTensor):
        return _of_file(tensor, spec) if _between(tensor.spec, spec) else tensor
    if is_torch(tensor):
        given = str(tensor.dtype).removeprefix("torch.")
        return tensor.to(getattr(sys.modules["torch"], spec.dtype)) if given in CASTS else tensor
    if isinstance(tensor, np.ndarray) and str(tensor.dtype) in CASTS and spec.dtype != "bfloat16":
        return tensor.astype(spec.dtype)
    return tensor


def _between(given: TensorSpec, wanted: TensorSpec) -> bool:
    return given.dtype != wanted.dtype and given.dtype in CASTS and wanted.dtype in CASTS


def _of_file(stored: FileTensor, spec: TensorSpec) -> FilledTensor:
    there, here = ITEMSIZE[stored.spec.dtype], ITEMSIZE[spec.dtype]

    def fill(target: memoryview, start: int) -> None:
        raw = np.empty(len(target) // here * there, np.uint8)
        read_into(raw.data, stored, start // here * there)
        np.frombuffer(target, np.uint8)[:] = _rounded(raw, stored.spec.dtype, spec.dtype).view(np.uint8)

    return FilledTensor(replace(stored.spec, dtype=spec.dtype), fill)


def _rounded(raw: NDArray[np.uint8], given: str, wanted: str) -> NDArray[Any]:
    """`raw` holds numbers of `given`; those of `wanted`, bfloat16 as uint16. By way of float32, as torch's."""
    if given == "bfloat16":
        numbers: NDArray[Any] = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    else:
        numbers = raw.view(given)
    with np.errstate(over="ignore", invalid="ignore"):  # infinities and NaN are found when the version is staged
        if wanted == "float64":
            return numbers.astype(np.float64)
        single = numbers.astype(np.float32)
        if wanted != "bfloat16":
            return single.astype(wanted)
    bits = single.view(np.uint32)
    nearest = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(single), 0x7FC0, nearest).astype(np.uint16)
