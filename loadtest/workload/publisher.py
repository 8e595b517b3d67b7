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


def main(store: str, model: str, checkpoints: list[str]) -> None:
    contents = [_in_memory(Path(path)) for path in checkpoints]
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


def _in_memory(path: Path) -> tuple[str, dict[str, Any], dict[str, Any] | None]:
    """The part's name, its tensors (copied, not mapped from the file), and an adapter's configuration."""
    described = path / "adapter_config.json"
    adapter = described.exists()
    tensors = load_file(path / ("adapter_model.safetensors" if adapter else "model.safetensors"))
    part, config = (f"lora/{path.name}", orjson.loads(described.read_bytes())) if adapter else ("", None)
    return part, {name: tensor.clone() for name, tensor in tensors.items()}, config


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
