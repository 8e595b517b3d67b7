"""Bubblewrap's command line: what a program sees in its sandbox, and the system calls that it may not make.

The filter of system calls leaves out what a program no longer needs once it runs, and what would get around its limits.
A new user namespace would give it capabilities there, and with them file systems in memory of any size; tracing would
give it its supervisor; memory behind a descriptor counts towards no limit.
"""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import shutil
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

INSIDE = "/runner.py"


def binary() -> str | None:
    """The path of bubblewrap: on PATH, or beside this Python. None if there is none."""
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


_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data (the argument's low half)
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_X32 = 0x40000000  # x86's third ABI: the same calls under other numbers
_AF_UNIX = 1
_NAMESPACES = 0x7E020000  # clone's CLONE_NEW* flags

# machine -> (AUDIT_ARCH_*, clone, the refused calls that have numbers of their own there; of "socket" all families but
# AF_UNIX: a network namespace does not hold all of them, AF_VSOCK reaches the hypervisor)
_MACHINES: dict[str, tuple[int, int, dict[str, int]]] = {
    "x86_64": (0xC000003E, 56, {
        "unshare": 272, "setns": 308, "mount": 165, "umount2": 166, "pivot_root": 155, "ptrace": 101,
        "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312, "memfd_create": 319, "shmget": 29, "msgget": 68,
        "semget": 64, "add_key": 248, "request_key": 249, "keyctl": 250, "bpf": 321, "perf_event_open": 298,
        "userfaultfd": 323, "socket": 41,
    }),
    "aarch64": (0xC00000B7, 220, {
        "unshare": 97, "setns": 268, "mount": 40, "umount2": 39, "pivot_root": 41, "ptrace": 117,
        "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272, "memfd_create": 279, "shmget": 194,
        "msgget": 186, "semget": 190, "add_key": 217, "request_key": 218, "keyctl": 219, "bpf": 280,
        "perf_event_open": 241, "userfaultfd": 282, "socket": 198,
    }),
}  # fmt: skip
_EVERYWHERE = {
    "io_uring_setup": 425, "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432,
    "fspick": 433, "pidfd_getfd": 438, "mount_setattr": 442, "memfd_secret": 447,
}  # fmt: skip
_CLONE3 = 435


def call_filter(machine: str = "") -> bytes | None:
    """The filter for a machine as `uname -m` calls it (default: this one); None where its calls are not known."""
    known = _MACHINES.get(machine or platform.machine())
    if known is None:
        return None
    architecture, clone, refused = known
    refused = dict(refused)
    socket = refused.pop("socket")
    program = [_load(_ARCHITECTURE), *_unless(_EQUAL, architecture, _KILL), _load(_NUMBER)]
    program += _if(_AT_LEAST, _X32, _refusal(errno.EPERM)) if machine != "aarch64" else []
    for number in (*refused.values(), *_EVERYWHERE.values()):
        program += _if(_EQUAL, number, _refusal(errno.EPERM))
    program += _if(_EQUAL, _CLONE3, _refusal(errno.ENOSYS))  # its flags are out of reach; libc falls back to clone
    program += [_instruction(_EQUAL, socket, 0, 4), _load(_FIRST_ARGUMENT)]
    program += [*_unless(_EQUAL, _AF_UNIX, _refusal(errno.EAFNOSUPPORT)), _instruction(_RETURN, _ALLOW)]
    program += [_instruction(_EQUAL, clone, 0, 3), _load(_FIRST_ARGUMENT)]
    program += _if(_ANY_BIT, _NAMESPACES, _refusal(errno.EPERM))
    return b"".join([*program, _instruction(_RETURN, _ALLOW)])


def _instruction(code: int, value: int, when_true: int = 0, when_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, when_true, when_false, value)


def _load(offset: int) -> bytes:
    return _instruction(_LOAD, offset)


def _if(test: int, value: int, verdict: int) -> list[bytes]:
    return [_instruction(test, value, 0, 1), _instruction(_RETURN, verdict)]


def _unless(test: int, value: int, verdict: int) -> list[bytes]:
    return [_instruction(test, value, 1, 0), _instruction(_RETURN, verdict)]


def _refusal(code: int) -> int:
    return _REFUSE | code
