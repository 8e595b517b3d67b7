"""Bytes: how they are written, how many this process holds, and how many there are."""

from __future__ import annotations

import os
from pathlib import Path

import torch

GIB = 2**30


def gib(nbytes: int) -> str:
    """In GiB, or MiB below a tenth of one."""
    return f"{nbytes / GIB:.2f} GiB" if nbytes >= GIB / 10 else f"{nbytes / 2**20:.1f} MiB"


def private_bytes(pid: int | None = None) -> int:
    """Anonymous resident memory of a process (RssAnon): what it alone keeps in RAM."""
    for line in Path(f"/proc/{pid or os.getpid()}/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    return 0


def device_bytes() -> int:
    """All the memory of this rank's GPU; without one, of this host, or of the container if that is less."""
    if torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.exists() else "max"
    return min(total, int(text)) if text.isdigit() else total
