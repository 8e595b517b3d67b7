"""Connections to one instance: opening, keeping, lending out again; and the writes of one turn of the loop.

A connection has at most one owner. It hands the owner every byte and its end, and nothing else; with no owner it sits
in the pool, where any byte or end-of-file discards it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final, Protocol

from mypy_extensions import mypyc_attr

from server.errors import HttpError
from server.gateway.config import UpstreamSettings
from server.ports import authority

log: Final = logging.getLogger("hotswap.gateway")

MANY: Final = 16 * 2**10  # bytes that are better written at once, for the transport to say when it has enough


class Owner(Protocol):
    """The exchange that a connection works for."""

    def upstream_data(self, data: bytes) -> None: ...

    def upstream_lost(self, exc: Exception | None) -> None: ...


@mypyc_attr(allow_interpreted_subclasses=True)
class UpstreamConnection:
    """One TCP connection to an instance: an asyncio.Protocol by its methods, which is all a loop looks at."""

    __slots__ = ("_paused", "_pool", "closed", "idle_since", "owner", "transport")

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._paused = False
        self.owner: Owner | None = None
        self.transport: asyncio.Transport | None = None
        self.closed = False
        self.idle_since = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        if self.closed:  # given up while it was being opened
            transport.abort()  # type: ignore[attr-defined]

    def send(self, owner: Owner, head: bytes, body: bytes) -> None:
        """Starts a request for `owner`. The body is not copied."""
        assert self.transport is not None
        self.owner = owner
        self._pool.outbox.put(self.transport, (head, body) if body else (head,))

    def data_received(self, data: bytes) -> None:
        if self.owner is None:
            self.abort()
        else:
            self.owner.upstream_data(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        owner, self.owner = self.owner, None
        if owner is None:
            self._pool.forget(self)
        else:
            owner.upstream_lost(exc)

    def eof_received(self) -> None:
        """The other side says no more: the connection closes."""

    def pause_writing(self) -> None: ...

    def resume_writing(self) -> None: ...

    def pause(self) -> None:
        """Stops reading: the instance feels it through TCP, memory here stays bounded."""
        if self.transport is not None and not self._paused and not self.closed:
            self._paused = True
            self.transport.pause_reading()

    def resume(self) -> None:
        """Undoes `pause`."""
        if self.transport is not None and self._paused and not self.closed:
            self._paused = False
            self.transport.resume_reading()

    def release(self) -> None:
        """Back to the pool after a complete answer."""
        self.owner = None
        self.resume()
        self._pool.give_back(self)

    def abort(self) -> None:
        """Drops the connection at once (RST): vLLM frees the request's blocks when it sees it."""
        self.owner = None
        self.closed = True
        if self.transport is not None:
            self.transport.abort()


@mypyc_attr(allow_interpreted_subclasses=True)
class Pool:
    """Idle connections to one address, most recently used first. `tls`: what they are opened with, None: TCP alone."""

    def __init__(self, host: str, port: int, settings: UpstreamSettings, tls: ssl.SSLContext | None = None) -> None:
        self.host = host
        self.port = port
        self.authority = authority(host, port).encode()
        self.opening = b""  # the lines that every request to it begins with
        self.introduce("")
        self._settings = settings
        self._tls = tls
        self._told = ""  # why no connection came about, the last time that the log was told
        self._idle: deque[UpstreamConnection] = deque()
        self._closed = False
        self.outbox = Outbox()

    def introduce(self, key: str) -> None:
        """Requests bring `key` from now on: what the instance's record says that it asks for."""
        self.opening = b"host: %b\r\n" % self.authority
        if key:
            self.opening += b"authorization: Bearer %b\r\n" % key.encode()

    @property
    def idle(self) -> int:
        """Connections waiting for work."""
        return len(self._idle)

    def take(self) -> UpstreamConnection | None:
        """An idle connection that looks alive, if there is one."""
        while self._idle:
            link = self._idle.pop()
            if not link.closed and link.transport is not None and not link.transport.is_closing():
                return link
        return None

    async def connect(self) -> UpstreamConnection:
        """A new connection. Raises HttpError (503) if the instance does not accept one in time."""
        link: Any = UpstreamConnection(self)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._settings.connect_timeout_s):
                await loop.create_connection(lambda: link, self.host, self.port, ssl=self._tls)
        except OSError as exc:  # TimeoutError is one
            link.abort()
            raise self._refused(exc) from exc
        except BaseException:
            link.abort()
            raise
        return link

    def _refused(self, exc: OSError) -> HttpError:
        """The error for clients, which does not say where the instance is; the log says that."""
        where = self.authority.decode()
        if isinstance(exc, ssl.SSLError):
            reason = tls_fault(exc)
            message = f"has not shown that it is a member of this cluster ({reason})."
            if message != self._told:
                self._told = message
                advice = "It gets no requests: are its certificate and this gateway's of one authority?"
                log.error("The instance at %s %s %s", where, message, advice)
            return HttpError(503, f"An instance {message}", code="instance_untrusted")
        reason = not_connected(exc)
        log.debug("the instance at %s %s", where, reason)
        return HttpError(503, f"An instance {reason}; try again shortly.", code="instance_unreachable")

    def give_back(self, link: UpstreamConnection) -> None:
        """Keeps `link` for the next request, unless there are enough or it is closing."""
        if self._closed or len(self._idle) >= self._settings.max_idle_connections or link.closed:
            link.abort()
            return
        link.idle_since = time.monotonic()
        self._idle.append(link)

    def forget(self, link: UpstreamConnection) -> None:
        """An idle connection ended by itself."""
        with contextlib.suppress(ValueError):
            self._idle.remove(link)

    def sweep(self, now: float) -> None:
        """Closes what has been idle for too long, oldest first."""
        while self._idle and now - self._idle[0].idle_since > self._settings.max_idle_s:
            self._idle.popleft().abort()

    def close(self) -> None:
        """Closes idle connections; lent ones are closed when they come back."""
        self._closed = True
        while self._idle:
            self._idle.popleft().abort()

    def reopen(self) -> None:
        """Undoes `close`: connections are kept again."""
        self._closed = False


def tls_fault(exc: ssl.SSLError) -> str:
    """The reason of a handshake that failed. Python has no reason where the other side has only said that it closes."""
    return getattr(exc, "verify_message", "") or exc.reason or "it closed the connection in the handshake"


def not_connected(exc: OSError) -> str:
    """Why no connection came about, if TLS is not known to be the reason."""
    if isinstance(exc, TimeoutError):
        return "did not accept a connection in time"
    gone = isinstance(exc, ConnectionResetError | ConnectionAbortedError)
    return "closed a connection before a request was sent" if gone else "refused a connection"


class Outbox:
    """The bytes to write before the loop waits again. A transport that is closing by then takes no more.

    A turn of a busy gateway reads from many connections, and each read makes a write. Written at once, every write
    wakes the other side, which has gone to sleep again by the next; written together, the first finds it asleep and
    the others awake. That took 15 of 59 us from a request with 32 clients on the same machine, and added nothing at one
    client. Work that no client waits for is done behind the writes.
    """

    __slots__ = ("_pending", "_work")

    def __init__(self) -> None:
        self._pending: list[tuple[asyncio.Transport, Iterable[bytes]]] = []
        self._work: list[Callable[[], None]] = []

    def put(self, transport: asyncio.Transport, pieces: Iterable[bytes]) -> None:
        """Writes `pieces` soon, after what was put here before."""
        self._schedule()
        self._pending.append((transport, pieces))

    def afterwards(self, work: Callable[[], None]) -> None:
        """Does `work` when all that was put here is written."""
        self._schedule()
        self._work.append(work)

    def flush(self) -> None:
        """Writes now: before a connection is closed."""
        pending, self._pending = self._pending, []
        for transport, pieces in pending:
            if not transport.is_closing():
                transport.writelines(pieces)
        if self._work:
            self._do_work()

    def _schedule(self) -> None:
        if not (self._pending or self._work):
            asyncio.get_running_loop().call_soon(self.flush)

    def _do_work(self) -> None:
        work, self._work = self._work, []
        for each in work:
            try:
                each()
            except Exception:
                log.exception("a fault of the gateway behind an answer")
