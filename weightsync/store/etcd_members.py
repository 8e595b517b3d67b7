"""One connection to an etcd cluster: whichever member answers, with TLS, tokens and a bound on every call.

Certificates are read again when a member does not answer: a connection that stands needs none, and a new one that is
refused because they were replaced is tried again with those of now.

Uses the messages and stubs of `aetcd`; its `Client` knows one member, no TLS, and lets a watch die with its connection.

A request goes to one member until that fails. It is sent again, to the next, when it cannot have been applied or does
no harm twice (`repeat`); otherwise the caller hears StoreUnavailable, and the next call goes elsewhere.

gRPC runs threads of its own, which a forked child does not have: fork first, and open the store in the child. One that
was opened before the fork refuses to work there; children that do not use it are harmless (as are other programs,
started by `subprocess`).

No gRPC error leaves the store: `translate` makes this project's errors of them, and nothing else does. Two pass through
because they mean something to the call that was made: NOT_FOUND (a lease has ended) and OUT_OF_RANGE (a revision that
is compacted, or not there yet).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import AsyncGenerator, Iterator
from typing import Any, Literal

# gRPC's own handlers around a fork crash about one child in five while calls are in flight. Without them a child that
# leaves gRPC alone is safe. Read when gRPC starts, or at the first fork after its import.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

import grpc
from aetcd import rpc
from grpc import StatusCode

from weightsync.errors import StoreRefused, StoreUnavailable
from weightsync.store.etcd_url import EtcdUrl
from weightsync.timeouts import timeout, timeout_at

CALL_TIMEOUT_S = 5.0  # as long as the SQLite store waits for its lock
PROBE_TIMEOUT_S = 2.0
CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.min_reconnect_backoff_ms", 3000),  # which is also how long one attempt to connect may take
    # A member that is frozen or gone without a word is noticed within ten seconds. etcd cuts off who asks more often
    # than every five (--grpc-keepalive-min-time).
    ("grpc.keepalive_time_ms", 6000),
    ("grpc.keepalive_timeout_ms", 4000),
    ("grpc.http2.ping_timeout_ms", 4000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.use_local_subchannel_pool", 1),
]
# Of these answers, term and revision are the newest that the cluster has agreed on; others may be of a member behind.
AGREED = frozenset({"Range", "Txn", "DeleteRange"})
CONNECTING = (grpc.ChannelConnectivity.IDLE, grpc.ChannelConnectivity.CONNECTING)
Metadata = tuple[tuple[str, str], ...]
Why = Literal["", "token expired", "leader changed", "reset with TLS"]

MEANT_FOR_THE_CALLER = (StatusCode.NOT_FOUND, StatusCode.OUT_OF_RANGE)
STALE_TOKEN = ("invalid auth token", "revision of auth store is old")
TRY_ELSEWHERE = (StatusCode.UNAVAILABLE, StatusCode.DEADLINE_EXCEEDED, StatusCode.INTERNAL, StatusCode.UNKNOWN)
# gRPC says so when no connection could be made: the request has not been sent, and may go to another member.
NOT_SENT = "failed to connect to all addresses"
LEADER_CHANGED = "etcdserver: leader changed"  # of reads alone: etcd lets writes wait for the new leader
RESETS = ("Connection reset", "Broken pipe")

# Parts of what they say, and what to do. After these, trying again helps only once somebody has changed something.
REFUSALS = {
    "invalid user ID or password": "Check user= in the URL and the password in its file",
    "authentication is not enabled": "Leave user= out of the URL, or turn authentication on in etcd",
    "user name is empty": "This etcd wants a user: add ?user=NAME&password_file=/path to the URL",
    "permission denied": "Grant the role of this user read and write on the prefix {namespace!r}",
    "Hostname Verification Check failed": "Reach etcd under a name that is in its certificate",
    "WRONG_VERSION_NUMBER": "It does not speak TLS: leave ca= out of the URL",
    "handshake failed": "Pass as ca= the authority that signed etcd's certificate",
    "security handshaker": "Check that the files of ca=, cert= and key= are PEM and belong together",
    "TSI_DATA_CORRUPTED": "It does not accept this client: name a certificate that it trusts, &cert=/path&key=/path",
    "too many operations in txn": "Start etcd with a larger --max-txn-ops",
    "request is too large": "Start etcd with a larger --max-request-bytes",
    "database space exceeded": "Compact and defragment etcd, disarm its alarm, and set --auto-compaction-retention",
}
PLAIN = "Is etcd restarting? If it speaks TLS, add ?ca=/path to the URL"
WITH_TLS = "Is etcd restarting? If it does not speak TLS, leave ca= out of the URL"
OUTAGES = {
    "Connection refused": "Is etcd running there?",
    "no leader": "The cluster has no leader: are most of its members up and connected?",
    "before receiving SETTINGS": "Look whether etcd hangs, or something else listens there",
    "DNS resolution failed": "Check the host name in the URL",
}


class Members:
    """The members of one URL. Belongs to the event loop of its first call."""

    def __init__(self, url: EtcdUrl) -> None:
        """Raises StoreUnavailable when nobody listens at any of the endpoints."""
        self._url = url
        self._tls = url.tls_files()
        if url.user is not None:
            url.password()
        self._require_a_listener()
        self._channels: list[Channel] = []
        self._current = 0
        self._token: str | None = None
        self._cluster = 0  # its id
        self._seen = 0, 0  # the newest term and revision
        self._lost: StoreUnavailable | None = None
        self._authenticating = asyncio.Lock()
        self._pid = os.getpid()
        self.closed = False

    async def call(self, name: str, request: Any, *, repeat: bool = True) -> Any:
        """The answer to one request. Raises StoreUnavailable, and gRPC's NOT_FOUND and OUT_OF_RANGE as they are.

        `store_lost`, for good, once another cluster answers, or this one has lost what it had: it counts anew.
        """
        seen = self._seen
        if self._lost is not None:
            raise self._lost
        answer = await self._answer(name, request, repeat)
        self._take_in(answer.header, seen if name in AGREED else (0, 0))
        return answer

    def _take_in(self, header: Any, seen: tuple[int, int] = (0, 0)) -> None:
        """Raises `store_lost` for a header that cannot come from a cluster where `seen` was the newest."""
        self._cluster, problem = self._cluster or header.cluster_id, ""
        if header.cluster_id not in (0, self._cluster):
            problem = f"another etcd is in its place (cluster {header.cluster_id:x}, it was {self._cluster:x})"
        elif (header.raft_term, header.revision) != (max(header.raft_term, seen[0]), max(header.revision, seen[1])):
            now = f"term {header.raft_term}, revision {header.revision}"
            problem = f"etcd has lost what it had ({now}; it was at term {seen[0]}, revision {seen[1]})"
        if problem:
            self._lost = StoreUnavailable(
                self.url, problem, "Start everything that uses this store again", code="store_lost"
            )
            raise self._lost
        self._seen = max(self._seen[0], header.raft_term), max(self._seen[1], header.revision)

    async def _answer(self, name: str, request: Any, repeat: bool) -> Any:
        left = attempts = len(self._opened())
        deadline = asyncio.get_running_loop().time() + CALL_TIMEOUT_S
        reset = False
        while True:
            channel = self._channels[self._current]
            try:
                return await self._attempt(channel, name, request, deadline, CALL_TIMEOUT_S / attempts, repeat)
            except MemberFailed as failed:
                if failed.why == "leader changed":
                    continue  # until the deadline, at which the attempt fails
                if failed.why == "reset with TLS" and not (reset or self.closed):
                    reset, self._channels = True, self._new_channels()
                    continue
                left -= not self._leave(channel)
                if self.closed or not left or not (repeat or failed.unsent):
                    raise failed.error from failed.__cause__

    async def watch(self, create: Any) -> AsyncGenerator[Any, None]:
        """The responses to one watch, from the first on. Ends when the store is closed, raises StoreUnavailable."""
        self._opened()
        channel = self._channels[self._current]
        call = None
        try:
            with self._mapped():
                async with timeout(CALL_TIMEOUT_S):
                    await self._connect(channel)
                    metadata = await self._credentials(channel, CALL_TIMEOUT_S)
                    call = channel["Watch"](metadata=(*metadata, ("hasleader", "true")))
                    await call.write(rpc.WatchRequest(create_request=create))
                    response = await call.read()
            while response is not grpc.aio.EOF:
                self._take_in(response.header)
                yield response
                with self._mapped():
                    response = await call.read()
            raise StoreUnavailable(self.url, "etcd ended the watch", "Look at the log of etcd")
        except MemberFailed as failed:
            if self.closed:
                return
            self._leave(channel)
            raise failed.error from failed.__cause__
        finally:
            if call is not None:
                call.cancel()

    @property
    def url(self) -> str:
        return self._url.text

    def forget_token(self) -> None:
        """Authenticate anew before the next call."""
        self._token = None

    async def close(self) -> None:
        self.closed = True
        channels, self._channels = self._channels, []
        for channel in channels:
            await channel.close()

    # -- one member

    async def _attempt(
        self, channel: Channel, name: str, request: Any, deadline: float, share_s: float, repeat: bool
    ) -> Any:
        """One request to one member, which gets `share_s`, or until `deadline` once it has what cannot be repeated."""
        clock = asyncio.get_running_loop().time
        until = min(clock() + share_s, deadline)
        for renewed in (False, True):
            with self._mapped(unsent=True):
                async with timeout_at(until):
                    await self._connect(channel)
                metadata = await self._credentials(channel, until - clock())
            try:
                with self._mapped():
                    return await channel.ask(name, request, (until if repeat else deadline) - clock(), metadata)
            except MemberFailed as failed:
                self._token = None if failed.why == "token expired" else self._token
                if renewed or failed.why != "token expired":
                    raise
        raise AssertionError("unreachable")

    async def _connect(self, channel: Channel) -> None:
        """Wait for the connection, or for the reason that there is none: the request itself then fails with it."""
        while (state := channel.grpc.get_state(try_to_connect=True)) in CONNECTING:
            await channel.grpc.wait_for_state_change(state)

    async def _credentials(self, channel: Channel, timeout_s: float) -> Metadata:
        if self._url.user is None:
            return ()
        async with self._authenticating:
            if self._token is None:
                request = rpc.AuthenticateRequest(name=self._url.user, password=self._url.password())
                self._token = (await channel.ask("Authenticate", request, timeout_s, ())).token
            return (("token", self._token or ""),)

    @contextlib.contextmanager
    def _mapped(self, *, unsent: bool = False) -> Iterator[None]:
        """gRPC's errors become ours; those after which another member may be asked become MemberFailed."""
        try:
            yield
        except rpc.AioRpcError as error:
            if error.code() in MEANT_FOR_THE_CALLER:
                raise
            details = str(error.details())
            if any(text in details for text in STALE_TOKEN):
                refused = StoreRefused(self.url, details, "Look at the log of etcd")
                raise MemberFailed(refused, unsent=True, why="token expired") from error
            mapped = translate(error, self._url)
            if error.code() not in TRY_ELSEWHERE:
                raise mapped from error
            if LEADER_CHANGED in details:
                raise MemberFailed(mapped, unsent=True, why="leader changed") from error
            if self._tls and NOT_SENT in details and any(text in details for text in RESETS):
                raise MemberFailed(mapped, unsent=True, why="reset with TLS") from error
            raise MemberFailed(mapped, unsent or NOT_SENT in details) from error
        except TimeoutError as error:
            raise MemberFailed(unanswered(self._url), unsent) from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            # Python 3.10 does not tell whether a task is being cancelled: there each counts as one that is.
            if task is None or sys.version_info < (3, 11) or task.cancelling() or not self.closed:
                raise
            # gRPC's way to say that the channel was closed.
            raise MemberFailed(closed(self._url), unsent=False) from None
        except grpc.aio.UsageError as error:
            raise MemberFailed(closed(self._url), unsent=False) from error

    def _leave(self, channel: Channel) -> bool:
        """Ask the next member from now on, unless another call has moved on already; or the same ones, if there are
        new certificates, or another call has found some (True). A call keeps a connection that it still uses."""
        if self._channels and channel not in self._channels:
            return True
        if self._channels and self._channels[self._current] is channel:
            with contextlib.suppress(StoreRefused):  # they are being replaced: what was read last stays in use
                if (found := self._url.tls_files()) != self._tls:
                    self._tls = found
                    self._channels = self._new_channels()
                    return True
            self._current = (self._current + 1) % len(self._channels)
        return False

    # -- opening

    def _opened(self) -> list[Channel]:
        if self.closed:
            raise closed(self._url)
        if os.getpid() != self._pid:
            raise StoreUnavailable(self.url, "opened before this process was forked", "Open it after the fork")
        if not self._channels:
            self._channels = self._new_channels()
        return self._channels

    def _new_channels(self) -> list[Channel]:
        return [Channel(f"{host}:{port}", self._tls) for host, port in self._url.endpoints]

    def _require_a_listener(self) -> None:
        reason = OSError()
        for host, port in self._url.endpoints:
            try:
                socket.create_connection((host.strip("[]"), port), PROBE_TIMEOUT_S).close()
            except OSError as error:
                reason = error
            else:
                return
        advice = "Start etcd there, or check the hosts and ports of the URL"
        raise StoreUnavailable(self.url, reason.strerror or str(reason), advice) from reason


class Channel:
    """The connection to one member, made when it is first needed, and etcd's calls by name."""

    def __init__(self, endpoint: str, tls: tuple[bytes, bytes | None, bytes | None] | None) -> None:
        if tls is None:
            self.grpc = grpc.aio.insecure_channel(endpoint, CHANNEL_OPTIONS)
        else:
            self.grpc = grpc.aio.secure_channel(endpoint, grpc.ssl_channel_credentials(*tls), CHANNEL_OPTIONS)
        stubs = [stub(self.grpc) for stub in (rpc.KVStub, rpc.LeaseStub, rpc.WatchStub, rpc.AuthStub)]
        self._calls: dict[str, Any] = {name: call for stub in stubs for name, call in vars(stub).items()}
        self._renewing = asyncio.Lock()
        self._renewals: Any = None  # the stream of all keep-alives; they are answered in order

    def __getitem__(self, name: str) -> Any:
        return self._calls[name]

    async def ask(self, name: str, request: Any, timeout_s: float, metadata: Metadata) -> Any:
        """One request, one answer."""
        if name != "LeaseKeepAlive":
            return await self._calls[name](request, timeout=timeout_s, metadata=metadata)
        async with timeout(timeout_s), self._renewing:
            if self._renewals is not None:
                with contextlib.suppress(rpc.AioRpcError):  # it broke since it was used last: once more on a new one
                    return await self._renew(request)
            self._renewals = self._calls[name](metadata=metadata)
            return await self._renew(request)

    async def close(self) -> None:
        if self._renewals is not None:
            self._renewals.cancel()
        await self.grpc.close()

    async def _renew(self, request: Any) -> Any:
        stream, self._renewals = self._renewals, None
        try:
            await stream.write(request)
            if (answer := await stream.read()) is grpc.aio.EOF:
                raise rpc.AioRpcError(StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), "ended")
        except asyncio.InvalidStateError as error:  # gRPC's word for a stream that has broken since
            none = grpc.aio.Metadata()
            raise rpc.AioRpcError(StatusCode.UNAVAILABLE, none, none, "the stream has broken") from error
        except BaseException:
            stream.cancel()
            raise
        self._renewals = stream
        return answer


class MemberFailed(Exception):
    """This member did not answer. `unsent`: the request cannot have been applied.

    `why`: etcd does not know the token (any more); the cluster elected a leader while the member read, which can answer
    now; or a new connection was reset. TLS 1.3 refuses a client's certificate after the handshake, and the reset may
    overtake the reason: only another connection tells whether etcd refuses the certificate.
    """

    def __init__(self, error: StoreUnavailable, unsent: bool, why: Why = "") -> None:
        super().__init__(str(error))
        self.error, self.unsent, self.why = error, unsent, why


def translate(error: Any, url: EtcdUrl) -> StoreUnavailable:
    """The StoreUnavailable, or StoreRefused, for a gRPC error."""
    details = str(error.details() or error.code().name)
    for text, advice in REFUSALS.items():
        if text in details:
            return StoreRefused(url.text, details, advice.format(namespace=url.namespace))
    if error.code() is StatusCode.DEADLINE_EXCEEDED:
        return unanswered(url)
    if "Socket closed" in details or "Connection reset" in details:
        return StoreUnavailable(url.text, details, WITH_TLS if "ca" in url.options else PLAIN)
    advice = next((advice for text, advice in OUTAGES.items() if text in details), "Look at the log of etcd")
    return StoreUnavailable(url.text, details, advice)


def unanswered(url: EtcdUrl) -> StoreUnavailable:
    advice = "Look whether etcd hangs, its disk is slow or a firewall is in between"
    return StoreUnavailable(url.text, "no answer in time", advice)


def closed(url: EtcdUrl) -> StoreUnavailable:
    return StoreUnavailable(url.text, "this client was closed", "Open the store again")
