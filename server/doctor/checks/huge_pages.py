"""Huge pages: transparent ones, and those that were set aside and are missing to everything else."""

from __future__ import annotations

import re
from collections.abc import Iterator

from server.doctor.finding import Finding, ok, skip, warn
from server.doctor.registry import check
from server.doctor.world import World, size

THP = "/sys/kernel/mm/transparent_hugepage"


@check("huge-pages", "transparent huge pages, and memory set aside for others")
def huge_pages(world: World) -> Iterator[Finding]:
    processes, shared = _chosen(world.read(f"{THP}/enabled")), _chosen(world.read(f"{THP}/shmem_enabled"))
    if processes is None:
        yield skip("this kernel has no transparent huge pages")
    elif processes == "never":
        mend = f"echo madvise > {THP}/enabled"
        yield warn("transparent huge pages are off: torch cannot ask for them for large tensors", mend)
    else:
        yield ok(f"transparent: {processes} for processes, {shared or 'unknown'} for shared memory")
    yield from _set_aside(world)


def _set_aside(world: World) -> Iterator[Finding]:
    table = dict(re.findall(r"^(\w+):\s+(\d+)", world.read("/proc/meminfo") or "", re.MULTILINE))
    free = int(table.get("HugePages_Free", 0)) * int(table.get("Hugepagesize", 0)) << 10
    if free:
        mend = "sysctl vm.nr_hugepages=0, unless another program needs them: slots lie in ordinary pages"
        yield warn(f"{size(free)} are set aside as huge pages that nobody uses", mend)


def _chosen(text: str | None) -> str | None:
    """`always [madvise] never` as `madvise`."""
    found = re.search(r"\[(\w+)\]", text or "")
    return found.group(1) if found else None
