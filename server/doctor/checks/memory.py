"""Memory: shared memory and the limits on it, open files and locked memory."""

from __future__ import annotations

import contextlib
import json
import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass

from server.doctor.plan import scratch_of
from server.doctor.registry import Finding, check, fail, ok, skip, warn
from server.doctor.world import World, arena_directory, held_nbytes, size
from weightsync.errors import CheckpointError, EngineError
from weightsync.format.manifest import Layout
from weightsync.publish.checkpoint import Checkpoint, read_config

LAYOUTS_OF_ONE = 3  # live, previous and staged
LAYOUTS_OF_MORE = 5  # instances that are not at the same version for a moment hold more


@dataclass(frozen=True)
class Need:
    """Bytes in shared memory on one host, and on GPUs what their workers pin: then `layouts` is 0."""

    slot_nbytes: int
    slots: int
    layout_nbytes: int
    layouts: int
    pinned_nbytes: int = 0

    @property
    def nbytes(self) -> int:
        """In shared memory."""
        return self.slot_nbytes * self.slots + self.layout_nbytes * self.layouts

    def __str__(self) -> str:
        text = f"{self.slots} slots of {size(self.slot_nbytes)}"
        return text + (f" and {self.layouts} layouts of {size(self.layout_nbytes)}" if self.layouts else "")


def need_of(world: World) -> Need | None:
    """None without a model. Raises CheckpointError."""
    if world.model_dir is None:
        return None
    schema, config = Checkpoint(world.model_dir).schema, json.loads(read_config(world.model_dir) or "{}")
    scratch = scratch_of(schema, config) // world.tensor_parallel_size
    layouts = 0 if world.has_gpu_build else LAYOUTS_OF_ONE if world.instances == 1 else LAYOUTS_OF_MORE
    pinned = pinned_nbytes(world, schema.nbytes, scratch) if world.has_gpu_build else 0
    return Need(Layout.of(schema).total_nbytes, world.keep_versions + 1, schema.nbytes, layouts, pinned)


def pinned_nbytes(world: World, nbytes: int, scratch: int = 0) -> int:
    """The bytes that the workers of all instances pin of a host with GPUs: a ring each, and its part of the versions,
    of `nbytes` in all ranks, that have no room on the device. `scratch`: the bytes that a staging adds there."""
    from weightsync.vllm_engine.device import cuda, remap, room

    each = -(-nbytes // world.tensor_parallel_size)
    given = world.room(min((gpu.nbytes for gpu in world.gpus_taken()), default=0))
    try:
        wanted = room.wanted_copies(world.environ)
        if remap.flips_by_remapping(world.environ):
            there = remap.sets_that_fit(each, given, wanted, scratch=scratch)
        else:
            there = wanted if wanted is not None else given.copies(each, scratch)
    except (ValueError, EngineError):  # an instance says what is wrong when it starts
        there = 0
    return world.ranks * (cuda.PIECES * cuda.PIECE_NBYTES + (room.MOST_COPIES - there) * each)


ENLARGE = (
    "Enlarge it: mount -o remount,size=..., --shm-size of a container, sizeLimit of a pod's emptyDir (medium: Memory)"
)
SMALL = 1 << 30  # Docker's default is 64 MiB


@check("shared-memory", "size and free room of the slots' file system, against `--model`")
def shared_memory(world: World) -> Iterator[Finding]:
    arena = arena_directory(world)
    place = next((path for path in (arena, *arena.parents) if path.exists()), world.shm)
    try:
        found = os.statvfs(place)
        need = need_of(world)
    except OSError as error:
        yield fail(f"{place}: {error.strerror}", "Mount a tmpfs there, or name another directory in HOTSWAP_ARENA")
    except CheckpointError as error:
        yield fail(str(error), "Name a checkpoint directory with --model")
    else:
        held = held_nbytes(arena)
        yield _judge(str(place), found.f_frsize * found.f_blocks, found.f_frsize * found.f_bavail, held, need)


def _judge(place: str, total: int, free: int, held: int, need: Need | None) -> Finding:
    """`held`: what the arena's own slots take already, which the same model uses again."""
    text = f"{place}: {size(total)}, {size(free)} free" + (f", {size(held)} in slots" if held else "")
    if need is None:
        return warn(text, ENLARGE) if total < SMALL else ok(f"{text} (--model says whether a model fits)")
    text += f"; {need} are {size(need.nbytes)}"
    if total < need.nbytes:
        return fail(text, f"{ENLARGE}; at least {size(need.nbytes)}")
    if free + held < need.nbytes:
        return fail(text, f"Free {size(need.nbytes - free - held)} there (see `arena` for leftovers), or enlarge it")
    return ok(text)


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
    if need is not None and have <= need.nbytes + need.pinned_nbytes:
        mend = "Raise the limit (memory of the container or pod): pages in shared memory count, and so do the processes"
        pinned = f", and the {size(need.pinned_nbytes)} that workers of GPUs pin" if need.pinned_nbytes else ""
        yield fail(f"{text}; {need}{pinned} alone are {size(need.nbytes + need.pinned_nbytes)}", mend)
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


@check("locked-memory", "how much memory may be pinned: RDMA does so with whole slots, GPUs with versions that wait")
def locked_memory(world: World) -> Iterator[Finding]:
    have = world.limit(resource.RLIMIT_MEMLOCK)
    mend = "ulimit -l unlimited (LimitMEMLOCK=infinity; in a container --ulimit memlock=-1 or CAP_IPC_LOCK)"
    if have == resource.RLIM_INFINITY:
        yield ok("no limit")
    elif any(world.path("/sys/class/infiniband").glob("*")):
        yield fail(f"{size(have)}: slots cannot be registered with the RDMA devices here", mend)
    elif not world.has_gpu_build:
        yield ok(f"{size(have)}; nothing here pins memory")
    else:
        yield _judge_pinned(world, have, mend)


def _judge_pinned(world: World, have: int, mend: str) -> Finding:
    need = None
    with contextlib.suppress(CheckpointError):  # `shared-memory` says what is wrong with it
        need = need_of(world)
    nbytes = need.pinned_nbytes if need is not None else pinned_nbytes(world, 0)
    model = "" if need is not None else ", and versions without room on the device (see --model)"
    text = f"{size(have)}; workers of GPUs pin {size(nbytes)}{model}"
    return ok(text) if have >= nbytes else warn(f"{text}: where that is refused, copies are slower", mend)
