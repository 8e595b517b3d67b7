"""The processes of this host that use a directory, a file in shared memory, or a port."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from server.doctor.world import World

READINGS = 5  # of the kernel's list of locks
EXEC_S = 0.2  # for which a process may be in the midst of an exec
OURS = ("server.gateway", "server.cli", "weightsync.peer", "weightsync.push", "trainer.main")


def is_ours(command: list[str]) -> bool:
    """Whether a command line is one of this project's processes."""
    names = {word.removesuffix(".__main__") for word in command[:4]}
    return bool(names & set(OURS)) or any(Path(word).name == "hotswap" for word in command[:2])


def ours() -> list[psutil.Process]:
    """The processes of this project that can be looked at, but for this one, and what they have started."""
    found: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and is_ours(process.cmdline()):
                found |= {p.pid: p for p in [process, *process.children(recursive=True)]}
    return list(found.values())


def listener_on(port: int) -> psutil.Process | None:
    """The process that listens on a TCP port; None if there is none that can be looked at."""
    with contextlib.suppress(psutil.Error):
        for connection in psutil.net_connections("tcp"):
            place = connection.laddr
            if connection.status == psutil.CONN_LISTEN and place and place.port == port and connection.pid:
                return psutil.Process(connection.pid)
    return None


def mapped_below(world: World, directory: Path) -> set[Path]:
    """The files below `directory` that some process has mapped."""
    prefix, found = f"{directory}/", set()
    for text in _of_each(world, "maps"):
        found |= {Path(line[line.index(prefix) :].removesuffix(" (deleted)"))
                  for line in text.splitlines() if prefix in line}  # fmt: skip
    return found


def arenas_in_environments(world: World) -> set[Path]:
    """The values of HOTSWAP_ARENA in the processes that can be looked at."""
    name = "HOTSWAP_ARENA="
    words = (word for text in _of_each(world, "environ") for word in text.split("\0"))
    return {Path(word.removeprefix(name)) for word in words if word.startswith(name)}


def locked_files(world: World) -> set[int]:
    """The inodes that somebody holds a lock on. Reading the kernel's list disturbs nobody; trying a lock might.

    The kernel hands the list out by pages and finds its place again by counting, so one reading misses a lock that is
    held throughout where others are let go meanwhile: one in sixty readings beside a process that does nothing else.
    """
    lines = (line for _ in range(READINGS) for line in (world.read("/proc/locks") or "").splitlines())
    places = [word for line in lines for word in line.split() if word.count(":") == 2]
    return {int(place.rpartition(":")[2]) for place in places}


def _of_each(world: World, name: str) -> Iterator[str]:
    for process in world.path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            yield _text(process, name)


def _text(process: Path, name: str) -> str:
    """A file about a process, which is empty in the midst of an exec. Raises OSError."""
    end = time.monotonic() + EXEC_S
    while not (text := (process / name).read_text(errors="replace")) and time.monotonic() < end:
        (process / "exe").readlink()  # a thread of the kernel and a process that has ended have none
        time.sleep(0.0005)
    return text
