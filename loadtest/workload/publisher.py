"""A trainer's side of a swap: weights held in memory, published on demand; a process of its own, as a trainer is.

`python -m loadtest.workload.publisher STORE MODEL CHECKPOINT...` reads a checkpoint number a line and answers each with
one JSON line: {"version", "publish_ms", "nbytes"}. A directory in PEFT's format is an adapter, published as the part
`lora/` and its name; the word `now` after the number has the version swapped in, without waiting for that.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import orjson
from safetensors.torch import load_file

from weightsync import Adapter, Publisher

Tensors = dict[str, Any]


def main(store: str, model: str, checkpoints: list[str]) -> None:
    files = dict[tuple[int, int], Tensors]()
    contents = [_in_memory(Path(path), files) for path in checkpoints]
    with Publisher(store, model=model) as publisher:
        for line in sys.stdin:
            number, *now = line.split()
            part, tensors, config = contents[int(number)]
            what = tensors.items() if config is None else Adapter(tensors, config)
            started = time.perf_counter()
            version = publisher.publish(what, part=part, step=0, activate=bool(now), wait=False)
            elapsed = (time.perf_counter() - started) * 1e3
            said = {"version": version, "publish_ms": elapsed, "nbytes": sum(t.nbytes for t in tensors.values())}
            print(orjson.dumps(said).decode(), flush=True)


def _in_memory(path: Path, files: dict[tuple[int, int], Tensors]) -> tuple[str, Tensors, dict[str, Any] | None]:
    """The part's name, its tensors (copied, not mapped from the file), and an adapter's configuration.

    `files` by device and inode: one that several checkpoints link to is in memory once.
    """
    tensors: Tensors = {}
    for file in sorted(path.glob("*.safetensors")):
        found = file.stat()
        if (known := (found.st_dev, found.st_ino)) not in files:
            files[known] = {name: tensor.clone() for name, tensor in load_file(file).items()}
        tensors |= files[known]
    described = path / "adapter_config.json"
    if not described.exists():
        return "", tensors, None
    return f"lora/{path.name}", tensors, orjson.loads(described.read_bytes())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
