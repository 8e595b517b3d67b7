"""A trainer's side of a swap: weights held in memory, published on demand; a process of its own, as a trainer is.

`python -m loadtest.workload.publisher STORE MODEL CHECKPOINT...` reads a checkpoint number a line and answers each with
one JSON line: {"version", "publish_ms"}.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import orjson
from safetensors.torch import load_file

from weightsync import Publisher


def main(store: str, model: str, checkpoints: list[str]) -> None:
    weights = [load_file(Path(path) / "model.safetensors") for path in checkpoints]
    for tensors in weights:
        for name, tensor in tensors.items():
            tensors[name] = tensor.clone()  # in memory, not mapped from the file
    with Publisher(store, model=model) as publisher:
        for line in sys.stdin:
            started = time.perf_counter()
            version = publisher.publish(weights[int(line)].items(), step=0, activate=False)
            elapsed = (time.perf_counter() - started) * 1e3
            print(orjson.dumps({"version": version, "publish_ms": elapsed}).decode(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
