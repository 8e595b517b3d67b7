"""Checkpoints as trainers leave them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from tests.weightsync.tensors import model, save_safetensors
from weightsync.publish.checkpoint import INDEX


def write(
    directory: Path, value: float = 1.0, *, shards: int = 1, width: int = 8, sums: bool = False, dtype: Any = None
) -> Path:
    """A checkpoint whose tensors are all `value`."""
    directory.mkdir(parents=True, exist_ok=True)
    made = model(value, width=width)
    tensors = [(name, tensor if dtype is None else tensor.astype(dtype)) for name, tensor in made.items()]
    home = {}
    for index in range(shards):
        name = f"model-{index + 1:05d}-of-{shards:05d}.safetensors" if shards > 1 else "model.safetensors"
        mine = dict(tensors[index::shards])
        save_safetensors(directory / name, mine)
        home |= dict.fromkeys(mine, name)
    if shards > 1:
        (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": home}))
    (directory / "config.json").write_text("{}")
    (directory / "optimizer.pt").write_bytes(b"not for us")
    if sums:
        lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  ./{path.name}\n" for path in directory.iterdir()]
        (directory / "SHA256SUMS").write_text("".join(sorted(lines)))
    return directory
