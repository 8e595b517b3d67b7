"""A trainer's side of a swap: weights held in memory, published on demand; a process of its own, as a trainer is.

`python -m loadtest.workload.publisher STORE MODEL CHECKPOINT...` reads a checkpoint number a line and answers each with
one JSON line: {"version", "publish_ms"}. Nothing is swapped in.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import orjson
from safetensors.torch import load_file

from weightsync import Publisher

Tensors = dict[str, Any]


def main(store: str, model: str, checkpoints: list[str]) -> None:
    files = dict[tuple[int, int], Tensors]()
    contents = [_in_memory(Path(path), files) for path in checkpoints]
    with Publisher(store, model=model) as publisher:
        for line in sys.stdin:
            started = time.perf_counter()
            version = publisher.publish(contents[int(line)].items(), step=0, activate=False, wait=False)
            elapsed = (time.perf_counter() - started) * 1e3
            print(orjson.dumps({"version": version, "publish_ms": elapsed}).decode(), flush=True)


def _in_memory(path: Path, files: dict[tuple[int, int], Tensors]) -> Tensors:
    """Copied, not mapped from the files. `files` by device and inode: one that several checkpoints link to is in memory
    once."""
    tensors: Tensors = {}
    for file in sorted(path.glob("*.safetensors")):
        found = file.stat()
        if (known := (found.st_dev, found.st_ino)) not in files:
            files[known] = {name: tensor.clone() for name, tensor in load_file(file).items()}
        tensors |= files[known]
    return tensors


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
