"""A publisher of whichever release is on the path: it imports nothing but `weightsync`, and what it needs for tensors.

`python loadtest/upgrade/publishing.py STORE MODEL CHECKPOINT...` reads a line each: "first", "together", "rolling" or
"rollback", and the seconds it may take. It answers each with a line of JSON: {"version"} or {"error", "code"}. A new
version has the weights of the checkpoint whose number is its own modulo their count.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from safetensors.torch import load_file

from weightsync import Publisher
from weightsync.errors import WeightSyncError

DRAIN_S = 3.0  # what a rolling swap waits for streams


def main(store: str, model: str, paths: list[str]) -> None:
    weights = [load_file(f"{path}/model.safetensors") for path in paths]
    for line in sys.stdin:
        what, timeout_s = line.split()
        said: dict[str, Any]
        try:
            with Publisher(store, model=model) as publisher:
                said = {"version": _done(publisher, what, float(timeout_s), weights)}
        except WeightSyncError as error:
            said = {"error": str(error), "code": error.code}
        print(json.dumps(said), flush=True)


def _done(publisher: Publisher, what: str, timeout_s: float, weights: list[dict[str, Any]]) -> int | None:
    if what == "rollback":
        publisher.rollback(timeout_s=timeout_s)
        active = publisher.active()
        return active.version if active is not None else None
    schema = [(name, t.dtype, t.shape) for name, t in weights[0].items()]
    with publisher.begin(schema) as draft:
        for name, tensor in weights[draft.version % len(weights)].items():
            draft.write(name, tensor)
        version = draft.commit(activate=False)
    if what == "first":  # it becomes active with the first instance
        publisher.activate(version, wait=False, timeout_s=timeout_s)
    else:
        mode: Any = what
        publisher.activate(version, mode=mode, drain_s=DRAIN_S, timeout_s=timeout_s)
    return version


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
