"""Small models for the tests: named numpy tensors whose values tell the version."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import orjson

from weightsync import SlotReader
from weightsync.control.records import VersionRecord

CODES = {"float64": "F64", "float32": "F32", "float16": "F16", "int8": "I8"}


def model(value: float = 0.0, layers: int = 2, width: int = 8) -> dict[str, np.ndarray]:
    """`layers` matrices, an embedding and a norm, all filled with `value`."""
    tensors = {f"model.layers.{i}.mlp.weight": np.full((width, 4 * width), value, np.float32) for i in range(layers)}
    tensors["model.embed_tokens.weight"] = np.full((32, width), value, np.float16)
    tensors["model.norm.weight"] = np.full(width, value, np.float32)
    return tensors


def read_back(record: VersionRecord) -> dict[str, np.ndarray]:
    """Every tensor of a numpy-typed version, verified and copied out of its slot."""
    with SlotReader.open(record.slot, manifest_digest=record.manifest_digest, version=record.version) as reader:
        reader.verify_all()
        return {
            name: np.frombuffer(bytes(reader.buffer(name)), entry.dtype).reshape(entry.shape)
            for name, entry in reader.manifest.tensors.items()
        }


def flip(path: str | Path, at: int) -> None:
    """Changes a bit of a file; `at` counts from its end if it is negative."""
    with Path(path).open("r+b") as file:
        place = file.seek(at, os.SEEK_END if at < 0 else os.SEEK_SET)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1]))


def save_safetensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """A safetensors file, written by hand so that the tests can also write wrong ones."""
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, tensor in tensors.items():
        raw = tensor.tobytes()
        entry = {
            "dtype": CODES[str(tensor.dtype)],
            "shape": tensor.shape,
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        header[name] = entry  # type: ignore[assignment]
        data += raw
    write_raw(path, orjson.dumps(header), data)


def write_raw(path: Path, header: bytes, data: bytes, length: int | None = None) -> None:
    path.write_bytes((len(header) if length is None else length).to_bytes(8, "little") + header + data)
