"""A complete request for a public route, and the side that asked it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from server.errors import HttpError
from server.gateway.access.keys import ANONYMOUS, Principal
from server.gateway.access.limits import Grant
from server.gateway.config import Failover
from server.gateway.fleet import affinity
from server.gateway.proxy.routes import Target
from server.gateway.proxy.terms import Need
from server.gateway.wire.bodies import NONE, Fields
from server.gateway.wire.head import RequestHead


class Client(Protocol):
    """The side that asked. All calls are made from the event loop and return at once."""

    send: Callable[[bytes], None]
    """Writes bytes of the answer that are not the last: what each token of a stream is sent with."""

    def write(self, data: bytes, *, last: bool = False) -> None: ...

    def body_done(self) -> None: ...

    def answered(self, *, keep_alive: bool) -> None: ...

    def refuse(self, error: HttpError) -> None: ...

    def cut(self) -> None: ...


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
    failover: Failover = "off"  # who may go on with a stream whose instance dies
    grant: Grant | None = None  # of the key's limits, where it has any
    fields: Fields = NONE  # of its body, as they were sent
    extra_head: bytes = b""  # header lines for the answer

    def hint(self) -> affinity.Hint:
        """What routing may know of it; made when it is first asked for."""
        if self.known is None:
            self.known = affinity.hint(self.target.route.name, self.body, self.head.scope, self.head.session)
        return self.known
