"""TLS with certificates that may be replaced while connections are open, and mutual TLS between a cluster's members.

The files are looked at when a connection begins, once a second at most. New ones are loaded into a context of their
own, so that a certificate whose key has not been written yet harms nobody: the one of before goes on.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from weightsync.errors import TlsUnavailable

log = logging.getLogger("hotswap.tls")

INTERVAL_S = 1.0
ENVIRONMENT = "HOTSWAP_CLUSTER_TLS"

Stamp = tuple[int, int, int] | None


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`; False for a name other than localhost, wherever it may lead."""
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return host == "localhost"
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def stamp(path: Path) -> Stamp:
    """A stamp that changes when a file is written, replaced or given another mode; None if it is not there."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ctime_ns, found.st_ino, found.st_size


class FollowedContext(ssl.SSLContext):
    """A context that stands for the newest one `make` could build from `paths`.

    It goes wherever an `ssl.SSLContext` does: asyncio, uvloop, uvicorn, httpx, http.client, sockets. It holds no
    certificate and no authority itself, so a library that would go around `wrap_bio` and `wrap_socket` gets no
    connection. A listening socket should not be wrapped, but each that it accepts: what is wrapped stays as it is.
    `name`: whom a client expects, whatever host it connects to. Raises what `make` raises, an OSError (`ssl.SSLError`
    is one), when the files cannot be used at first.
    """

    def __new__(
        cls, paths: Sequence[Path], make: Callable[[], ssl.SSLContext], *, server: bool, name: str | None = None
    ) -> FollowedContext:
        return super().__new__(cls, ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)

    def __init__(
        self, paths: Sequence[Path], make: Callable[[], ssl.SSLContext], *, server: bool, name: str | None = None
    ) -> None:
        self._paths, self._make, self._name = list(paths), make, name
        self._told = self._seen = self._stamps()
        self._current = make()
        self._looked_at = time.monotonic()

    def current(self) -> ssl.SSLContext:
        """The context for a connection that begins now."""
        now = time.monotonic()
        if now - self._looked_at >= INTERVAL_S:
            self._looked_at = now
            self._look()
        return self._current

    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        server_side: bool = False,
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLObject:
        """As in `ssl.SSLContext`."""
        return self.current().wrap_bio(incoming, outgoing, server_side, self._name or server_hostname, session)

    def wrap_socket(
        self,
        sock: socket.socket,
        server_side: bool = False,
        do_handshake_on_connect: bool = True,
        suppress_ragged_eofs: bool = True,
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLSocket:
        """As in `ssl.SSLContext`."""
        name = self._name or server_hostname
        return self.current().wrap_socket(
            sock, server_side, do_handshake_on_connect, suppress_ragged_eofs, name, session
        )

    def _look(self) -> None:
        stamps = self._stamps()
        if stamps == self._seen:
            return
        try:
            self._current = self._make()
        except OSError as exc:  # looked at again next time: it may be complete by then
            if stamps != self._told:
                log.error("the certificate of before stays in use: %s cannot be used (%s)", self._paths[0], exc)
        else:
            self._seen = stamps
            log.info("%s was read again", self._paths[0])
        self._told = stamps

    def _stamps(self) -> list[Stamp]:
        return [stamp(path) for path in self._paths]


def trusting(certificate: Path | str) -> ssl.SSLContext:
    """For clients on the host of a server: it must show the certificate in this file, by whatever name it is reached.
    Raises OSError."""
    context = ssl.create_default_context(cafile=certificate)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # the certificate itself, whichever authority signed it
    return context


class ClusterTls:
    """A member's certificate, its key and the cluster's own authority: `tls.crt`, `tls.key`, `ca.crt` in a directory.

    That is how a Kubernetes TLS secret of cert-manager looks when it is mounted. The holder of a certificate of that
    authority is a member, so the authority must sign nothing else. Clients expect NAME in a server's certificate
    instead of its address, which is not known beforehand. Raises TlsUnavailable.
    """

    NAME = "hotswap"  # the DNS name in every member's certificate

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory)
        self.certificate, self.key, self.authority = (self.directory / n for n in ("tls.crt", "tls.key", "ca.crt"))
        self._server = self._followed(server=True)
        self._client = self._followed(server=False)

    @classmethod
    def of_environment(cls) -> ClusterTls | None:
        """From the directory that $HOTSWAP_CLUSTER_TLS names; None if it names none."""
        directory = os.environ.get(ENVIRONMENT)
        return cls(directory) if directory else None

    def server_context(self) -> ssl.SSLContext:
        """To listen with: clients must show a certificate of the authority."""
        return self._server

    def client_context(self) -> ssl.SSLContext:
        """To connect with, whatever the host: the server must show a certificate of the authority for NAME."""
        return self._client

    def _followed(self, *, server: bool) -> FollowedContext:
        paths = [self.certificate, self.key, self.authority]
        name = None if server else self.NAME
        try:
            return FollowedContext(paths, lambda: self._build(server=server), server=server, name=name)
        except OSError as exc:
            missing = [path.name for path in paths if not path.exists()]
            reason = f"there is no {' and no '.join(missing)}" if missing else f"its files cannot be used ({exc})"
            advice = "It must hold tls.crt, tls.key and ca.crt in PEM, the key without a password: see docs/security.md"
            raise TlsUnavailable(str(self.directory), reason, advice) from exc

    def _build(self, *, server: bool) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_cert_chain(self.certificate, self.key, password="")  # or OpenSSL asks the terminal
        context.load_verify_locations(cafile=self.authority)
        if server:
            context.num_tickets = 0  # nobody resumes a session of a certificate that has been replaced since
        return context
