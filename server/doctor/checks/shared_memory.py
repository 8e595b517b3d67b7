"""The file system that slots go to: its size and what is free, against what a model needs."""

from __future__ import annotations

import os
from collections.abc import Iterator

from server.doctor.finding import Finding, fail, ok, warn
from server.doctor.needs import Need, need_of
from server.doctor.places import arena_directory, held_nbytes
from server.doctor.registry import check
from server.doctor.world import World, size
from weightsync.errors import CheckpointError

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
