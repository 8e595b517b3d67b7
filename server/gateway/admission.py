"""From a head and a body to a `Request`: which route it is for, whose it is, what it asks for, what its key allows.

A connection (connection.py) calls the methods in their order, for each request that it reads.
"""

from __future__ import annotations

import math
import sys
from codecs import BOM_UTF8
from collections.abc import Callable
from dataclasses import replace
from typing import Final, Protocol

from server.errors import HttpError
from server.gateway import terms
from server.gateway.access.keys import ANONYMOUS, KeyRing, Principal
from server.gateway.access.limits import Grant, Limits
from server.gateway.access.records import INFER
from server.gateway.access.roles import FORWARDED
from server.gateway.access.scope import CacheScopes
from server.gateway.config import Failover, GatewayConfig, Kv
from server.gateway.cors import Origins
from server.gateway.fleet import affinity
from server.gateway.fleet.routing import Need
from server.gateway.models.directory import Directory, unknown
from server.gateway.models.served import Served
from server.gateway.routes import CLASSIFY, COMPLETIONS, GENERATE, Target, find
from server.gateway.wire.bodies import NONE, Fields, check_object, named, with_model
from server.gateway.wire.head import Headers, RequestHead, head_too_large, read_head
from server.gateway.wire.sglang import Wanted, is_sglang, translate, translate_classify
from weightsync.control.editions import MARK

STREAMED: Final = b"/admin/weights/upload"
MODELS: Final = b"/v1/models"


class Client(Protocol):
    """The side that asked (connection.py).

    All calls are made from the event loop and return at once. The answer is HTTP/1.1 as bytes, its head first.
    """

    send: Callable[[bytes], None]
    """Writes bytes of the answer that are not the last: what each token of a stream is sent with."""

    def write(self, data: bytes, *, last: bool = False) -> None:
        """Bytes of the answer, its `last` perhaps."""

    def body_done(self) -> None:
        """Releases the request's body, which is not needed any more."""

    def answered(self, *, keep_alive: bool) -> None:
        """The answer is complete."""

    def afterwards(self, work: Callable[[], None]) -> None:
        """Does `work` when the end of the answer has been written, before the loop waits again."""

    def refuse(self, error: HttpError) -> None:
        """Nothing was written: `error` is the answer."""

    def cut(self) -> None:
        """Ends the connection: the answer written so far stays incomplete."""


class Request:
    """A complete client request for a public route. Like a head (wire/head.py) it is no dataclass.

    `need`: which versions may answer; `served`: who answers it, the first choice first.
    """

    priority: int = 0  # its class in the queue; the lowest goes first
    known: affinity.Hint | None = None
    share: int | None = None  # the version it is for, where versions share the traffic
    drawn: int | None = None  # the version that the split drew for it by chance, whichever version answers
    cluster: int = -1  # of what sticks with it (splits.CLUSTERS); -1: it was drawn by itself
    lost: bool = False  # an instance failed it, or every instance of the version drawn is ejected
    repeated: bool = False  # on a version that is tried out, unseen; or it was not its turn
    failover: Failover = "off"  # who may go on with a stream whose instance dies
    grant: Grant | None = None  # of the key's limits, where it has any
    extra_head: bytes = b""  # header lines for the answer
    sglang: Wanted | None = None  # it came in SGLang's form, and is answered so

    def __init__(
        self,
        target: Target,
        head: RequestHead,
        body: bytes,
        need: Need | None,
        served: tuple[Served, ...],
        http10: bool,
        keep_alive: bool,
        principal: Principal = ANONYMOUS,
    ) -> None:
        self.target = target
        self.head = head
        self.body = body
        self.need = need
        self.served = served
        self.http10 = http10
        self.keep_alive = keep_alive
        self.principal = principal
        self.deadline_s = math.inf  # in which it must get to an instance
        self.fields = NONE  # of its body, as they were sent

    def skip(self, count: int) -> bool:
        """Leaves out the first `count` of those who may answer, and then who cannot; False, and all stay, if none can.

        Raises HttpError (400) if nobody could from the start."""
        able, refused = [], None
        route = self.target.route if self.sglang is None or self.sglang.scores else GENERATE.route
        for served in self.served[count:]:
            try:
                if served.upstream is not None:
                    served.upstream.check(route.name, constrained=self.need is not None)
                able.append(served)
            except HttpError as error:
                refused = error
        if able:
            self.served = tuple(able)
        elif not count and refused is not None:
            raise refused
        return bool(able)

    def use(self, line: bytes) -> None:
        """It is for the model that stands first now; `line` says so in the answer."""
        served = self.served[0]
        self.body = with_model(self.body, served.name)
        self.extra_head += line
        self.known, self.share, self.repeated = None, None, False
        self.drawn, self.cluster, self.lost = None, -1, False
        if served.upstream is not None:
            self.failover = "off"

    def hint(self) -> affinity.Hint:
        """The request's hint for routing, made when it is first asked for."""
        if self.known is None:
            self.known = affinity.hint(self.target.route.name, self.body, self.head.scope, self.head.session)
        return self.known


def streamed(url: bytes, method: bytes) -> bool:
    """Whether the body may be as large as a model: the app takes it as it comes (admin/weights.py)."""
    return url.startswith(STREAMED) and method == b"POST" and url.partition(b"?")[0] == STREAMED


class Admission:
    """The checks that one gateway makes before it forwards a request. Every method may raise HttpError."""

    def __init__(
        self,
        config: GatewayConfig,
        keys: KeyRing,
        scopes: CacheScopes,
        limits: Limits,
        directory: Directory,
        origins: Origins,
    ) -> None:
        self._directory = directory
        self._origins = origins
        self._config = config
        self._keys = keys
        self._scopes = scopes
        self._limits = limits
        self._unbounded = replace(config.limits, max_body=sys.maxsize)

    def read_head(self, headers: Headers, http_version: str, url: bytes, *, streamed: bool) -> RequestHead:
        """The head, checked. `streamed`: its body may be of any size."""
        if len(url) > self._config.limits.max_head:
            raise head_too_large(self._config.limits)
        head = read_head(headers, http_version, self._unbounded if streamed else self._config.limits, terms.HEADERS)
        if head.origin is not None:
            head.cors = self._origins.lines(head.origin)
        return head

    def targets(self, url: bytes, head: RequestHead, *, admin_port: bool) -> tuple[Target, ...]:
        """The forwarded routes at `url`, one per method; empty if it is for the app to answer: a browser's question
        whether a page may ask, and the list of models where no instance knows all, or not all are to be seen."""
        targets = find(url)
        if head.preflight:
            return ()
        named_here = self._directory.several or self._keys.names_models or bool(self._directory.main.fleet.editions)
        if targets and targets[0].upstream == MODELS and named_here:
            return ()
        return targets if targets and (admin_port or not targets[0].route.admin) else ()

    def principal(self, head: RequestHead, targets: tuple[Target, ...]) -> Principal:
        """The owner of the request's key."""
        return self._keys.authorize(head.key, FORWARDED if targets[0].route.admin else INFER)

    def check_head(self, head: RequestHead, headers: Headers, principal: Principal, listening_on: str) -> None:
        """May this page ask; and whose prefix cache may it hit, which is said to the instance."""
        if head.origin is not None and self._keys.open_inference:
            host = next((value for name, value in headers if name == b"host"), b"")
            self._origins.check(head.origin, host, listening_on)
        for served in self._directory.models.values():
            sticky = served.fleet.splits.header
            if sticky:
                head.sticky = {} if head.sticky is None else head.sticky
                head.sticky[sticky] = next((value.strip() for name, value in headers if name == sticky), b"")
        head.scope = self._scopes.line(principal)
        head.forward += head.scope

    def of_method(self, targets: tuple[Target, ...], method: bytes) -> Target:
        """The one that is asked for."""
        for target in targets:
            if target.route.method == method:
                return target
        allow = ", ".join([t.route.method.decode() for t in targets])
        raise HttpError(405, f"Use {allow} for {targets[0].route.name}.", allow=allow)

    def request(
        self, target: Target, head: RequestHead, principal: Principal, body: bytes, *, http10: bool, keep_alive: bool
    ) -> Request:
        """The request with what it asks for, by header or in its body, checked and in words for the instance."""
        directory, name, fields = self._directory, None, NONE
        wanted: Wanted | None = None
        if target.route.json_body:
            body = body.removeprefix(BOM_UTF8)
            fields = check_object(body)
            if target is GENERATE and is_sglang(fields):
                target = COMPLETIONS
                body, wanted = translate(body)
                fields = check_object(body)
            elif target is CLASSIFY and is_sglang(fields):
                body, wanted = translate_classify(body)
                fields = check_object(body)
        elif target.route.method == b"GET":
            body = b""
        served = directory.only
        if directory.several or principal.models is not None:
            name = named(fields)
            served = directory.find(name, principal.models)
        request = Request(target, head, body, None, served, http10, keep_alive, principal)
        request.priority, request.fields, request.sglang = principal.priority, fields, wanted
        mode = self._config.upstream.failover.mode
        request.failover = mode if target.route.continued else "off"
        in_body = fields.has_wish
        kv: Kv | None = None
        if in_body or head.asked:
            asked, request.body = terms.read(head.asked or {}, body, in_body=in_body)
            if in_body:
                request.fields = check_object(request.body)  # those of the first one would keep that too
            head.forward += asked.lines
            request.need, request.deadline_s, kv = asked.need, asked.deadline_s, asked.kv
            request.priority = terms.priority_within(asked, principal)
            if target.route.continued:
                request.failover = asked.failover_or(mode)
        if (kv or self._config.kv.mode) != "version":
            head.forward += self._kv_line(head, request.fields, principal, kv)
        if served[0].fleet.editions or MARK in (name or named(request.fields) or ""):
            self._use_edition(request, name or named(request.fields))
        if directory.several:
            if served[0].upstream is not None or len(served) > 1:
                request.skip(0)
            if name in directory.aliases or request.served[0].upstream is not None:
                request.use(b"")
        if request.priority:
            head.forward += b"x-hotswap-priority: %d\r\n" % request.priority
        return request

    def _use_edition(self, request: Request, name: str | None) -> None:
        """The adapter that it names has editions: it is for one of them from here on. Raises HttpError (404)."""
        editions, directory = request.served[0].fleet.editions, self._directory
        if name is None or name in directory.aliases or name in directory.models or not editions.concern(name):
            return
        found = editions.find(name, request.head.session)
        if found is None:
            raise unknown(name)
        request.body = with_model(request.body, found)
        request.head.forward += b"x-hotswap-edition: %b\r\n" % found.encode()

    def _kv_line(self, head: RequestHead, fields: Fields, principal: Principal, asked: Kv | None) -> bytes:
        """Whose KV cache the prompt may reuse, for the instance. `asked`: by the request itself. Raises HttpError
        (400)."""
        settings = self._config.kv
        session = b""
        if (asked or settings.mode) == "session":
            if head.session is None and fields.cache_key:
                head.session = fields.cache_key  # for routing too: the cache is where the last request went
            if head.session is None:
                if asked is None:
                    return b""
                message = "kv session needs the name of a session: send x-session-id, or prompt_cache_key in the body."
                raise HttpError(400, message, code="session_needed", param="kv")
            session = self._scopes.session(principal, head.session)
        return b"x-hotswap-kv: %b %d %.3f\r\n" % (session or b"-", settings.versions, settings.age_s)

    def admit(self, request: Request) -> None:
        """Within the limits of its key; `extra_head` says what is left of them, whoever writes the answer."""
        limits, route, principal = self._limits, request.target.route, request.principal
        request.extra_head = request.head.cors
        if principal.limits is None:
            return
        if not route.json_body:
            request.extra_head += limits.head(principal)
            return
        try:
            grant = request.grant = limits.admit(principal, request.fields, route.name, request.body)
        except HttpError:
            request.extra_head += limits.head(principal)
            raise
        if grant is not None:
            request.body = grant.body
            request.extra_head += grant.head
