"""The address at which a transport listens, and the one at which others reach it."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass
from pathlib import Path

RDMA_DEVICES = Path("/sys/class/infiniband")


@dataclass(frozen=True)
class Address:
    """An IP address to listen on; port 0 is any."""

    host: str
    port: int = 0

    @classmethod
    def parse(cls, text: str) -> Address:
        """`ADDRESS`, `ADDRESS:PORT` or `[ADDRESS]:PORT`; names are looked up. Raises ValueError."""
        host, port = _split(text)
        try:
            return cls(str(ipaddress.ip_address(host)), port)
        except ValueError:
            pass
        try:
            return cls(str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]), port)
        except OSError as error:
            raise ValueError(f"{text!r} is no address of this host ({error}); write ADDRESS or ADDRESS:PORT") from error

    @property
    def loopback(self) -> bool:
        return ipaddress.ip_address(self.host).is_loopback

    @property
    def family(self) -> socket.AddressFamily:
        return socket.AF_INET6 if ":" in self.host else socket.AF_INET

    @property
    def reachable(self) -> str:
        """The address that others connect to: the host itself, or, of a wildcard, the address of the default route."""
        return self.host if not ipaddress.ip_address(self.host).is_unspecified else _own_address(self.family)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def _split(text: str) -> tuple[str, int]:
    host, port = text, "0"
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        port = rest.removeprefix(":") or "0"
    elif text.count(":") == 1:
        host, port = text.split(":")
    if not (host and port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise ValueError(f"{text!r} is no address to listen on; write ADDRESS or ADDRESS:PORT")
    return host, int(port)


def _own_address(family: socket.AddressFamily) -> str:
    """The source address of packets to elsewhere; nothing is sent. Loopback where there is no route."""
    elsewhere, loopback = ("192.0.2.1", "127.0.0.1") if family == socket.AF_INET else ("2001:db8::1", "::1")
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((elsewhere, 9))
        except OSError:
            return loopback
        return str(probe.getsockname()[0])


def interface_of(host: str) -> str | None:
    """The network interface that has an address, for libraries that are told interfaces; None if none has it."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == host for entry in addresses):
            return name
    return None


def rdma_devices() -> list[str]:
    """Names of the RDMA devices of this machine."""
    return sorted(entry.name for entry in RDMA_DEVICES.iterdir()) if RDMA_DEVICES.is_dir() else []
