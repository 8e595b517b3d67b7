"""Publishes a version on a host: `python -m tests.hosts.publish URL MIB VALUE`. Says its number."""

from __future__ import annotations

import sys

import numpy as np

from tests.weightsync.fleet import MODEL
from weightsync import Publisher

CHANGES = 4  # MiB of every version that VALUE decides; the rest is noise, the same in all


def tensors(mebibytes: int, value: float) -> dict[str, np.ndarray]:
    noise = np.random.default_rng(0).standard_normal((mebibytes - CHANGES) << 18, np.float32)
    return {"a.noise": noise, "b.value": np.full(CHANGES << 18, value, np.float32)}


if __name__ == "__main__":
    with Publisher(sys.argv[1], model=MODEL) as publisher:
        print(publisher.publish(tensors(int(sys.argv[2]), float(sys.argv[3])), activate=False), flush=True)
