"""Ports of this host for processes that are told theirs before they start, and the URLs of listeners."""

from __future__ import annotations

import random
import socket
from collections import deque
from pathlib import Path

_FIRST = 10_000  # below are the ports of well-known services
_ATTEMPTS = 200
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_MOST_HELD = 64
_held: deque[socket.socket] = deque()  # bound, and not listening
# Hosts that stand for all addresses of a machine, and the address at which the machine itself reaches such a listener.
ANY = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104


def authority(host: str, port: int) -> str:
    """`host` and `port` as URLs and Host headers have them: an IPv6 address stands in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def url_of(host: str, port: int, scheme: str = "http") -> str:
    """The URL of what listens there, for a client; of all addresses the loopback's."""
    return f"{scheme}://{authority(ANY.get(host, host), port)}"


def free_port(host: str = "127.0.0.1", wanted: int | None = None) -> int:
    """A TCP port of `host` that no process of this machine listens on or was given: `wanted` if that is one.

    The kernel takes ports for outgoing connections from a range of its own. The port is below that range: otherwise a
    connection could come to have it before the process starts that is to listen there. This process holds its last
    64 ports bound, for a listener with SO_REUSEADDR, which servers set. Raises OSError if `host` is no address of this
    machine.
    """
    _socket(host, (host, 0)).close()
    draw, end = random.SystemRandom(), _outgoing()
    for port in (wanted, *(draw.randrange(_FIRST, end) for _ in range(_ATTEMPTS))):
        if port is not None and _hold(host, port):
            return port
    with _socket(host, (host, 0)) as probe:
        return int(probe.getsockname()[1])


def is_free(host: str, port: int) -> bool:
    """Whether a process could listen there now."""
    try:
        _socket(host, (host, port), reuse=True).close()
    except (OSError, OverflowError):
        return False
    return True


def _hold(host: str, port: int) -> bool:
    """Bind the port of all addresses, unless any process has it."""
    try:
        held = _socket(host, ("", port))
    except (OSError, OverflowError):
        return False
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # after the bind, which had to find the port unbound
    _held.append(held)
    if len(_held) > _MOST_HELD:
        _held.popleft().close()  # a process listens there long since, or has ended
    return True


def _socket(host: str, address: tuple[str, int], reuse: bool = False) -> socket.socket:
    """A socket of `host`'s family that is bound to `address`. Raises OSError, OverflowError."""
    made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
        made.bind(address)
    except BaseException:
        made.close()
        raise
    return made


def _outgoing() -> int:
    """The first port of the kernel's range. Where that leaves none, all are as good as each other."""
    try:
        first = int(_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        first = 32_768
    return first if first > _FIRST + 1_000 else 65_536
