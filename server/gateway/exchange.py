"""One forwarded request, from the client's last byte to the end of its answer.

    start -> [QUEUED] -> [HELD] -> CONNECTING -> WAITING (sent, nothing back) -> STREAMING -> ENDED
                             `----- pooled ------^

    no instance has room          -> queued (queue/) until its turn; 429, 503 or 504 if that does not come
    client leaves, any state      -> the upstream connection is dropped in the same loop iteration
    nobody to ask                 -> held (retries.py), then 503; 409 or 504 if it was for the version asked for
    connect fails                 -> next instance, else held, then 503
    refused for its version       -> next instance, else held, then 409 or 504 (nothing of the answer has gone out)
    pooled connection was stale   -> once more on a fresh one; if the instance takes none, it died of it: lost, as below
    connection lost, no byte yet  -> next instance, within the retry budget (retries.py)
    engine died, says the instance -> the same: the request may be what killed it
    upstream fails, nothing sent  -> 502/504 as JSON
    nobody has room, or is there  -> the next model of the alias, if there is one, instead of 429, 503 or being held
    upstream fails, mid-answer    -> another instance goes on with the stream (retries.py), else an error event where
                                     one fits, and the connection is cut

A request that is lost, before its first byte or in the middle of its answer, is sent to one more instance and no
further: whatever it does to instances, it does to two at most.

Below, the methods stand in the order of a request: `_place` finds where it goes, `upstream_data` passes on what comes
back, `_try_another` and `_broken` decide after a failure, `_end` settles. Nothing here awaits but the opening of a
connection: every step runs to its end in one turn of the loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace
from typing import Any, Final

from server.errors import BadUpstream, HttpError
from server.gateway.access.costs import Cost, reckon
from server.gateway.admission import Client, Request
from server.gateway.fleet import retries
from server.gateway.fleet.instance import Instance
from server.gateway.fleet.retries import Continuation
from server.gateway.fleet.routing import Need
from server.gateway.observe.context import TraceContext
from server.gateway.observe.stats import Finished, State
from server.gateway.queue.gate import Waiter
from server.gateway.queue.line import Ticket
from server.gateway.wire.bodies import NONE, Usage, last_version
from server.gateway.wire.capture import Capture
from server.gateway.wire.head import upstream_head
from server.gateway.wire.pool import UpstreamConnection
from server.gateway.wire.relay import VERSION_HEADER, ResponseRelay
from server.gateway.wire.sglang import Translation

log: Final = logging.getLogger("hotswap.gateway")

STALE_S: Final = 1.0  # after it was sent: a pooled connection that ends later was not closed already


class Exchange:
    """Drives one request. Its client owns it; it has at most one instance and one upstream connection at a time."""

    __slots__ = (
        "_asked_at", "_bytes_in", "_capture", "_charged", "_client", "_connecting", "_continuation", "_cost", "_fleet",
        "_gate", "_held_at", "_held_for", "_link", "_load", "_losses", "_passed", "_paused", "_pooled", "_relay",
        "_resent", "_second_try", "_served", "_stats", "_tried", "_write", "error_code", "first_byte", "instance",
        "last_instance", "last_progress", "queued_s", "request", "started", "state", "status", "ticket", "trace",
        "usage",
    )  # fmt: skip

    def __init__(self, client: Client, request: Request) -> None:
        self._client, self._write = client, client.send
        served = self._served = request.served[0]
        self._fleet, self._gate, self._stats = served.fleet, served.gate, served.stats
        self.request = request
        self._bytes_in = len(request.body)
        self.state = State.CONNECTING
        self.started = self.last_progress = time.monotonic()
        # its place
        self._passed = not request.target.route.works  # it has been let through, and stays so
        self.ticket: Ticket[Waiter] | None = None  # while it is queued
        self.queued_s = 0.0  # in the line, before an instance was chosen
        self._cost: Cost | None = None  # as the queue reckons with it
        self._charged: Cost | None = None  # the same, once its turn in the queue has come
        self._held_at = 0.0  # 0.0: it is not held
        self._held_for = ""
        # its instance
        self.instance: Instance | None = None
        self.last_instance = ""  # the id of the last one that was asked
        self._tried: list[Instance] = []
        self._asked_at = 0.0  # when it was sent to the instance that has it
        self._connecting: asyncio.Task[None] | None = None
        self._link: UpstreamConnection | None = None
        self._pooled = False
        self._paused = False  # the client's write buffer is full
        self._load = 0  # requests that the instance had with it
        self._losses = 0  # connections that ended after it was sent, without a byte
        self._resent = False  # to the instance that has it now, whose pooled connection had ended
        self._second_try = True  # until the head of an answer that is no refusal
        self._continuation: Continuation | None = None  # of a stream whose instance has died, the last time
        # its answer
        self._capture: Capture[Any] | None = None  # where somebody wants the whole of it
        self._relay = self._new_relay()
        self.first_byte = 0.0
        self.status = 0  # of the answer, once something of it was written
        self.error_code: str | None = None  # of the gateway's own error
        self.usage: Usage | None = None  # known at the end, of routes that generate
        self.trace: TraceContext | None = None

    # what its client says

    def start(self) -> None:
        """Picks an instance and sends the request, or answers why not."""
        self.trace = self._stats.begin(self.request.head, self._bytes_in)
        self._fleet.budget.requests += 1
        principal, collector = self.request.principal, self._stats.process.collector
        if collector is not None and (principal.collect or self._stats.process.collects_all):
            capture = collector.begin(principal, self.route, self.request.body)
            self._capture = self._relay.capture = capture
        self._place(None)

    def cancel(self) -> None:
        """The client is gone: the instance stops working for it now."""
        if self.state is not State.ENDED:
            self._stats.disconnects[self.state.value] += 1
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

    def sweep(self, now: float, stalled_client_s: float) -> None:
        """Ends an exchange that no side moves any more; called about once a second."""
        grant = self.request.grant
        if grant is not None and grant.unbounded and self._relay.sse:
            so_far = self._relay.usage()
            if so_far is not None:
                grant.grown(so_far.completion_tokens)
        idle = now - self.last_progress
        read_idle_timeout_s = self._fleet.settings.read_idle_timeout_s
        if self._paused and idle > stalled_client_s:
            self._stats.disconnects["stalled"] += 1
            self._end(status=499)
            self._client.cut()
        elif not self._paused and self._link is not None and idle > read_idle_timeout_s:
            self._broken(HttpError(504, f"The instance was silent for {read_idle_timeout_s:g} s."))
        elif not self._paused and self._stream_stands_still(now):
            self._broken(BadUpstream("The instance has fallen silent mid-answer.", code="upstream_died"))

    def _stream_stands_still(self, now: float) -> bool:
        if self._link is None or self.instance is None or self._relay.journal is None:
            return False
        return retries.silent(self.instance, self.last_progress, now, self._fleet.settings.failover.idle_s)

    # where it goes

    def _place(self, failure: HttpError | None) -> None:
        """Where it goes now: into the line, to an instance, or on hold; what cannot wait ends with the reason.

        `failure`: why the instance before has not answered, if one was asked.
        """
        self._drop_instance()
        request, splits = self.request, self._fleet.splits
        need = splits.need(request) if splits.on and request.target.route.works else request.need
        if not (self._passed or self._gate.open_to(need)):
            self._queue(need)
            return
        instance = self._fleet.pick(self._tried, need, request.hint)
        if instance is None and need is not request.need:
            splits.passed_on(request)
            instance = self._fleet.pick(self._tried, request.need, request.hint)
        if instance is not None:
            self._ask(instance)
        else:
            self._hold(failure)

    def _queue(self, need: Need | None) -> None:
        self._hold_ended("queued")
        request = self.request
        ticket: Ticket[Waiter] = Ticket(self, request.principal.digest, request.principal.weight, request.priority)
        ticket.need, ticket.size = need, len(request.body)
        ticket.deadline = self.started + request.deadline_s
        self._cost = reckon(request.fields, request.target.route.name, len(request.body))
        ticket.cost = self._cost.total
        self.state = State.QUEUED
        try:
            self._gate.join(ticket)
        except HttpError as error:
            self.turned_away(error)

    def go_on(self) -> None:
        """It was queued, and its turn has come (gate.Waiter)."""
        self._passed = True
        self._charged = self._cost
        self._place(None)

    def turned_away(self, error: HttpError) -> None:
        """No instance answers the request, or goes on with its answer (gate.Waiter, for a request queued in vain)."""
        answered = self.status != 0
        if self.state is State.ENDED or (not answered and self._falls_back(error)):
            return
        self._end(status=self.status or error.status, code=error.code)
        if answered:
            self._client.write(self._relay.error_event(error, self.route))
            self._client.cut()
        else:
            self._client.refuse(error)

    def _hold(self, failure: HttpError | None) -> None:
        if self._continuation is not None:
            patience = self._continuation.patience(self.started, self._fleet.settings.hold_s)
        else:
            patience = self._fleet.patience(self.request.need, failure)
            if self.request.deadline_s < patience.seconds:
                patience = replace(patience, seconds=self.request.deadline_s)
        if self._continuation is None and patience.kind == "fleet" and self._falls_back(patience.error):
            return
        try:
            self._fleet.room.enter(self, patience, soon=bool(self._tried))
        except HttpError as error:
            if self._continuation is not None:
                self._stats.failovers["nobody"] += 1
            self.turned_away(error)
            return
        self.state = State.HELD
        if not self._held_at:
            self._held_at, self._held_for = time.monotonic(), patience.kind

    def wake(self) -> None:
        """It was held, and something has changed or its time is up (retries.Waiter)."""
        self._fleet.room.leave(self)
        self._tried.clear()
        self._place(None)

    def _hold_ended(self, outcome: str) -> None:
        if self._held_at:
            self._fleet.room.leave(self)
            self._stats.held(self._held_for, outcome, time.monotonic() - self._held_at)
            self._held_at = 0.0

    def _falls_back(self, error: HttpError) -> bool:
        """Whether the next model of its alias has it now, instead of an answer that says `error`."""
        request, before = self.request, self._served
        theirs = before.upstream is not None and error.status in (502, 504)
        room = error.status in (429, 503) or error.code == "queue_timeout"
        if len(request.served) < 2 or not (room or theirs) or not request.skip(1):
            return False
        self._hold_ended("refused")
        self._give_back(reusable=False)
        self._drop_instance()
        if self._charged is not None:
            self._gate.queue.settle(request.principal.digest, request.priority, -self._charged.total)
            self._charged = None
        served = self._served = request.served[0]
        self._stats.fallbacks[served.name, error.code] += 1
        self._stats.handed_on(served.stats, self._bytes_in)
        self._fleet, self._gate, self._stats = served.fleet, served.gate, served.stats
        self._fleet.budget.requests += 1
        log.info("%s: %s answers for %s (%s)", request.head.request_id.decode(), served.name, before.name, error.code)
        request.use(b"x-hotswap-fallback: from=%b; reason=%b\r\n" % (before.name.encode(), error.code.encode()))
        self._passed = not request.target.route.works
        self._tried = []
        self._losses, self._resent, self._pooled, self._second_try = 0, False, False, True
        self._relay.close()
        self._relay = self._new_relay()
        self.last_progress = time.monotonic()
        self._place(None)
        return True

    # to an instance

    def _ask(self, instance: Instance) -> None:
        self._hold_ended("served")
        self._tried.append(instance)
        self.instance = instance
        self.last_instance = instance.id
        self._asked_at = 0.0
        instance.inflight += 1
        if self.request.target.route.works:
            self._passed = True
            instance.working += 1
            self._load = instance.working
        shadows = self._fleet.shadows
        if shadows.on and self._continuation is None:
            shadows.sample(self.request, instance, len(self._gate.queue))
        if instance.shadowed:
            shadows.make_room(instance)
        link = instance.pool.take()
        self._pooled = link is not None
        if link is not None:
            self._send(link)
        else:
            self._open_connection(instance)

    def _open_connection(self, instance: Instance) -> None:
        self.state = State.CONNECTING
        self._connecting = asyncio.get_running_loop().create_task(self._connect(instance))

    async def _connect(self, instance: Instance) -> None:
        try:
            try:
                link = await instance.pool.connect()
            except HttpError as exc:
                self._connecting = None
                self._fleet.connect_failed(instance)
                if self._resent:  # what was sent to it first may be what killed it
                    died = BadUpstream("The instance died before its first byte.", code="upstream_died")
                    self._try_another("lost", died)
                else:
                    self._try_another("not_sent", exc)
                return
            self._connecting = None
            self._send(link)
        except Exception:  # nobody awaits this task: its client would wait for ever
            log.exception("%s: a fault of the gateway", self.request.head.request_id.decode())
            self._connecting = None
            self.turned_away(HttpError(500, "The gateway failed to send this request on; the fault is in its log."))

    def _send(self, link: UpstreamConnection) -> None:
        assert self.instance is not None
        request = self.request
        body, lines = request.body, b"" if request.failover == "off" else retries.WANTED
        if self._continuation is not None:
            body, lines = self._continuation.prefix + body, self._continuation.lines
        method, path, opening = request.target.route.method, request.target.upstream, self.instance.pool.opening
        upstream = self._served.upstream
        if upstream is None:
            head = upstream_head(method, path, opening, request.head, len(body), lines)
        else:
            body, hides_usage = upstream.prepared(self.route, body)
            self._relay.foreign = upstream.answer(hides_usage=hides_usage)
            head = upstream.head(self.route, opening, len(body))
        self._link = link
        self.state = State.STREAMING if self.first_byte else State.WAITING
        self.last_progress = self._asked_at = time.monotonic()
        link.send(self, head, body)
        if self._paused:
            link.pause()

    # what comes back

    def upstream_data(self, data: bytes) -> None:
        """Bytes of the instance (pool.Owner)."""
        before, self.last_progress = self.last_progress, time.monotonic()
        relay = self._relay
        if self.first_byte and relay.sse:
            self._stats.gaps.observe(self.last_progress - before)
        try:
            out = relay.feed(data)
        except BadUpstream as exc:
            self._broken(exc)
            return
        if self._second_try and relay.status:
            fault = relay.fault()
            if fault is not None:
                self._broken(fault)
                return
            if relay.refused == retries.LOST or (relay.refused and self._resent):  # its engine died, or it was cut off
                died = BadUpstream("The instance died before its first token.", code="upstream_died")
                self._try_another("lost", died)
                return
            if relay.refused:  # its weights changed on the way there, or before this gateway knew
                self._try_another("refused", None)
                return
            self._answer_begins()
        self._forward(out)
        if relay.complete:
            self._complete()

    def upstream_lost(self, exc: Exception | None) -> None:
        """The connection has ended (pool.Owner)."""
        if self.state is State.ENDED:
            return
        try:
            if exc is not None:
                raise BadUpstream(f"The connection to the instance broke ({exc}).", code="upstream_died") from exc
            self._forward(self._relay.eof())
        except BadUpstream as failure:
            if self._relay.seen or self.instance is None:
                self._broken(failure)
            elif self._pooled and time.monotonic() - self.last_progress < STALE_S:
                # The idle connection was closed as the request was on its way; the instance never saw it.
                self._stats.stale_retries += 1
                self._link, self._pooled, self._resent = None, False, True
                self._open_connection(self.instance)
            else:
                self._try_another("lost", failure)
            return
        self._complete()

    def _answer_begins(self) -> None:
        """The head of an answer that is no refusal: it is tried nowhere else, unless its stream breaks."""
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

    def _forward(self, out: bytes) -> None:
        if not self.first_byte and self._relay.body_bytes:
            self.first_byte = self.last_progress
            self.state = State.STREAMING
        if out:
            self.status = self._relay.status
            if self._relay.complete:
                self._client.write(out, last=True)
            else:
                self._write(out)

    def _complete(self) -> None:
        relay = self._relay
        self._give_back(reusable=relay.reusable)
        self._client.answered(keep_alive=relay.keep_alive)
        self._client.afterwards(self._settle)  # the client need not wait for what is counted

    def _settle(self) -> None:
        self._end(status=self._relay.status)

    # what becomes of a failure

    def _try_another(self, why: retries.Failure, error: HttpError | None) -> None:
        """Nothing of an answer has come: the next instance is asked, as far as the rules of retries.py go."""
        instance = self.instance
        assert instance is not None
        if why == "lost":
            assert error is not None
            others = self._fleet.has_other(self._tried, self.request.need)
            if not (others and retries.again(why, self.route, self._losses, self._fleet.budget, time.monotonic())):
                self._broken(error)
                return
            log.warning("%s is sent again: %s", self.request.head.request_id.decode(), error)
            self._stats.upstream_failures[error.code] += 1
            self._fleet.failed(instance)
            self._losses += 1
        if why == "refused":
            instance.refusals += 1
        else:
            self.request.lost = True
        self._give_back(reusable=self._relay.reusable)
        self._resent = False
        if self._continuation is not None:
            self._relay.go_on()
        else:
            self._relay = self._new_relay()
        self._place(error)
        if self.instance is None:
            return
        if why == "refused":
            self._stats.refusal_retries += 1
        else:
            self._fleet.retries[why] += 1

    def _broken(self, error: HttpError) -> None:
        """The instance will not answer, or not to the end: only a stream can go on elsewhere."""
        log.warning("%s: %s", self.request.head.request_id.decode(), error)
        self._stats.upstream_failures[error.code] += 1
        self.request.lost = True
        if self.instance is not None:
            self._fleet.failed(self.instance)
        if not (self.status and self._goes_on(error)):
            self.turned_away(error)

    def _goes_on(self, error: HttpError) -> bool:
        """Whether the answer does not end with `error`, but in order or elsewhere (retries.py)."""
        relay, journal, last = self._relay, self._relay.journal, self._continuation
        if journal is None or not journal.broken() or self._losses >= retries.LOSSES:
            self._stats.failovers["not_resumable" if journal is None or journal.lost else "given_up"] += 1
            return False
        self._give_back(reusable=False)
        if journal.done:
            self._stats.failovers["complete"] += 1
            self._client.write(relay.finish())
            self._complete()
            return True
        self._losses += 1
        self._tried = [self.instance] if self.instance is not None else []
        others = [i for i in self._fleet.serving if i is not self.instance]
        told = relay.header(VERSION_HEADER)
        version = retries.version_for(journal, told, self.request.failover, others)
        need = self.request.need
        self._continuation = retries.go_on(journal, last, error, time.monotonic(), need, version)
        self.request.need = self._continuation.need
        relay.go_on()
        self._second_try = True
        self._place(error)
        return True

    # the end

    def _end(self, status: int, code: str | None = None) -> None:
        if self.state is State.ENDED:
            return
        self.state = State.ENDED
        self.status, self.error_code = status, code
        if self.ticket is not None:
            self._gate.leave(self.ticket)
        self._hold_ended("left" if status == 499 else "refused")
        if self._connecting is not None:
            self._connecting.cancel()
            self._connecting = None
        self._give_back(reusable=False)
        if self.request.target.route.json_body:
            self.usage, instance, grant = self._relay.usage(), self.instance, self.request.grant
            cost = self._cost or (None if grant is None else grant.cost)
            if instance is not None and cost is not None and self._asked_at:
                self.usage = instance.pace.settle(cost, self.usage, status, time.monotonic() - self._asked_at)
        cost = self._charged
        if cost is not None:
            more = cost.used(self.usage, status) - cost.total
            self._gate.queue.settle(self.request.principal.digest, self.request.priority, more)
        if self.request.grant is not None:
            self.request.grant.settle(self.usage, status)
        self._count()
        self._relay.close()
        self._drop_instance()

    def _give_back(self, *, reusable: bool) -> None:
        """The upstream connection goes to the pool, if its answer ended in order, or ends."""
        link, self._link = self._link, None
        if link is not None and reusable and not link.closed:
            link.release()
        elif link is not None:
            link.abort()

    def _drop_instance(self) -> None:
        if self.instance is not None:
            self.instance.inflight -= 1
            if self.request.target.route.works:
                self.instance.working -= 1
                self._gate.changed()
            self.instance = None

    def _new_relay(self) -> ResponseRelay:
        request = self.request
        relay = ResponseRelay(request.head.request_id, http10=request.http10, keep_alive=request.keep_alive)
        relay.extra_head = request.extra_head
        if request.sglang is not None:
            relay.sglang = Translation(request.sglang, self.started)
        if request.failover != "off":
            relay.memory, relay.request_bytes = self._fleet.replay, len(request.body)
        if self._capture is not None:
            self._capture.restart()
            relay.capture = self._capture
        return relay

    # what is told of it

    @property
    def route(self) -> str:
        """Name of the public route."""
        return self.request.target.route.name

    def _count(self) -> None:
        now, relay = time.monotonic(), self._relay
        ttft_s = self.first_byte - self.started if self.first_byte else -1.0
        taken_s = now - self.started
        self._stats.end(self.route, self.status, relay.body_bytes, taken_s, ttft_s, relay.sse, self.usage)
        shared = self._fleet.splits.on and self.request.target.route.works
        capture, collector = self._capture, self._stats.process.collector
        if not (self._stats.watched or shared or capture is not None):
            return
        ours = self._served.upstream is None
        first = relay.header(VERSION_HEADER)
        version = int(first) if ours and first.isdigit() else None
        if shared:
            self._stats.shared(version or self.request.share, self.status, taken_s, ttft_s)
        if not self._stats.watched and capture is None:
            return
        head, target = self.request.head, self.request.target
        finished = Finished(
            head.request_id.decode(), target.route.method.decode(), self.route, self.status, self.error_code,
            self.request.principal.name, time.time(), taken_s, self.queued_s,
            ttft_s=ttft_s if self.first_byte else None, instance=self.last_instance or None, first_version=version,
            last_version=(last_version(relay.tail()) or version) if ours else None,
            drawn_version=self.request.drawn, cluster=self.request.cluster, lost=self.request.lost,
            load=self._load, usage=self.usage,
            bytes_in=self._bytes_in, bytes_out=relay.body_bytes, streamed=relay.sse, trace=self.trace,
            model=self._stats.model,
        )  # fmt: skip
        self._stats.tell(finished)
        if capture is not None and collector is not None:
            collector.end(capture, finished)
