"""The transport that needs no library and no device: TCP, with mutual TLS where the cluster has certificates.

Beyond loopback it does not listen without TLS. Readers also show a token, which only whoever is given the endpoint
knows; the endpoint goes over an authenticated channel.
"""

from __future__ import annotations

import ipaddress
import os
import weakref
from types import TracebackType
from typing import Self

import msgspec

from weightsync.errors import PeerUnreachable, TransportUnavailable
from weightsync.tls import ClusterTls
from weightsync.transport.addresses import Address
from weightsync.transport.checks import bytes_of
from weightsync.transport.protocol import Buffer
from weightsync.transport.tcp_dial import Dialer
from weightsync.transport.tcp_link import LocalRegion, TcpLink
from weightsync.transport.tcp_server import ServedRegion, Server

STREAMS = min(4, os.cpu_count() or 1)


class TcpEndpoint(msgspec.Struct, frozen=True):
    host: str
    port: int
    token: bytes
    tls: bool


class TcpRegion(LocalRegion):
    """As Region: served to others, and read into if it is writable."""

    def __init__(self, server: Server, served: ServedRegion, *, writable: bool) -> None:
        super().__init__(served.view, served.descriptor, writable=writable)
        self._server, self._served = server, served

    def close(self) -> None:
        """As in Region. The buffer may be unmapped afterwards."""
        self._server.remove(self._served)
        self.uses.close()
        self.view.release()


class TcpTransport:
    """As Transport. `streams`: connections that one read is spread over. Raises TransportUnavailable."""

    name = "tcp"

    def __init__(self, listen: Address, tls: ClusterTls | None, streams: int = STREAMS) -> None:
        if tls is None and not listen.loopback:
            raise TransportUnavailable(
                "tcp",
                f"it does not listen on {listen.host} without TLS",
                "Give the cluster certificates (HOTSWAP_CLUSTER_TLS, docs/security.md), or listen on 127.0.0.1",
            )
        self._tls, self._streams = tls, streams
        try:
            self._server = Server(listen, tls.server_context() if tls else None)
        except OSError as error:
            reason = f"it cannot listen on {listen} ({error})"
            raise TransportUnavailable("tcp", reason, "Choose an address of this host and a free port") from error
        self._links: weakref.WeakSet[TcpLink] = weakref.WeakSet()
        self._regions: weakref.WeakSet[TcpRegion] = weakref.WeakSet()

    @property
    def endpoint(self) -> bytes:
        address = self._server.address
        return msgspec.msgpack.encode(
            TcpEndpoint(address.host, address.port, self._server.token, tls=self._tls is not None)
        )

    def register(self, buffer: Buffer, *, writable: bool) -> TcpRegion:
        """As in Transport. Raises ValueError for a buffer that cannot be."""
        region = TcpRegion(self._server, self._server.add(bytes_of(buffer, writable=writable)), writable=writable)
        self._regions.add(region)
        return region

    def connect(self, endpoint: bytes) -> TcpLink:
        """As in Transport."""
        try:
            found = msgspec.msgpack.decode(endpoint, type=TcpEndpoint)
        except msgspec.DecodeError as error:
            raise PeerUnreachable("?", "its endpoint is of another transport") from error
        if not (_is_address(found.host) and 0 < found.port < 1 << 16):  # a name might take long to look up
            raise PeerUnreachable(f"{found.host[:64]}:{found.port}", "its endpoint is no address")
        if found.tls != (self._tls is not None):
            mine, its = ("TLS", "none") if self._tls else ("no TLS", "it")
            raise PeerUnreachable(f"{found.host}:{found.port}", f"this host uses {mine}, the peer {its}")
        context = self._tls.client_context() if self._tls else None
        link = TcpLink(Dialer(found.host, found.port, found.token, context), self._streams)
        self._links.add(link)
        return link

    def close(self) -> None:
        """As in Transport."""
        for link in list(self._links):
            link.close()
        for region in list(self._regions):
            region.close()
        self._server.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _is_address(host: str) -> bool:
    try:
        return bool(ipaddress.ip_address(host))
    except ValueError:
        return False
