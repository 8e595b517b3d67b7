"""Memory: the host's, and the control group's limit, to which pages of a tmpfs count too."""

from __future__ import annotations

from collections.abc import Iterator

from server.doctor.finding import Finding, fail, ok, skip
from server.doctor.needs import need_of
from server.doctor.registry import check
from server.doctor.world import World, size
from weightsync.errors import CheckpointError

CGROUP = "/sys/fs/cgroup"
NO_LIMIT = 1 << 60  # version 1 says "none" with a number of this order


@check("memory-limit", "the host's memory and the control group's limit, against `--model`")
def memory_limit(world: World) -> Iterator[Finding]:
    limit, total = group_limit(world), _host_total(world)
    if total is None:
        yield skip("/proc/meminfo cannot be read")
        return
    have = min(total, limit) if limit is not None else total
    text = f"{size(total)} in this host, " + (f"limit of the control group {size(limit)}" if limit else "no limit")
    try:
        need = need_of(world)
    except CheckpointError as error:
        yield skip(str(error))
        return
    if need is not None and have <= need.nbytes:
        mend = "Raise the limit (memory of the container or pod): pages in shared memory count, and so do the processes"
        yield fail(f"{text}; {need} alone are {size(need.nbytes)}", mend)
    else:
        yield ok(text)


def group_limit(world: World) -> int | None:
    """The smallest limit on this process's control group and those above it, bytes; None if there is none."""
    found = []
    for line in (world.read("/proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            found += _limits(world, CGROUP, path, "memory.max")
        elif "memory" in controllers.split(","):
            found += _limits(world, f"{CGROUP}/memory", path, "memory.limit_in_bytes")
    return min(found, default=None)


def _limits(world: World, mount: str, path: str, name: str) -> list[int]:
    """Of a group and all above. In a container the path may be the host's, which is not there: then the mount's own."""
    parts = [part for part in path.split("/") if part]
    texts = [world.read("/".join([mount, *parts[:depth], name])) for depth in range(len(parts) + 1)]
    return [int(text) for text in texts if text and text.isdigit() and int(text) < NO_LIMIT]


def _host_total(world: World) -> int | None:
    for line in (world.read("/proc/meminfo") or "").splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) << 10
    return None
