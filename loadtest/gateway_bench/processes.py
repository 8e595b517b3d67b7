"""The processes of the benchmark: each on the core meant for it, what they used of it, and what they hold."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

STOP_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Cores:
    """Which core each part runs on. With two, client and upstream share one; with one, all do."""

    proxy: int
    client: int
    upstream: int

    @classmethod
    def available(cls) -> Cores:
        cores = sorted(os.sched_getaffinity(0))
        return cls(proxy=cores[-1], client=cores[0], upstream=cores[1] if len(cores) > 2 else cores[0])


def pinned(core: int, command: Sequence[str]) -> list[str]:
    """`command`, to be run on `core` alone, where there is a `taskset` to say so."""
    return ["taskset", "-c", str(core), *command] if shutil.which("taskset") else list(command)


@contextlib.contextmanager
def running(
    command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a group of its own, ended with all its children."""
    inherited = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=inherited | dict(environment or {}),
            start_new_session=True,
        )
    try:
        yield process
    finally:
        for sign in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, sign)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_TIMEOUT_S)
                if sign is signal.SIGTERM and not tree(process.pid)[1:]:
                    break


def tree(pid: int) -> list[int]:
    """`pid` and all that descend from it."""
    found = [pid]
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in children.read_text().split():
                found += tree(int(child))
    return found


def cpu_s(pid: int) -> float:
    """Seconds of CPU that the living threads of `pid` and its children have used (the scheduler's nanoseconds)."""
    used = 0
    for process in tree(pid):
        with contextlib.suppress(OSError):  # it has ended
            for task in os.listdir(f"/proc/{process}/task"):
                with contextlib.suppress(OSError):
                    used += int(Path(f"/proc/{process}/task/{task}/schedstat").read_text().split()[0])
    return used / 1e9


def rss_mb(pid: int) -> float:
    """Resident memory of `pid` and its children, MiB."""
    total = 0
    for process in tree(pid):
        with contextlib.suppress(OSError):
            match = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text())
            total += int(match[1]) if match else 0
    return total / 1024


def machine_cpu_s() -> tuple[float, float]:
    """Seconds of CPU the machine has been busy for, and that its host has taken away (steal), since it started."""
    ticks = [int(n) for n in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    user, nice, system, _idle, _iowait, irq, softirq, steal = ticks[:8]
    hertz = os.sysconf("SC_CLK_TCK")
    return (user + nice + system + irq + softirq) / hertz, steal / hertz


def free_port() -> int:
    """A loopback port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
