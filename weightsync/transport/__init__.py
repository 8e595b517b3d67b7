"""The data plane between hosts: reads of registered memory, over RDMA or TCP. docs/transport.md says which one when.

protocol.py                             what every transport does
tcp.py, tcp_server.py, tcp_wire.py      TCP: the reader's side, the owner's, and the format between them
isolated.py, child.py                   the transport of a library, and the process in which the library works
engine.py, nixl.py, mooncake.py         what a library must do there, and the two that do it
addresses.py                            where a transport listens
"""

from __future__ import annotations

from typing import Final

from weightsync.errors import TransportUnavailable
from weightsync.tls import ClusterTls
from weightsync.transport.addresses import Address, rdma_devices
from weightsync.transport.protocol import Buffer, Link, Piece, Region, Transport

__all__ = ["NAMES", "Buffer", "Link", "Piece", "Region", "Transport", "available", "open_transport"]

ENGINES: Final = ("nixl", "mooncake")  # in the order in which `auto` takes them where there is an RDMA device
NAMES: Final = ("tcp", *ENGINES)


def open_transport(name: str, *, listen: str, tls: ClusterTls | None) -> Transport:
    """`tcp`, `nixl`, `mooncake`, or `auto`: an RDMA library where there is a device for it, else `tcp`.

    `listen`: ADDRESS or ADDRESS:PORT of this host, where others reach it; the libraries choose ports of their own.
    Raises TransportUnavailable; ValueError for an unknown name or an address that is none.
    """
    address = Address.parse(listen)
    if name == "auto":
        return _best(address, tls)
    if name == "tcp":
        from weightsync.transport.tcp import TcpTransport

        return TcpTransport(address, tls)
    if name in ENGINES:
        from weightsync.transport.isolated import EngineTransport

        return EngineTransport(name, address)
    raise ValueError(f"{name!r} is no transport: choose auto, {', '.join(NAMES)}")


def available() -> dict[str, str]:
    """Why a transport cannot be used here, by name; empty if it can. Starts the libraries, for a second or so each."""
    reasons = {"tcp": ""}
    for name in ENGINES:
        try:
            open_transport(name, listen="127.0.0.1", tls=None).close()
            reasons[name] = ""
        except TransportUnavailable as error:
            reasons[name] = str(error)
    return reasons


def _best(address: Address, tls: ClusterTls | None) -> Transport:
    if rdma_devices():
        for name in ENGINES:
            try:
                return open_transport(name, listen=str(address), tls=tls)
            except TransportUnavailable:
                continue
    return open_transport("tcp", listen=str(address), tls=tls)
