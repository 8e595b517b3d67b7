"""Listening sockets of a library that takes no address to listen on: what comes for another address is dropped."""

from __future__ import annotations

import ctypes
import ipaddress
import os
import socket
import stat
import struct

SO_ATTACH_FILTER = 26  # Linux; not in the socket module
NETWORK_HEADER = 0xFFF00000  # SKF_NET_OFF: offsets from the IP header
LD_BYTE, LD_WORD, AND, JUMP_EQUAL, RETURN = 0x30, 0x20, 0x54, 0x15, 0x06
DROP, KEEP = 0, 0xFFFFFFFF

Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, operand


def confine(host: str | None) -> None:
    """All TCP sockets on which this process listens, and what they accept later. None: nobody may connect any more."""
    program = _only(ipaddress.ip_address(host)) if host is not None else [(RETURN, 0, 0, DROP)]
    if not program:
        return
    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
    buffer = ctypes.create_string_buffer(code)
    filter_ = struct.pack("@HP", len(program), ctypes.addressof(buffer))
    for listening in _listening():
        with listening:
            listening.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, filter_)


def _only(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> list[Instruction]:
    """Packets to the address, by its version; none is needed for a wildcard."""
    if address.is_unspecified:
        return []
    start = 16 if address.version == 4 else 24
    words = struct.unpack(f">{len(address.packed) // 4}I", address.packed)
    compare: list[Instruction] = []
    for number, word in enumerate(words):
        left = 2 * (len(words) - number) - 1  # instructions to the one that drops
        compare += [
            (LD_WORD, 0, 0, NETWORK_HEADER + start + 4 * number),
            (JUMP_EQUAL, 0, left, word),
        ]
    version: list[Instruction] = [
        (LD_BYTE, 0, 0, NETWORK_HEADER),
        (AND, 0, 0, 0xF0),
        (JUMP_EQUAL, 0, len(compare) + 1, address.version << 4),
    ]
    return [*version, *compare, (RETURN, 0, 0, KEEP), (RETURN, 0, 0, DROP)]


def _listening() -> list[socket.socket]:
    """Duplicates, which the caller closes."""
    found = []
    for entry in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISSOCK(os.fstat(int(entry)).st_mode):
                continue
            candidate = socket.socket(fileno=os.dup(int(entry)))
        except OSError:  # closed meanwhile
            continue
        if candidate.family in (socket.AF_INET, socket.AF_INET6) and candidate.getsockopt(
            socket.SOL_SOCKET, socket.SO_ACCEPTCONN
        ):
            found.append(candidate)
        else:
            candidate.close()
    return found
