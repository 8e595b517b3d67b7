"""Bubblewrap's command line: what a program sees in its sandbox, and what it may not ask the kernel for."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from trainer.rewards.calls import call_filter

INSIDE = "/runner.py"


def binary() -> str | None:
    """On PATH, or beside this Python (scripts/debian.sh)."""
    return shutil.which("bwrap") or shutil.which("bwrap", path=str(Path(sys.executable).parent))


def options(calls: int, runner: Path, disk_bytes: int, *, as_root: bool) -> list[str]:
    """The words before the command to run, which finds the file `runner` at INSIDE. `calls` is a descriptor of
    `filter_file`."""
    return [
        binary() or "bwrap", "--die-with-parent", "--new-session", "--seccomp", str(calls), *_identity(as_root=as_root),
        "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try",
        "--as-pid-1",  # its own number one would be left to the host's when all is done, dead, each time
        *_system(), "--ro-bind", str(runner), INSIDE,
        "--proc", "/proc", "--dev", "/dev", "--size", str(disk_bytes), "--perms", "1777", "--tmpfs", "/tmp",  # noqa: S108
        "--size", "4096", "--tmpfs", "/dev/shm", "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/",  # noqa: S108
        "--clearenv", "--setenv", "LC_ALL", "C.UTF-8",
    ]  # fmt: skip


@contextlib.contextmanager
def filter_file() -> Iterator[int]:
    """A descriptor to read the filter of system calls from."""
    calls = call_filter()
    assert calls is not None  # Sandbox.check refuses such machines
    descriptor = os.memfd_create("seccomp")
    try:
        os.write(descriptor, calls)
        os.lseek(descriptor, 0, os.SEEK_SET)
        yield descriptor
    finally:
        os.close(descriptor)


def _identity(*, as_root: bool) -> list[str]:
    """Root mounts as itself and steps down inside (the kernel does not count root's processes); others get a user
    namespace."""
    if as_root:
        return ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    return ["--unshare-user", "--uid", "65534", "--gid", "65534", "--cap-drop", "ALL"]


def _system() -> list[str]:
    """Read-only binds of the system's libraries and of this Python."""
    binds = ["--ro-bind", "/usr", "/usr"]
    for name in ("/bin", "/lib", "/lib32", "/lib64"):
        path = Path(name)
        if path.is_symlink():
            binds += ["--symlink", os.readlink(path), name]
        elif path.exists():
            binds += ["--ro-bind", name, name]
    prefix = Path(sys.base_prefix)
    if prefix.is_relative_to("/usr"):
        return binds
    for parent in reversed(prefix.parents[:-1]):  # bubblewrap would make them for root alone
        binds += ["--perms", "0755", "--dir", str(parent)]
    return [*binds, "--ro-bind", str(prefix), str(prefix)]
