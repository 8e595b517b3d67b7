"""CPU time of everything a benchmark has started, by what each process is; and on which cores it may run."""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Iterable

import psutil

# By a word of the command line or, for vLLM's own processes, of the title; the first that fits.
ROLES = {
    "EngineCore": "engine",
    "VLLM::Worker": "engine",
    "server.gateway": "gateway",
    "server.cli": "instance",
    "loadtest.workload.publisher": "publisher",
    "loadtest.workload.streams": "clients",
}


def cpu_seconds() -> dict[str, float]:
    """By role, of this process's living descendants; their compilers and resource trackers are "other"."""
    found: dict[str, float] = defaultdict(float)
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            title = " ".join(process.cmdline())
            role = next((role for word, role in ROLES.items() if word in title), "other")
            times = process.cpu_times()
            found[role] += times.user + times.system
    own = psutil.Process().cpu_times()
    found["benchmark"] += own.user + own.system
    return dict(found)


def cpu_seconds_of(pid: int) -> float:
    """Of a process and all that it has started, with those that have ended."""
    parent = psutil.Process(pid)
    times = [process.cpu_times() for process in (parent, *parent.children(recursive=True))]
    return sum(t.user + t.system + t.children_user + t.children_system for t in times)


def pin(pid: int, cores: Iterable[int]) -> None:
    """Keep a process, with all its threads and descendants, to these cores; what they start later inherits it."""
    parent = psutil.Process(pid)
    for process in (parent, *parent.children(recursive=True)):
        for thread in process.threads():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(thread.id, cores)
