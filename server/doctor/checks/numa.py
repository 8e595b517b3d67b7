"""NUMA nodes: memory that is farther away from some cores."""

from __future__ import annotations

import os
from collections.abc import Iterator

from server.doctor.checks.rdma import devices
from server.doctor.finding import Finding, ok, skip, warn
from server.doctor.registry import check
from server.doctor.world import World

NODES = "/sys/devices/system/node"


@check("numa", "NUMA nodes, which of them this process may use, and where the RDMA devices are")
def numa(world: World) -> Iterator[Finding]:
    yield from judge(world, os.sched_getaffinity(0))


def judge(world: World, cores: set[int]) -> Iterator[Finding]:
    """`cores`: those this process may run on."""
    online = world.read(f"{NODES}/online")
    if online is None:
        yield skip("this kernel tells nothing of NUMA nodes")
        return
    nodes = {n: parse_list(world.read(f"{NODES}/node{n}/cpulist") or "") for n in sorted(parse_list(online))}
    used = [n for n, theirs in nodes.items() if theirs & cores]
    text = f"{len(nodes)} node(s); this process may run on {', '.join(map(str, used)) or 'none'}"
    text += "".join(f"; {d.name} is at node {world.read(f'/sys/class/infiniband/{d.name}/device/numa_node')}"
                    for d in devices(world))  # fmt: skip
    if len(used) > 1:
        mend = "Start each instance on one node: numactl --cpunodebind=N --membind=N, or VLLM_CPU_OMP_THREADS_BIND"
        yield warn(text, mend)
    else:
        yield ok(text)
    if (world.read("/proc/sys/vm/zone_reclaim_mode") or "0") != "0":
        yield warn(
            "zone_reclaim_mode is on: a full node evicts pages instead of taking another's",
            "sysctl vm.zone_reclaim_mode=0",
        )


def parse_list(text: str) -> set[int]:
    """`0-3,8` as {0, 1, 2, 3, 8}."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found
