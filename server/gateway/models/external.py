"""A model of somebody else's server: how a request goes there, and what becomes of its answer on the way back.

It is one instance of a fleet that no store keeps, so connections, circuit, queue and counts are those of any model. It
has no weight versions: nothing of a swap, a pin or a failover goes there, and its answers say so. Nothing of ours is
sent: no header of the client's but its content type, no cache scope, no name of a key.
"""

from __future__ import annotations

import ssl
from dataclasses import replace
from typing import Final

import msgspec

from server.errors import HttpError
from server.gateway.config import GatewayConfig, UpstreamSettings
from server.gateway.fleet.instance import Instance
from server.gateway.fleet.view import Fleet
from server.gateway.models import file
from server.gateway.models.served import Served
from server.gateway.observe.stats import ProcessStats, Stats
from server.gateway.queue.gate import Gate
from server.gateway.wire.bodies import raw_fields
from server.gateway.wire.foreign import Foreign
from server.gateway.wire.pool import Pool, not_connected, tls_fault
from weightsync.control.records import InstanceRecord
from weightsync.store import Store

ROUTES: Final = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"})
COUNTED: Final = frozenset({"/v1/chat/completions", "/v1/completions"})  # streams that tell tokens only if asked
_TRUE: Final = b"true"


class ExternalPool(Pool):
    """Connections to the upstream. Its address and its key are no client's business."""

    def __init__(self, at: file.External, settings: UpstreamSettings) -> None:
        super().__init__(at.host, at.port, settings, at.tls)
        default = 443 if at.tls is not None else 80
        host = at.host if at.port == default else self.authority.decode()
        self.opening = b"host: %b\r\n" % host.encode()
        if at.key:
            self.opening += b"authorization: Bearer %b\r\n" % at.key.encode()
        self._name = at.name

    def introduce(self, key: str) -> None:
        """It has one key, for as long as the file says so."""

    def _refused(self, exc: OSError) -> HttpError:
        """Also what the log is told, once a failed connection is met."""
        if isinstance(exc, ssl.SSLError):
            message = f"The upstream of {self._name} has not shown that it is who it should be ({tls_fault(exc)})."
            return HttpError(503, message, code="upstream_untrusted")
        reason = not_connected(exc)
        return HttpError(503, f"The upstream of {self._name} {reason}; try again shortly.", code="upstream_unreachable")


class Upstream:
    """The changes that make a request one for the upstream (served.Served.upstream)."""

    def __init__(self, at: file.External) -> None:
        self.name = at.name
        self._path, self._model = at.path.encode(), msgspec.Raw(msgspec.json.encode(at.model))

    def check(self, route: str, *, constrained: bool) -> None:
        """Whether it can answer a request of that route; `constrained`: for some weights. Raises HttpError (400)."""
        if constrained:
            message = f"{self.name} is served by an upstream that has no weight versions; ask without one."
            raise HttpError(400, message, code="weights_external", param="version")
        if route not in ROUTES:
            served = ", ".join(sorted(ROUTES))
            message = f"{self.name} is served by an upstream, which answers {served} and not {route}."
            raise HttpError(400, message, code="route_not_external", param="model")

    def prepared(self, route: str, body: bytes) -> tuple[bytes, bool]:
        """The body as it goes there, and whether the stream's last chunk, of tokens, is nobody's but ours."""
        fields = raw_fields(body)
        fields["model"] = self._model
        hides = False
        if route in COUNTED and bytes(fields.get("stream", b"")) == _TRUE:
            options = fields.get("stream_options")
            asked = raw_fields(bytes(options)) if options is not None and bytes(options) != b"null" else {}
            hides = bytes(asked.get("include_usage", b"")) != _TRUE
            asked["include_usage"] = msgspec.Raw(_TRUE)
            fields["stream_options"] = msgspec.Raw(msgspec.json.encode(asked))
        return msgspec.json.encode(fields), hides

    def head(self, route: str, opening: bytes, length: int) -> bytes:
        """The request's head."""
        target = self._path + route.encode().removeprefix(b"/v1")
        lines = b"content-type: application/json\r\naccept: application/json, text/event-stream\r\n"
        return b"POST %b HTTP/1.1\r\n%b%bcontent-length: %d\r\n\r\n" % (target, opening, lines, length)

    def answer(self, *, hides_usage: bool) -> Foreign:
        """The filter that the upstream's answer passes through."""
        return Foreign(self.name, hides_usage=hides_usage)


def serve(at: file.External, config: GatewayConfig, store: Store, process: ProcessStats) -> Served:
    """The upstream as a model."""
    entry = at.entry
    settings = replace(
        config.upstream,
        connect_timeout_s=entry.connect_timeout,
        read_idle_timeout_s=entry.read_timeout,
        max_in_flight=entry.max_in_flight,
        failover=replace(config.upstream.failover, mode="off"),
        routing="least-loaded",
        hold_s=0.0,
    )
    stats = Stats(process, at.name)
    fleet = Fleet(store, at.name, settings, stats)
    record = InstanceRecord(f"upstream:{at.name}", "", "SERVING")
    fleet.keep(Instance(record, settings, pool=ExternalPool(at, settings)))
    gate = Gate(fleet, config.queue)
    fleet.on_change = gate.changed
    return Served(at.name, fleet, gate, stats, Upstream(at))
