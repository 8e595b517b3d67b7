"""Ports of this host for processes that are told theirs before they start, and the URLs of listeners."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_FIRST = 10_000  # below are the ports of well-known services
_ATTEMPTS = 200
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_given: set[int] = set()
# Hosts that stand for all addresses of a machine, and the address at which the machine itself reaches such a listener.
ANY = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104


def authority(host: str, port: int) -> str:
    """`host` and `port` as URLs and Host headers have them: an IPv6 address stands in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def url_of(host: str, port: int, scheme: str = "http") -> str:
    """The URL of what listens there, for a client; of all addresses the loopback's."""
    return f"{scheme}://{authority(ANY.get(host, host), port)}"


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port of `host` that nobody listens on, another one at each call.

    The kernel takes ports for outgoing connections from a range of its own. The port is below that range: otherwise a
    connection could come to have it before the process starts that is to listen there. Raises OSError if `host` is no
    address of this machine.
    """
    draw, end = random.SystemRandom(), _outgoing()
    for _ in range(_ATTEMPTS):
        port = draw.randrange(_FIRST, end)
        if port not in _given and is_free(host, port):
            _given.add(port)
            return port
    with _socket(host) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def is_free(host: str, port: int) -> bool:
    """Whether a process could listen there now."""
    with _socket(host) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError):
            return False
    return True


def _socket(host: str) -> socket.socket:
    return socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)


def _outgoing() -> int:
    """The first port of the kernel's range. Where that leaves none, all are as good as each other."""
    try:
        first = int(_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        first = 32_768
    return first if first > _FIRST + 1_000 else 65_536
