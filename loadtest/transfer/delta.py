"""Savings by differences: `hotswap bench delta --json FILE`.

1. How many elements a training step changes in bf16, and what a delta of it takes (delta_training.py).
2. How fast a 0.4 B model is encoded and applied at that density, one process, in memory.
3. From `publish` to a version that is ready to be staged, through a link shaped to 1 and 10 Gbit/s: as a delta, in
   full, and in full without compression ("plain"). Trainer, gateway and network each have their own processes
   (links.py, delta_trainer.py).
"""

from __future__ import annotations

import io
import json as jsonlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from loadtest.hosts.certificates import self_signed
from loadtest.hosts.links import Link, LinkUnavailable, shaped_link, wait_listening
from loadtest.measure.machine import memcpy_gbps
from loadtest.measure.run import with_machine
from loadtest.models.checkpoints import BENCH_SHAPE, TINY_SHAPE
from loadtest.transfer.delta_trainer import random_weights, step
from weightsync.format.manifest import Schema, TensorSpec, digest_of
from weightsync.publish.delta import Base, DeltaHeader, DeltaReader, DeltaWriter, apply_delta
from weightsync.publish.writer import copy_sums

DIGEST = "0" * 32
DENSITY_OF = "GRPO, lr 1e-6"
LINKS = (1.0, 10.0)
WAYS = ("delta", "full", "plain")
KEY = "a-key-for-the-delta-benchmark"


def run(json: Path | None, *, repeats: int = 3, small: bool = False, share: float | None = None) -> dict[str, Any]:
    """Measure everything, print the tables, write the figures to `json`. With `share` nothing is trained."""
    figures: dict[str, Any] = {"memcpy_gbps": memcpy_gbps(), "load_average": os.getloadavg()}
    out = Console()
    if share is None:
        from loadtest.transfer import delta_training

        work = Path("runs/delta")
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        figures["training"] = delta_training.measure(work)
        share = float(figures["training"][DENSITY_OF]["changed_share"]["median"])
        _print_training(out, figures["training"])
    figures["share"] = share
    figures["codec"] = codec(share, repeats, small=small)
    _print_codec(out, figures["codec"])
    figures["links"] = {f"{gbit:g} Gbit/s": through(gbit, share, repeats, small=small) for gbit in LINKS}
    _print_links(out, figures["links"])
    return with_machine(figures, json)


class Slots:
    """A base to read and a place to write, without a store: what applying costs, and nothing else."""

    manifest_digest = DIGEST

    def __init__(self, tensors: dict[str, Any], schema: Schema) -> None:
        self._tensors, self.manifest = tensors, self
        self.schema = schema
        self._target = {name: np.zeros(tensor.nbytes, np.uint8) for name, tensor in tensors.items()}

    def buffer(self, name: str) -> Any:
        return _flat(self._tensors[name])

    def write(self, name: str, tensor: Any) -> str:
        return copy_sums(self._target[name].data, tensor, tensor.spec).digest


def codec(share: float, repeats: int, *, small: bool) -> dict[str, Any]:
    """Encoding and applying in memory, best of `repeats`; rates in GB of model per second."""
    base = random_weights(TINY_SHAPE if small else BENCH_SHAPE)
    new = {name: tensor.copy() for name, tensor in base.items()}
    step(new, share, seed=1)
    rows = {n: (TensorSpec("bfloat16", t.shape), digest_of(_flat(t).data)) for n, t in new.items()}
    header = DeltaHeader("bench", rows, Base(1, DIGEST))
    nbytes = header.nbytes
    found: dict[str, Any] = {"nbytes": nbytes, "share": share}
    target, source = (lambda n: _flat(new[n])), (lambda n: _flat(base[n]))
    raw = b""
    for threads in (1, 2):
        writer = DeltaWriter(header, target, source, threads=threads)
        times, cpu = [], []
        for _ in range(repeats):
            started, used = time.perf_counter(), time.process_time()
            raw = b"".join(writer)
            times.append(time.perf_counter() - started)
            cpu.append(time.process_time() - used)
        found[f"encode_gbps_{threads}"] = nbytes / min(times) / 1e9
        found["encode_gb_per_cpu_s"] = nbytes / min(cpu) / 1e9
    slots: Any = Slots(base, header.schema)
    times, cpu = [], []
    for _ in range(repeats + 1):  # the first faults the target's pages in
        started, used = time.perf_counter(), time.process_time()
        apply_delta(DeltaReader(io.BytesIO(raw)), slots, slots)
        times.append(time.perf_counter() - started)
        cpu.append(time.process_time() - used)
    found |= {"apply_gbps": nbytes / min(times) / 1e9, "apply_gb_per_cpu_s": nbytes / min(cpu) / 1e9}
    return found | {"delta_bytes": len(raw), "delta_of_raw": len(raw) / nbytes}


def through(gbit: float, share: float, repeats: int, *, small: bool) -> dict[str, Any]:
    """Publishing through a link of `gbit` Gbit/s; {"skipped": why} where there can be none."""
    try:
        with shaped_link(gbit) as link:
            return _publish_through(link, share, repeats, small=small)
    except LinkUnavailable as error:
        return {"skipped": str(error)}


def _publish_through(link: Link, share: float, repeats: int, *, small: bool) -> dict[str, Any]:
    work, arena = tempfile.mkdtemp(prefix="hotswap-bench-"), tempfile.mkdtemp(prefix="hotswap-bench-", dir="/dev/shm")
    environment = {**os.environ, "HOTSWAP_ADMIN_KEY": KEY, "HOTSWAP_ARENA": arena}
    environment["HOTSWAP_CLUSTER_TLS"] = str(self_signed(Path(work) / "tls"))  # both ends read it
    gateway = link.command(link.far, sys.executable, "-m", "server.gateway", "--model", "bench")
    gateway += ["--store", f"sqlite://{work}/store.db", "--host", link.far_address, "--port", "8000"]
    gateway += ["--admin-host", link.far_address, "--admin-port", "8001", "--log-level", "error"]
    trainer = link.command(link.near, sys.executable, "-m", "loadtest.transfer.delta_trainer")
    trainer += [f"https://{link.far_address}:8001", "bench", str(share), str(repeats), *(["--tiny"] if small else [])]
    measured = link.measure()
    try:
        with subprocess.Popen(gateway, env=environment) as server:
            try:
                wait_listening(link, 8001)
                done = subprocess.run(trainer, env=environment, check=True, capture_output=True, text=True, timeout=900)
            finally:
                server.kill()
    finally:
        shutil.rmtree(arena, ignore_errors=True)
        shutil.rmtree(work, ignore_errors=True)
    told = [jsonlib.loads(line) for line in done.stdout.splitlines()]
    ways = {way: _way([t for t in told if t["way"] == way]) for way in WAYS}
    raw_s = told[0]["nbytes"] * 8 / measured / 1e9
    return {"measured_gbit": measured, "nbytes": told[0]["nbytes"], "uncompressed_transfer_s": raw_s, **ways}


def _way(told: list[dict[str, Any]]) -> dict[str, Any]:
    seconds = [t["publish_s"] for t in told]
    return {
        "publish_s": statistics.median(seconds),
        "publish_s_all": seconds,
        "sent_bytes": statistics.median(t["sent"] for t in told),
        "apply_s": statistics.median(t["seconds"] for t in told),
        "as_meant": all(t["full"] is (t["way"] != "delta") and t["attempts"] == 1 for t in told),
    }


def _flat(tensor: Any) -> Any:
    return tensor.reshape(-1).view(np.uint8)


def _print_training(out: Console, phases: dict[str, Any]) -> None:
    table = Table("training", "steps", "elements changed per step", "delta, of raw bytes", "full, of raw bytes")
    for name, f in phases.items():
        share, size = f["changed_share"], f["delta_of_raw"]
        full = f["full_bytes"]["median"] / f["raw_bytes"]
        table.add_row(name, str(f["steps_compared"]), _range(share), _range(size), f"{full:.1%}")
    out.print(table)


def _range(spread: dict[str, float]) -> str:
    return f"{spread['median']:.2%} ({spread['min']:.2%} to {spread['max']:.2%})"


def _print_codec(out: Console, f: dict[str, Any]) -> None:
    out.print(
        f"{f['nbytes'] / 1e9:.2f} GB, {f['share']:.2%} changed: delta {f['delta_of_raw']:.2%} of it; "
        f"encode {f['encode_gbps_1']:.1f} GB/s on one thread, {f['encode_gbps_2']:.1f} on two; "
        f"apply {f['apply_gbps']:.1f} GB/s"
    )


def _print_links(out: Console, links: dict[str, Any]) -> None:
    table = Table("link", "way", "sent, MB", "publish to ready, s", "uncompressed transfer alone, s")
    for name, f in links.items():
        if "skipped" in f:
            table.add_row(name, f"skipped: {f['skipped']}")
            continue
        for way in WAYS:
            w = f[way]
            cells = [f"{w['sent_bytes'] / 1e6:.1f}", f"{w['publish_s']:.2f}", f"{f['uncompressed_transfer_s']:.2f}"]
            table.add_row(f"{name} ({f['measured_gbit']:.2f} measured)", way, *cells)
    out.print(table)
