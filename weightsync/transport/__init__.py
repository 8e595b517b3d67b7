"""The data plane between hosts: reads of registered memory, over RDMA or TCP. docs/transport.md says which one when.

protocol.py                             what every transport does
tcp.py, tcp_server.py, tcp_wire.py      TCP: the reader's side, the owner's, and the format between them
nixl.py, nixl_process.py                NIXL, and the process in which it works
addresses.py                            where a transport listens
"""

from __future__ import annotations

import contextlib
from typing import Final

from weightsync.errors import TransportUnavailable
from weightsync.tls import ClusterTls
from weightsync.transport.addresses import Address, rdma_devices
from weightsync.transport.protocol import Buffer, Link, Piece, Region, Transport

__all__ = ["NAMES", "Buffer", "Link", "Piece", "Region", "Transport", "available", "open_transport"]

NAMES: Final = ("tcp", "nixl")


def open_transport(name: str, *, listen: str, tls: ClusterTls | None) -> Transport:
    """`tcp`, `nixl`, or `auto`: NIXL where there is an RDMA device and NIXL works, else `tcp`.

    `listen`: ADDRESS or ADDRESS:PORT of this host, where others reach it; NIXL chooses ports of its own.
    Raises TransportUnavailable; ValueError for an unknown name or an address that is none.
    """
    address = Address.parse(listen)
    if name == "auto":
        return _best(listen, tls)
    if name == "tcp":
        from weightsync.transport.tcp import TcpTransport

        return TcpTransport(address, tls)
    if name == "nixl":
        from weightsync.transport.nixl import NixlTransport

        return NixlTransport(address)
    raise ValueError(f"{name!r} is no transport: choose auto, {', '.join(NAMES)}")


def available() -> dict[str, str]:
    """Why a transport cannot be used here, by name; empty if it can. Starts NIXL, for a second or so."""
    reasons = dict.fromkeys(NAMES, "")
    try:
        open_transport("nixl", listen="127.0.0.1", tls=None).close()
    except TransportUnavailable as error:
        reasons["nixl"] = str(error)
    return reasons


def _best(listen: str, tls: ClusterTls | None) -> Transport:
    if rdma_devices():
        with contextlib.suppress(TransportUnavailable):
            return open_transport("nixl", listen=listen, tls=tls)
    return open_transport("tcp", listen=listen, tls=tls)
