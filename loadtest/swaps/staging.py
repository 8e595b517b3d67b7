"""Staging without an engine around it: what an idle instance needs for a version, and what verifying takes of that.

One real vLLM model (0.3 to 0.4 B, of a kind that is chosen, or tiny) with its stager, in this process. In turns, so
that all meet the same machine:

    staged     as it is: every published byte digested, every built word summed
    unchecked  the same with digests and sums taken out (the kernels that copy and pack are kept)
    mapped     what another instance has built already: found, mapped, its pages touched

and a memcpy of as many bytes. GB/s of the version's bytes, medians of the rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import json as jsonlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from rich.console import Console
from rich.table import Table

from loadtest.measure.machine import machine, memcpy_gbps
from loadtest.models.kinds import BENCHED, bench_checkpoints
from loadtest.models.vllm_worker import Worker, worker
from weightsync import Publisher
from weightsync.control.records import VersionRecord
from weightsync.store import SyncStore

MODEL = "staging"
WAYS = ("staged", "unchecked", "mapped")
WORKER_SLOTS = 3


def run(json: Path | None = None, *, rounds: int = 5, small: bool = False, kind: str = "dense") -> dict[str, Any]:
    """Measure, print a table, and write the figures to `json`; returns them."""
    from safetensors.torch import load_file

    (checkpoint,) = bench_checkpoints(Path("runs") / "bench", kind, small=small, count=1)
    tensors = load_file(checkpoint / "model.safetensors")
    nbytes = sum(t.nbytes for t in tensors.values())
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm", prefix="hotswap-staging-")))
        stack.enter_context(patch.dict(os.environ, {"HOTSWAP_ARENA": str(directory)}))
        store = f"sqlite://{directory}/store.db"
        SyncStore(store).close()
        publisher = stack.enter_context(Publisher(store, model=MODEL))
        builder, mapper = (stack.enter_context(worker(checkpoint)) for _ in range(2))
        for number in range(WORKER_SLOTS + rounds):  # the first ones fault in the slots
            warm = number < WORKER_SLOTS
            for way in ("staged", "unchecked"):
                record = _publish(publisher, tensors)
                with contextlib.ExitStack() as patches:
                    if way == "unchecked":
                        patches.enter_context(unchecked())
                    elapsed = _stage(builder, record)
                mapped = _stage(mapper, record)
                if not warm:
                    seconds[way].append(elapsed)
                    seconds["mapped"].append(mapped)
        memcpy = memcpy_gbps(nbytes)
    return _report(json, kind, nbytes, memcpy, seconds)


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """No digest is taken of what is read and no sum of what is built; bytes still go where they belong."""
    from weightsync.vllm_engine.staging import build, published, sums

    def pack(words: Any, target: Any, row: int = 0, col: int = 0) -> int:
        return _pack_only(words, target)

    def read(self: Any, name: str, box: Any) -> None:
        self._pace(0)

    with contextlib.ExitStack() as stack:
        for owner, name, double in (
            (build, "pack_rectangle", pack),
            (sums, "rectangle", lambda *_: 0),
            (published, "rectangle", lambda *_: 0),
            (build, "packed_rectangle", lambda *_: 0),
            (build, "compare", lambda *_: None),
            (published.Published, "read", read),
            (published.Published, "finish", lambda _: None),
        ):
            stack.enter_context(patch.object(owner, name, double))
        yield


def _pack_only(words: Any, target: Any) -> int:
    """The packing of `checksum_numba.pack` and `pack_words`, and nothing summed."""
    kernel = _pack_kernel()
    stride = words.strides[0] // 4
    flat = np.lib.stride_tricks.as_strided(words.view(np.int32), (words.shape[0] * stride,), (4,))
    if target.itemsize == 4:
        kernel(flat, stride, target)
        return 0
    pairs = np.empty((target.shape[0], target.shape[1] // 2, target.shape[2]), np.int32)
    kernel(flat, stride, pairs)
    np.copyto(target[:, ::2], pairs, casting="unsafe")
    np.copyto(target[:, 1::2], pairs >> 16, casting="unsafe")
    return 0


_kernels: list[Callable[..., None]] = []


def _pack_kernel() -> Callable[..., None]:
    if not _kernels:
        from numba import njit  # type: ignore[import-untyped]

        _kernels.append(njit(nogil=True)(_pack))
    return _kernels[0]


def _pack(flat: Any, stride: Any, target: Any) -> None:
    half, lanes = target.shape[1], target.shape[2]
    for block in range(target.shape[0]):
        for k in range(0, half, 16):
            for n in range(0, lanes, 4):
                at = (block * lanes + n) * stride + k
                row0, row1 = flat[at : at + 16], flat[at + stride : at + stride + 16]
                row2, row3 = flat[at + 2 * stride : at + 2 * stride + 16], flat[at + 3 * stride : at + 3 * stride + 16]
                tile = target[block, k : k + 16, n : n + 4]
                for i in range(16):
                    tile[i, 0], tile[i, 1], tile[i, 2], tile[i, 3] = row0[i], row1[i], row2[i], row3[i]


def _publish(publisher: Publisher, tensors: dict[str, Any]) -> VersionRecord:
    version = publisher.publish(tensors.items(), activate=False)
    return next(record for record in publisher.versions() if record.version == version)


def _stage(side: Worker, record: VersionRecord) -> float:
    started = time.perf_counter()
    generation = side.stage(record)
    elapsed = time.perf_counter() - started
    generation.release()
    return elapsed


def _report(
    json: Path | None, kind: str, nbytes: int, memcpy: float, seconds: dict[str, list[float]]
) -> dict[str, Any]:
    typical = {way: statistics.median(values) for way, values in seconds.items()}
    figures: dict[str, Any] = {
        "machine": machine(),
        "kind": kind,
        "bytes": nbytes,
        "rounds": len(seconds["staged"]),
        "memcpy_gbps": memcpy,
        "gbps": {way: nbytes / 1e9 / value for way, value in typical.items()},
        "ms": {way: value * 1e3 for way, value in typical.items()},
        "verification_share_of_idle_staging": 1 - typical["unchecked"] / typical["staged"],
    }
    table = Table("way", "ms", "GB/s", title=f"staging of {nbytes / 1e9:.2f} GB, nothing else running")
    for way in WAYS:
        table.add_row(way, f"{figures['ms'][way]:.1f}", f"{figures['gbps'][way]:.2f}")
    Console().print(table)
    Console().print(
        f"memcpy {memcpy:.1f} GB/s; verification: {figures['verification_share_of_idle_staging']:.1%} of idle staging"
    )
    if json is not None:
        json.write_text(jsonlib.dumps(figures, indent=1))
    return figures


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--model-kind", choices=sorted(BENCHED), default="dense")
    options = parser.parse_args()
    run(options.json, rounds=options.rounds, small=options.small, kind=options.model_kind)
