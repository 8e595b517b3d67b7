"""From a head and a body to a `Request`: which route it is for, whose it is, what it asks for, what its key allows.

Whoever reads requests from clients calls this, in the order of the methods: a connection (connection.py), or the ASGI
app (asgi.py).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Protocol

from server.errors import HttpError, MethodNotAllowed
from server.gateway import terms
from server.gateway.access.keys import ANONYMOUS, KeyRing, Principal
from server.gateway.access.limits import Grant, Limits
from server.gateway.access.records import INFER
from server.gateway.access.roles import FORWARDED
from server.gateway.access.scope import CacheScopes
from server.gateway.config import Failover, GatewayConfig
from server.gateway.fleet import affinity
from server.gateway.fleet.routing import Need
from server.gateway.fleet.splits import Splits
from server.gateway.routes import Target, find
from server.gateway.wire.bodies import NONE, Fields, check_object
from server.gateway.wire.head import Headers, RequestHead, check_origin, head_too_large, read_head

STREAMED: Final = b"/admin/weights/upload"


class Client(Protocol):
    """The side that asked: a connection (connection.py) or an ASGI task (asgi.py).

    All calls are made from the event loop and return at once. The answer is HTTP/1.1 as bytes, its head first.
    """

    send: Callable[[bytes], None]
    """Writes bytes of the answer that are not the last: what each token of a stream is sent with."""

    def write(self, data: bytes, *, last: bool = False) -> None:
        """Bytes of the answer, its `last` perhaps."""

    def body_done(self) -> None:
        """Nobody needs the request's body any more."""

    def answered(self, *, keep_alive: bool) -> None:
        """The answer is complete."""

    def refuse(self, error: HttpError) -> None:
        """Nothing was written: `error` is the answer."""

    def cut(self) -> None:
        """What was written stays incomplete: the connection ends."""


@dataclass
class Request:
    """A complete client request for a public route."""

    target: Target
    head: RequestHead
    body: bytes
    need: Need | None  # which versions may answer
    http10: bool
    keep_alive: bool
    principal: Principal = ANONYMOUS
    priority: int = 0  # its class in the queue; the lowest goes first
    deadline_s: float = math.inf  # in which it must get to an instance
    known: affinity.Hint | None = None
    share: int | None = None  # the version it is for, where versions share the traffic
    repeated: bool = False  # on a version that is tried out, unseen; or it was not its turn
    failover: Failover = "off"  # who may go on with a stream whose instance dies
    grant: Grant | None = None  # of the key's limits, where it has any
    fields: Fields = NONE  # of its body, as they were sent
    extra_head: bytes = b""  # header lines for the answer

    def hint(self) -> affinity.Hint:
        """What routing may know of it; made when it is first asked for."""
        if self.known is None:
            self.known = affinity.hint(self.target.route.name, self.body, self.head.scope, self.head.session)
        return self.known


def streamed(url: bytes, method: bytes) -> bool:
    """Whether the body may be as large as a model: the app takes it as it comes (admin/weights.py)."""
    return url.startswith(STREAMED) and method == b"POST" and url.partition(b"?")[0] == STREAMED


class Admission:
    """The checks that one gateway makes before it forwards a request. Every method may raise HttpError."""

    def __init__(
        self, config: GatewayConfig, keys: KeyRing, scopes: CacheScopes, limits: Limits, splits: Splits
    ) -> None:
        self._splits = splits
        self._config = config
        self._keys = keys
        self._scopes = scopes
        self._limits = limits
        self._unbounded = replace(config.limits, max_body=sys.maxsize)

    def read_head(self, headers: Headers, http_version: str, url: bytes, *, streamed: bool) -> RequestHead:
        """The head, checked. `streamed`: its body may be of any size."""
        if len(url) > self._config.limits.max_head:
            raise head_too_large(self._config.limits)
        return read_head(headers, http_version, self._unbounded if streamed else self._config.limits, terms.HEADERS)

    def targets(self, url: bytes, *, admin_port: bool) -> tuple[Target, ...]:
        """The forwarded routes at `url`, one per method; empty if it is for the app to answer."""
        targets = find(url)
        return targets if targets and (admin_port or not targets[0].route.admin) else ()

    def principal(self, head: RequestHead, targets: tuple[Target, ...]) -> Principal:
        """The owner of the request's key."""
        return self._keys.authorize(head.key, FORWARDED if targets[0].route.admin else INFER)

    def check_head(self, head: RequestHead, headers: Headers, principal: Principal, listening_on: str) -> None:
        """May this page ask; and whose prefix cache may it hit, which is said to the instance."""
        if head.origin is not None and self._keys.open_inference:
            host = next((value for name, value in headers if name == b"host"), b"")
            check_origin(head.origin, host, listening_on, self._config.allowed_origins)
        if self._splits.header:
            head.sticky = next((value.strip() for name, value in headers if name == self._splits.header), b"")
        head.scope = self._scopes.line(principal)
        head.forward += head.scope

    def of_method(self, targets: tuple[Target, ...], method: bytes) -> Target:
        """The one that is asked for."""
        for target in targets:
            if target.route.method == method:
                return target
        allow = ", ".join([t.route.method.decode() for t in targets])
        raise MethodNotAllowed(f"Use {allow} for {targets[0].route.name}.", allow=allow)

    def request(
        self, target: Target, head: RequestHead, principal: Principal, body: bytes, *, http10: bool, keep_alive: bool
    ) -> Request:
        """The request with what it asks for, by header or in its body, checked and in words for the instance."""
        fields = NONE
        if target.route.json_body:
            fields = check_object(body)
        elif target.route.method == b"GET":
            body = b""
        request = Request(target, head, body, None, http10, keep_alive, principal)
        request.priority, request.fields = principal.priority, fields
        mode = self._config.upstream.failover.mode
        request.failover = mode if target.route.continued else "off"
        in_body = fields.has_wish
        if in_body or head.asked:
            asked, request.body = terms.read(head.asked or {}, body, in_body=in_body)
            if in_body:
                request.fields = check_object(request.body)  # those of the first one would keep that too
            head.forward += asked.lines
            request.need, request.deadline_s = asked.need, asked.deadline_s
            request.priority = terms.priority_within(asked, principal)
            if target.route.continued:
                request.failover = asked.failover_or(mode)
        if request.priority:
            head.forward += b"x-hotswap-priority: %d\r\n" % request.priority
        return request

    def admit(self, request: Request) -> None:
        """Within the limits of its key; `extra_head` says what is left of them, whoever writes the answer."""
        limits, route, principal = self._limits, request.target.route, request.principal
        if principal.limits is None:
            return
        if not route.json_body:
            request.extra_head = limits.head(principal)
            return
        try:
            grant = request.grant = limits.admit(principal, request.fields, route.name, request.body)
        except HttpError:
            request.extra_head = limits.head(principal)
            raise
        if grant is not None:
            request.body = grant.body
            request.extra_head = grant.head
