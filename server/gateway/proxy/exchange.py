"""One forwarded request, from the client's last byte to the instance's.

start -> [QUEUED] -> [HELD] -> CONNECTING -> WAITING (sent, nothing back) -> STREAMING -> done
                         `----- pooled ------^

no instance has room          -> queued (queue/) until its turn; 429, 503 or 504 if that does not come
client leaves, any state      -> the upstream connection is dropped in the same loop iteration
nobody to ask                 -> held (waiting.py), then 503; 409 or 504 if it was for the version asked for
connect fails                 -> next instance, else held, then 503
refused for its version       -> next instance, else held, then 409 or 504 (nothing of the answer had been passed on)
pooled connection was stale   -> once more on a fresh one; if the instance takes none, it died of it: lost, as below
connection lost, no byte yet  -> next instance, within the retry budget (fleet/retries.py)
engine died, says the instance -> the same: the request may be what killed it
upstream fails, nothing sent  -> 502/504 as JSON
upstream fails, mid-answer    -> another instance goes on with the stream (failover.py), else an error event where one
                                 fits, and the connection is cut

A request that is lost, before its first byte or in the middle of its answer, is sent to one more instance and no
further: whatever it does to instances, it does to two at most.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Final

from server.errors import BadUpstream, HttpError, UpstreamTimeout
from server.gateway.fleet import retries
from server.gateway.fleet.instance import Instance
from server.gateway.fleet.view import Fleet
from server.gateway.observe.context import TraceContext
from server.gateway.observe.stats import Stats
from server.gateway.proxy import failover
from server.gateway.proxy.placing import Placing
from server.gateway.proxy.request import Client, Request
from server.gateway.queue.gate import Gate
from server.gateway.wire.bodies import NONE, Usage
from server.gateway.wire.journal import ReplayMemory
from server.gateway.wire.relay import ResponseRelay

log: Final = logging.getLogger("hotswap.gateway")

LOST: Final = b"lost"  # as server/instance/admission.py says it
STALE_S: Final = 1.0  # after it was sent: a pooled connection that ends later was not closed already


class Exchange(Placing):
    """Drives one request; owned by the client's connection, owns at most one upstream connection."""

    __slots__ = (
        "_client",
        "_losses",
        "_relay",
        "_resent",
        "_second_try",
        "_write",
        "bytes_in",
        "done",
        "error_code",
        "first_byte",
        "status",
        "trace",
        "usage",
    )

    def __init__(self, client: Client, request: Request, fleet: Fleet, gate: Gate, stats: Stats) -> None:
        super().__init__(request, fleet, gate, stats)
        self._client, self._write = client, client.send
        self._relay = self._new_relay(request, fleet.replay)
        self._losses = 0  # connections that ended after it was sent, without a byte
        self._resent = False  # to the instance that has it now, whose pooled connection had ended
        self._second_try = True  # until the head of an answer that is no refusal
        self.bytes_in = len(request.body)
        self.done = False
        self.first_byte = 0.0
        self.error_code: str | None = None  # of the gateway's own error
        self.status = 0
        self.trace: TraceContext | None = None
        self.usage: Usage | None = None  # known at the end, of routes that generate

    def start(self) -> None:
        """Picks an instance and sends the request, or answers why not."""
        self._stats.begin(self)
        self._fleet.budget.requests += 1
        self._try_next(None)

    def cancel(self) -> None:
        """The client is gone: the instance stops working for it now."""
        if not self.done:
            self._stats.disconnects[self.phase] += 1
            self._end(status=499)

    def pause(self) -> None:
        """The client's write buffer is full."""
        self._paused = True
        self.last_progress = time.monotonic()
        if self._link is not None:
            self._link.pause()

    def resume(self) -> None:
        """The client reads again."""
        self._paused = False
        self.last_progress = time.monotonic()
        if self._link is not None:
            self._link.resume()

    @property
    def phase(self) -> str:
        """QUEUED, HELD, CONNECTING, WAITING or STREAMING, in lower case, for metrics."""
        if self.ticket is not None:
            return "queued"
        if self._link is None:
            return "held" if self._held_at else "connecting"
        return "streaming" if self.first_byte else "waiting"

    @property
    def route(self) -> str:
        """Name of the public route."""
        return self.request.target.route.name

    @property
    def bytes_out(self) -> int:
        """Body bytes the instance has sent so far."""
        return self._relay.body_bytes

    @property
    def streams(self) -> bool:
        """Whether the answer is a stream of events."""
        return self._relay.sse

    def tail(self) -> bytes:
        """The last kilobytes of the answer."""
        return self._relay.tail()

    def header(self, name: bytes) -> bytes:
        """A header of the instance's answer, empty if it has none of that name."""
        return self._relay.header(name)

    def sweep(self, now: float, read_idle_timeout_s: float, stalled_client_s: float) -> None:
        """Ends an exchange that no side moves any more; called about once a second."""
        grant = self.request.grant
        if grant is not None and grant.unbounded and self._relay.sse:
            grant.grown(self._relay.events())
        idle = now - self.last_progress
        if self._paused and idle > stalled_client_s:
            self._stats.disconnects["stalled"] += 1
            self._end(status=499)
            self._client.cut()
        elif not self._paused and self._link is not None and idle > read_idle_timeout_s:
            self._upstream_failed(UpstreamTimeout(f"The instance was silent for {read_idle_timeout_s:g} s."))
        elif not self._paused and self._stream_stands_still(now):
            self._upstream_failed(BadUpstream("The instance has fallen silent mid-answer.", code="upstream_died"))

    def _stream_stands_still(self, now: float) -> bool:
        if self._link is None or self.instance is None or self._relay.journal is None:
            return False
        return failover.silent(self.instance, self.last_progress, now, self._fleet.settings.failover.idle_s)

    def turned_away(self, error: HttpError) -> None:
        """It was queued in vain, or could not be (gate.Waiter)."""
        self._end(status=error.status, code=error.code)
        self._client.refuse(error)

    # what the instance sends

    def upstream_data(self, data: bytes) -> None:
        before, self.last_progress = self.last_progress, time.monotonic()
        relay = self._relay
        if self.first_byte and relay.sse:
            self._stats.gaps.observe(self.last_progress - before)
        try:
            out = relay.feed(data)
        except BadUpstream as exc:
            self._upstream_failed(exc)
            return
        if self._second_try and relay.status:
            if relay.refused:
                self._refused(relay.refused)
                return
            self._no_second_try()
        self._forward(out)
        if relay.complete:
            self._complete()

    def _no_second_try(self) -> None:
        self._second_try = False
        if self.instance is not None:
            self._fleet.answered(self.instance, self._relay.status)
        if self._relay.journal is None:
            self.request.need = None
            self.request.body = b""
            self.request.fields = NONE
        if self._continuation is not None:
            self._stats.failovers["resumed"] += 1
        self._client.body_done()

    def _refused(self, why: bytes) -> None:
        """Its weights changed on the way there, or before this gateway knew: another instance may have the right ones.

        Unless its engine died while it had the request, or it had cut it off once before: then it is lost there.
        """
        refuser = self.instance  # in a name of its own: _try_next may leave nobody, and that is looked at below
        assert refuser is not None
        if why == LOST or self._resent:
            self._give_back()
            self._lost(refuser, BadUpstream("The instance died before its first token.", code="upstream_died"))
            return
        refuser.refusals += 1
        self._give_back()
        self._renew_relay()
        self._try_next(None)
        if self.instance is not None:
            self._stats.refusal_retries += 1

    def _renew_relay(self) -> None:
        """For the answer of the next instance; nothing of this one's has gone out."""
        self._resent = False
        if self._continuation is not None:
            self._relay.go_on()
        else:
            self._relay = self._new_relay(self.request, self._fleet.replay)

    def upstream_lost(self, exc: Exception | None) -> None:
        if self.done:
            return
        try:
            if exc is not None:
                raise BadUpstream(f"The connection to the instance broke ({exc}).", code="upstream_died") from exc
            self._forward(self._relay.eof())
        except BadUpstream as failure:
            if self._relay.seen or self.instance is None:
                self._upstream_failed(failure)
            elif self._pooled and time.monotonic() - self.last_progress < STALE_S:
                self._retry_fresh(self.instance)
            else:
                self._lost(self.instance, failure)
            return
        self._complete()

    def _retry_fresh(self, instance: Instance) -> None:
        """The idle connection was closed as the request was on its way; the instance never saw it."""
        self._stats.stale_retries += 1
        self._link = None
        self._pooled = False
        self._resent = True
        self._connecting = asyncio.get_running_loop().create_task(self._connect(instance, resent=True))

    def _lost(self, instance: Instance, failure: HttpError) -> None:
        """Its connection has ended before the first byte: retries.py says whether another instance is asked."""
        others = self._fleet.has_other(self._tried, self.request.need)
        if not (others and retries.again("lost", self.route, self._losses, self._fleet.budget, time.monotonic())):
            self._upstream_failed(failure)
            return
        log.warning("%s is sent again: %s", self.request.head.request_id.decode(), failure)
        self._stats.upstream_failures[failure.code] += 1
        self._fleet.failed(instance)
        self._losses += 1
        self._link = None
        self._renew_relay()
        self._try_next(failure)
        self._count_retry("lost")

    def _forward(self, out: bytes) -> None:
        if not self.first_byte and self._relay.body_bytes:
            self.first_byte = self.last_progress
        if out:
            self.status = self._relay.status
            if self._relay.complete:
                self._client.write(out, last=True)
            else:
                self._write(out)

    def _complete(self) -> None:
        relay = self._relay
        self._give_back()
        self._end(status=relay.status)
        self._client.answered(keep_alive=relay.keep_alive)

    def _give_back(self) -> None:
        """The upstream connection goes to the pool, if its answer ended in order."""
        link, self._link = self._link, None
        if link is not None and not link.closed:
            if self._relay.reusable:
                link.release()
            else:
                link.abort()

    def _upstream_failed(self, error: HttpError) -> None:
        log.warning("%s: %s", self.request.head.request_id.decode(), error)
        self._stats.upstream_failures[error.code] += 1
        if self.instance is not None:
            self._fleet.failed(self.instance)
        if not (self.status and self._goes_on(error)):
            self._break_off(error)

    def _goes_on(self, error: HttpError) -> bool:
        """Whether the answer does not end with `error`, but in order or elsewhere (failover.py)."""
        relay, journal, last = self._relay, self._relay.journal, self._continuation
        if journal is None or not journal.broken() or self._losses >= retries.LOSSES:
            self._stats.failovers["not_resumable" if journal is None or journal.lost else "given_up"] += 1
            return False
        if self._link is not None:
            self._link.abort()
            self._link = None
        if journal.done:
            self._stats.failovers["complete"] += 1
            self._client.write(relay.finish())
            self._complete()
            return True
        self._losses += 1
        self._tried = [self.instance] if self.instance is not None else []
        others = [i for i in self._fleet.serving if i is not self.instance]
        told = relay.header(b"x-hotswap-weight-version")
        version = failover.version_for(journal, told, self.request.failover, others)
        need = self.request.need
        self._continuation = failover.go_on(journal, last, error, time.monotonic(), need, version)
        self.request.need = self._continuation.need
        relay.go_on()
        self._second_try = True
        self._try_next(error)
        return True

    def _break_off(self, error: HttpError) -> None:
        if self.done:
            return
        answered = self.status != 0
        self._end(status=self.status or error.status, code=error.code)
        if answered:
            self._client.write(self._relay.error_event(error))
            self._client.cut()
        else:
            self._client.refuse(error)

    # the end

    def _end(self, status: int, code: str | None = None) -> None:
        if self.done:
            return
        self.done = True
        self.status, self.error_code = status, code
        if self.ticket is not None:
            self._gate.leave(self.ticket)
        self._hold_ended("left" if status == 499 else "refused")
        if self._connecting is not None:
            self._connecting.cancel()
            self._connecting = None
        if self._link is not None:
            self._link.abort()
            self._link = None
        if self.request.target.route.json_body:
            self.usage = self._relay.usage()
        cost = self._charged
        if cost is not None:
            more = cost.used(self.usage, status) - cost.total
            self._gate.queue.settle(self.request.principal.digest, self.request.priority, more)
        if self.request.grant is not None:
            self.request.grant.settle(self.usage, status)
        self._stats.end(self)
        self._relay.close()
        self._drop_instance()

    @staticmethod
    def _new_relay(request: Request, memory: ReplayMemory) -> ResponseRelay:
        relay = ResponseRelay(request.head.request_id, http10=request.http10, keep_alive=request.keep_alive)
        relay.extra_head = request.extra_head
        if request.failover != "off":
            relay.memory, relay.request_bytes = memory, len(request.body)
        return relay
