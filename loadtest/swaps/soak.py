"""Ten thousand swaps under load: no wrong token, no failed request, nothing leaked.

Version v always answers token 100 + v % 4, so every token tells which weights wrote it; the clients compare that with
the label it came under. Publications, rollbacks and rolling swaps alternate. Memory, descriptors and shared memory are
compared between the end of the warm-up and the end, after the load has stopped.
"""

from __future__ import annotations

import json as jsonlib
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from loadtest.measure.processes import tree
from loadtest.measure.run import saying, up, with_machine
from server.cli.admin import AdminClient
from server.up.server import Server
from weightsync import Publisher

MODEL, CHECKPOINTS = "soak", 4
FIRST_TOKEN = 100
WARM_UP = 300
ROLLING_EVERY, ROLLBACK_EVERY = 25, 3
VLLM_ARGS = ("--max-model-len", "512", "--max-num-seqs", "16", "--kv-cache-memory-bytes", str(64 << 20))


@dataclass(frozen=True)
class Usage:
    """Bytes of shared memory and resident memory, and open descriptors, of everything `up` started."""

    shm: int
    rss: int
    fds: int
    processes: int


def run(
    json: Path | None, *, swaps: int = 10_000, clients: int = 4, instances: int = 2, minutes: float = 120.0
) -> dict[str, Any]:
    """Swap `swaps` times under load, for `minutes` at most, print the outcome, and write it to `json`; returns it."""
    work = Path("runs") / "soak"
    models = saying(work, range(FIRST_TOKEN, FIRST_TOKEN + CHECKPOINTS))
    with up(models[1], MODEL, work / "state", VLLM_ARGS, instances=instances) as server:
        report = _soak(server, models, swaps, clients, minutes)
    report = with_machine(report | {"instances": instances, "clients": clients}, json)
    Console().print_json(data=report)
    return report


def _soak(server: Server, models: list[Path], swaps: int, clients: int, minutes: float) -> dict[str, Any]:
    from safetensors.torch import load_file

    weights = [load_file(model / "model.safetensors") for model in models]
    with Publisher(server.store, model=MODEL) as publisher:
        swapper = Swapper(server, publisher, weights)
        with _clients(server.url, clients) as process:
            swapper.run(WARM_UP)
            before = usage(server)
            started = time.monotonic()
            done = swapper.run(swaps, started + 60 * minutes)
            seconds = time.monotonic() - started
            during = _result(process)
    time.sleep(1.0)
    after = usage(server)
    return {
        "swaps": done,
        "asked_for": swaps,
        "seconds": round(seconds, 1),
        "swaps_per_s": round(done / seconds, 1),
        "kinds": swapper.kinds,
        "failed_swaps": swapper.failed,
        "requests": during,
        "growth": {name: getattr(after, name) - getattr(before, name) for name in ("shm", "rss", "fds", "processes")},
        "at_start": before.__dict__,
    }


class Swapper:
    """Publishes, goes back and rolls, in turn."""

    def __init__(self, server: Server, publisher: Publisher, weights: list[dict[str, Any]]) -> None:
        self._admin, self._publisher, self._weights = AdminClient(server.state_dir), publisher, weights
        self.kinds = {"published": 0, "rolled back": 0, "rolling": 0}
        self.failed: list[str] = []

    def run(self, count: int, until: float = float("inf")) -> int:
        """Swap `count` times, or until the time is up (monotonic seconds); returns how often."""
        for number in range(1, count + 1):
            if time.monotonic() > until:
                return number - 1
            kind = self._kind(number)
            try:
                self._swap(kind)
            except Exception as error:
                self.failed.append(f"{kind} {number}: {error}")
            self.kinds[kind] += 1
        return count

    def _kind(self, number: int) -> str:
        if number % ROLLING_EVERY == 0:
            return "rolling"
        return "rolled back" if number % ROLLBACK_EVERY == 0 else "published"

    def _swap(self, kind: str) -> None:
        if kind == "rolled back":
            self._publisher.rollback()
            return
        schema = [(name, t.dtype, t.shape) for name, t in self._weights[0].items()]
        with self._publisher.begin(schema) as draft:
            for name, tensor in self._weights[draft.version % CHECKPOINTS].items():
                draft.write(name, tensor)
            version = draft.commit(activate=kind == "published")
        if kind == "published":
            self._publisher.wait_active(version)
        else:
            self._admin.call("POST", "/admin/weights/activate", {"version": version, "mode": "rolling"})


def usage(server: Server) -> Usage:
    """Resources that the server's processes hold now."""
    processes = [p for child in server.children.values() if child.alive for p in tree(child.process.pid)]
    return Usage(
        shm=sum(f.stat().st_blocks * 512 for f in server.arena.iterdir()),
        rss=sum(p.memory_full_info().uss for p in processes),
        fds=sum(p.num_fds() for p in processes),
        processes=len(processes),
    )


@contextmanager
def _clients(url: str, count: int) -> Any:
    command = [
        sys.executable,
        "-m",
        "loadtest.workload.checker",
        url,
        MODEL,
        str(count),
        str(FIRST_TOKEN),
        str(CHECKPOINTS),
    ]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def _result(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Ask the clients to finish, and what they saw."""
    output, _ = process.communicate("stop\n", timeout=120)
    return dict(jsonlib.loads(output.strip().splitlines()[-1]))
