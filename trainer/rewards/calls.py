"""The sandbox's filter of system calls: what a program needs no more once it runs, and what its limits could be got
around with.

A new user namespace would give it capabilities there, and with them file systems in memory of any size; tracing would
give it its supervisor; memory behind a descriptor is nobody's in the limits. A classic BPF program, as
`bwrap --seccomp` takes it (linux/seccomp.h, linux/filter.h).
"""

from __future__ import annotations

import errno
import platform
import struct

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
