"""The directory of the slots, and what dead processes have left in shared memory."""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from server.doctor.processes import arenas_in_environments, locked_files, mapped_below
from server.doctor.registry import Finding, check, fail, ok, warn
from server.doctor.world import World, arena_directory, file_system, held_nbytes, size

IN_MEMORY = ("tmpfs", "ramfs")
LAST_SYSTEM_UID = 999  # users up to it keep what they leave
PREFIXES = ("psm_", "vllm_")  # shared memory of engines: Python's own names, and vLLM's


@check("arena", "the slots' directory: owner, mode, file system")
def arena(world: World) -> Iterator[Finding]:
    directory = arena_directory(world)
    place = next(path for path in (directory, *directory.parents) if path.exists())
    kind = file_system(world, place)
    try:
        yield _private(directory)
    except (FileNotFoundError, NotADirectoryError):
        yield _can_be_made(directory, place)
    if kind is not None and kind not in IN_MEMORY:
        mend = "Choose a directory on a tmpfs, such as one in /dev/shm (HOTSWAP_ARENA)"
        yield warn(f"{place} is on {kind}: slots would be written to a disk", mend)
    if directory.is_relative_to(world.shm) and _ends_with_the_session(world):
        mend = "loginctl enable-linger, or RemoveIPC=no in /etc/systemd/logind.conf, or a system user's service"
        yield warn(f"logind removes {directory} when this user's last session ends", mend)


@check("leftovers", "arenas and engines' shared memory whose processes are dead")
def leftovers(world: World) -> Iterator[Finding]:
    dead = [*_dead_arenas(world), *_dead_segments(world)]
    if not dead:
        yield ok(f"nothing in {world.shm}")
        return
    nbytes = sum(held_nbytes(path) for path in dead)
    names = " ".join(str(path) for path in dead)
    mend = (
        "A `hotswap up` that was killed goes on with its arena: start it again, with its state directory. Else, if no "
    )
    mend += f"other container shares {world.shm}: rm -r {names}"
    yield warn(f"{len(dead)} in {world.shm} that no process uses, {size(nbytes)}", mend)


def _ends_with_the_session(world: World) -> bool:
    """Whether logind removes what this user leaves in shared memory (logind.conf(5), RemoveIPC=)."""
    if os.geteuid() <= LAST_SYSTEM_UID or not world.path("/run/systemd/system").exists():
        return False
    with contextlib.suppress(KeyError):  # a user without a name
        if world.path(f"/var/lib/systemd/linger/{pwd.getpwuid(os.geteuid()).pw_name}").exists():
            return False
    drop_ins = sorted(world.path("/etc/systemd/logind.conf.d").glob("*.conf"))
    said = [world.read("/etc/systemd/logind.conf") or "", *(path.read_text(errors="replace") for path in drop_ins)]
    removes = re.findall(r"^\s*RemoveIPC\s*=\s*(\w+)", "\n".join(said), re.MULTILINE)
    return not removes or removes[-1].lower() not in ("no", "false", "off", "0")


def _can_be_made(directory: Path, place: Path) -> Finding:
    if os.access(place, os.W_OK | os.X_OK):
        return ok(f"{directory} is made when it is needed")
    return fail(f"{directory} cannot be made: {place} may not be written to", "Name another one in HOTSWAP_ARENA")


def _private(directory: Path) -> Finding:
    found = directory.stat()
    mode = stat.S_IMODE(found.st_mode)
    text = f"{directory}: mode {mode:03o}, {size(held_nbytes(directory))}"
    if not stat.S_ISDIR(found.st_mode):
        return fail(f"{directory} is no directory", "Remove it, or name another one in HOTSWAP_ARENA")
    if found.st_uid != os.geteuid():
        return fail(f"{text}, of user {found.st_uid}", "Run as that user, or name another one in HOTSWAP_ARENA")
    if mode & 0o022:
        return fail(f"{text}: others may write to it", f"chmod 700 {directory}")
    if mode & 0o077:
        return warn(f"{text}: others may look into it", f"chmod 700 {directory}")
    return ok(text)


def _dead_arenas(world: World) -> list[Path]:
    """Of this user's: without a lock, a map, or a process that was told of them; not the one asked about.

    The directories are listed before their users, as an arena that is made meanwhile has a user.
    """
    found = [path for path in sorted(world.shm.glob("hotswap-*")) if path.is_dir()]
    used = {arena_directory(world), *arenas_in_environments(world)}
    used |= {world.shm / path.relative_to(world.shm).parts[0] for path in mapped_below(world, world.shm)}
    locked = locked_files(world)
    return [path for path in found if path not in used and _is_mine(path) and not locked & _inodes(path)]


def _dead_segments(world: World) -> list[Path]:
    found = [path for prefix in PREFIXES for path in sorted(world.shm.glob(f"{prefix}*"))]
    mapped = mapped_below(world, world.shm)
    return [path for path in found if path not in mapped and _is_mine(path)]


# Other processes remove their arenas and segments while this one looks at them.


def _is_mine(path: Path) -> bool:
    """Whether a path is there, and of this user."""
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_uid == os.geteuid()
    return False


def _inodes(directory: Path) -> set[int]:
    """Of the files in a directory; none if it has been removed."""
    with contextlib.suppress(FileNotFoundError), os.scandir(directory) as entries:
        return {entry.inode() for entry in entries}
    return set()
