"""How much of a model changes in one training step: real fine-tuning and GRPO through a live server, published in bf16.

The trainer keeps fp32 main weights and publishes after every step; every version is copied out of its slot before it is
retired. Changes of a step in bf16 depend on the learning rate above all: an update far below half a unit in the last
place rounds away until enough of them add up. So each algorithm runs at the recipe's rate, which is one for a model of
a million parameters, and at one as it is used on large models.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from loadtest.demo.recipe import Recipe, prepare_environment
from server.up.config import UpConfig
from server.up.server import Server
from trainer.tiny_model import tiny_run
from weightsync import SlotReader
from weightsync.control.records import Keys, VersionRecord
from weightsync.errors import ManifestError, SlotBusy
from weightsync.format.delta_codec import Bytes
from weightsync.format.manifest import TensorSpec
from weightsync.publish.delta import Base, DeltaHeader, DeltaWriter
from weightsync.store import SyncStore

MODEL = "delta"
POLL_S = 0.005


@dataclass(frozen=True)
class Phase:
    """One training: the recipe's algorithm, its learning rate, how many steps, and where it starts."""

    name: str
    algorithm: str
    lr: float
    steps: int
    start: str


PHASES = (
    Phase("SFT, recipe's rate", "sft", 2e-3, 120, "model"),
    Phase("SFT, lr 1e-5", "sft", 1e-5, 20, "fine-tuned"),
    Phase("GRPO, recipe's rate", "grpo", 3e-4, 20, "fine-tuned"),
    Phase("GRPO, lr 1e-5", "grpo", 1e-5, 20, "fine-tuned"),
    Phase("GRPO, lr 1e-6", "grpo", 1e-6, 20, "fine-tuned"),
)


@dataclass(frozen=True)
class Taken:
    """A version's tensors, copied out of its slot."""

    version: int
    manifest_digest: str
    rows: dict[str, tuple[TensorSpec, str]]
    buffers: dict[str, Bytes]


class Collector:
    """Copies every version that becomes ready from now on, on a thread of its own."""

    def __init__(self, store: str) -> None:
        self.taken: dict[int, Taken] = {}
        self._store, self._started, self._stop = store, threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="versions", daemon=True)
        self._thread.start()
        self._started.wait()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        with contextlib.closing(SyncStore(self._store)) as store:
            before = {record.version for record in _ready(store)}
            self._started.set()
            while not self._stop.wait(POLL_S):
                for record in _ready(store):
                    if record.version not in before | self.taken.keys():
                        with contextlib.suppress(ManifestError, SlotBusy):  # retired in this very moment
                            self.taken[record.version] = _take(record)


def _ready(store: SyncStore) -> list[VersionRecord]:
    records = [VersionRecord.from_json(kv.value) for kv in store.list(Keys(MODEL).versions)[0]]
    return [record for record in records if record.state == "ready"]


def _take(record: VersionRecord) -> Taken:
    with SlotReader.open(record.slot, manifest_digest=record.manifest_digest) as slot:
        rows = {name: (entry.spec, entry.digest) for name, entry in slot.manifest.tensors.items()}
        buffers = {name: np.frombuffer(slot.buffer(name), np.uint8).copy() for name in rows}
    return Taken(record.version, record.manifest_digest, rows, buffers)


def measure(work: Path) -> dict[str, Any]:
    """Train every phase against one server; returns the figures by phase."""
    prepare_environment()
    model = work / "model"
    subprocess.run([sys.executable, "-m", "trainer.tiny_model", str(model)], check=True, capture_output=True)
    with _server(work, _in_bf16(model, work / "served")) as server:
        return {phase.name: _train(phase, work, server) for phase in PHASES}


def _in_bf16(model: Path, target: Path) -> Path:
    """The checkpoint that the server starts from: the published versions must have its element type."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, target)
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(model / "model.safetensors").items()}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


@contextlib.contextmanager
def _server(work: Path, model: Path) -> Iterator[Server]:
    config = UpConfig(
        model=str(model),
        name=MODEL,
        port=0,
        throwaway=True,
        state_dir=work / "state",
        kv_cache_gib=0.25,
        vllm_args=("--dtype", "bfloat16", "--max-model-len", "256"),
    )
    server = Server(config)
    try:
        server.start()
        server.wait_ready(timeout_s=300.0)
        yield server
    finally:
        server.stop()


def _train(phase: Phase, work: Path, server: Server) -> dict[str, Any]:
    config = getattr(Recipe(), phase.algorithm)(work, server.url)
    config |= {"model": {"path": str(work / phase.start)}, "steps": phase.steps}
    if phase.lr != config["optimizer"]["lr"]:
        config["optimizer"] = {"lr": phase.lr}
    config |= {"publish": {"model": MODEL, "dtype": "bfloat16", "timeout_s": 120.0}}
    config |= {"save_to": str(work / ("fine-tuned" if phase.start == "model" else "trained"))}
    config.pop("eval")
    path = work / "training.yaml"
    path.write_text(yaml.safe_dump(tiny_run(config), sort_keys=False))
    collector = Collector(server.store)
    try:
        trainer = server.train(path)
        while trainer.alive:
            time.sleep(0.05)
        if trainer.process.returncode:
            raise RuntimeError(f"the trainer failed:\n{trainer.tail()}")
    finally:
        collector.stop()
    return _figures(phase, [collector.taken[v] for v in sorted(collector.taken)])


def _figures(phase: Phase, versions: list[Taken]) -> dict[str, Any]:
    """Of each pair of versions that follow each other."""
    pairs = [(a, b) for a, b in itertools.pairwise(versions) if b.version == a.version + 1]
    steps = [_compare(a, b) for a, b in pairs]
    shares = [step["changed"] / step["elements"] for step in steps]
    return {
        "algorithm": phase.algorithm,
        "lr": phase.lr,
        "steps_compared": len(steps),
        "elements": steps[0]["elements"],
        "raw_bytes": steps[0]["raw_bytes"],
        "changed_share": _spread(shares),
        "delta_bytes": _spread([step["delta_bytes"] for step in steps]),
        "full_bytes": _spread([step["full_bytes"] for step in steps]),
        "delta_of_raw": _spread([step["delta_bytes"] / step["raw_bytes"] for step in steps]),
    }


def _compare(a: Taken, b: Taken) -> dict[str, int]:
    words = [(a.buffers[n].view(np.uint16), b.buffers[n].view(np.uint16)) for n in b.buffers]
    base = DeltaWriter(DeltaHeader(MODEL, b.rows, Base(a.version, a.manifest_digest)), _of(b), _of(a))
    full = DeltaWriter(DeltaHeader(MODEL, b.rows), _of(b))
    return {
        "elements": sum(len(new) for _, new in words),
        "changed": sum(int(np.count_nonzero(old != new)) for old, new in words),
        "raw_bytes": sum(2 * len(new) for _, new in words),
        "delta_bytes": sum(map(len, base)),
        "full_bytes": sum(map(len, full)),
    }


def _of(taken: Taken) -> Any:
    return taken.buffers.__getitem__


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}
