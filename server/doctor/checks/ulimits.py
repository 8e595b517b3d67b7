"""Limits on open files and on memory that may be pinned."""

from __future__ import annotations

import resource
from collections.abc import Iterator

from server.doctor.checks.rdma import devices
from server.doctor.finding import Finding, fail, ok, warn
from server.doctor.registry import check
from server.doctor.world import World, size

FILES_WANTED = 16_384  # a gateway holds two for each stream, and takes 10,000 connections by default
FILES_NEEDED = 1024


@check("open-files", "how many files and connections a process may hold open")
def open_files(world: World) -> Iterator[Finding]:
    have = world.limit(resource.RLIMIT_NOFILE)
    mend = f"ulimit -n {FILES_WANTED} (LimitNOFILE= of a systemd unit, --ulimit nofile= of a container)"
    if have == resource.RLIM_INFINITY or have >= FILES_WANTED:
        yield ok("no limit" if have == resource.RLIM_INFINITY else f"{have:,}")
    elif have >= FILES_NEEDED:
        yield warn(f"{have:,}: a gateway refuses connections beyond about {have // 2:,}", mend)
    else:
        yield fail(f"{have:,}: too few even for the engine's own files", mend)


@check("locked-memory", "how much memory may be pinned, which RDMA does with whole slots")
def locked_memory(world: World) -> Iterator[Finding]:
    have = world.limit(resource.RLIMIT_MEMLOCK)
    if have == resource.RLIM_INFINITY:
        yield ok("no limit")
    elif devices(world):
        mend = "ulimit -l unlimited (LimitMEMLOCK=infinity; in a container --ulimit memlock=-1 or CAP_IPC_LOCK)"
        yield fail(f"{size(have)}: slots cannot be registered with the RDMA devices here", mend)
    else:
        yield ok(f"{size(have)}; nothing here pins memory")
