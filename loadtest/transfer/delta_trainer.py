"""The trainer's end of a link: publishes versions of a 0.4 B model through it and prints what each took as JSON.

`python -m loadtest.transfer.delta_trainer URL MODEL SHARE REPEATS [--tiny]`: one version to begin with, then REPEATS as
differences, of which SHARE of the elements changed by one unit in the last place, then as many in
full, and as many in full and uncompressed. The admin key is in HOTSWAP_ADMIN_KEY, certificates in HOTSWAP_CLUSTER_TLS.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from loadtest.models.checkpoints import BENCH_SHAPE, TINY_SHAPE
from weightsync.publish.remote import RemotePublisher
from weightsync.tls import ClusterTls

Words = npt.NDArray[np.uint16]


def shapes(shape: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a Qwen2 model with these sizes; nothing is allocated."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(Qwen2Config(**shape))
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def random_weights(shape: dict[str, Any], seed: int = 0) -> dict[str, Words]:
    """bf16 weights as 16-bit words, normal with deviation 0.02, as such models are initialised."""
    rng = np.random.default_rng(seed)
    made = {}
    for name, size in shapes(shape).items():
        values = rng.standard_normal(int(np.prod(size)), np.float32) * np.float32(0.02)
        made[name] = (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16).reshape(size)
    return made


def step(weights: dict[str, Words], share: float, seed: int) -> None:
    """One training step: `share` of the elements, anywhere, move one unit in the last place up or down."""
    rng = np.random.default_rng(seed)
    for tensor in weights.values():
        flat = tensor.reshape(-1)
        places = np.flatnonzero(rng.random(flat.size, np.float32) < share)
        flat[places] += rng.choice(np.array([1, 0xFFFF], np.uint16), places.size)


def main(url: str, model: str, share: float, repeats: int, *, tiny: bool) -> None:
    """Publish and print."""
    key = os.environ["HOTSWAP_ADMIN_KEY"]
    cluster = ClusterTls.of_environment()
    tls = cluster.client_context() if cluster is not None else None
    weights = random_weights(TINY_SHAPE if tiny else BENCH_SHAPE)
    warm = 6  # until the server takes slots that it has used before, whose memory is there
    for way, deltas, compress in (("delta", True, True), ("full", False, True), ("plain", False, False)):
        publisher = RemotePublisher(url, key, model, deltas=deltas, compress=compress, tls=tls)
        for _ in range(warm):
            publisher.publish(weights, activate=False)
        warm = 2  # both buffers of each publisher are touched for the first time
        for number in range(repeats):
            step(weights, share, seed=number)
            started = time.perf_counter()
            version = publisher.publish(weights, activate=False)
            seconds = time.perf_counter() - started
            told = {**publisher.last, "way": way, "publish_s": seconds, "version": version}
            print(orjson.dumps(told).decode(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4]), tiny="--tiny" in sys.argv)
