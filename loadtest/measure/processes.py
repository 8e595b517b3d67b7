"""CPU and memory that processes and all that they have started take, and the cores on which they may run."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable

import psutil


def tree(pid: int) -> list[psutil.Process]:
    """A process and its living descendants. Raises psutil.NoSuchProcess."""
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


def cpu_seconds_of(pid: int) -> float:
    """Of a process and all that it has started, with those that have ended."""
    times = [process.cpu_times() for process in tree(pid)]
    return sum(t.user + t.system + t.children_user + t.children_system for t in times)


def private_mb(pid: int) -> float:
    """The memory that a process and its children share with nobody, in MB."""
    return sum(process.memory_full_info().uss for process in tree(pid)) / 1e6


def pin(pid: int, cores: Iterable[int], *, but: str = "") -> None:
    """Keep a process, with all its threads and descendants, to these cores; what they start later inherits it. `but`:
    the beginning of a title whose processes stay where they are."""
    for process in tree(pid):
        if but and "".join(process.cmdline()).startswith(but):
            continue
        for thread in process.threads():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(thread.id, cores)
