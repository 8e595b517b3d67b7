"""Editions of adapters in an instance (weightsync/control/editions.py): loaded when a request first needs one.

The gateway has chosen the edition, and names it in `x-hotswap-edition` and as the model in the body. Here it is loaded
beside the running steps, and the request goes on once vLLM's routes know it by name. The edition that was
asked for longest ago makes room, once no request runs through it any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import AsyncIterator, Mapping
from typing import Any, Protocol

import orjson

from server.instance.hosts import on_all
from server.instance.inflight import Problem
from server.instance.provenance import problem_body
from weightsync.control.editions import EditionRecord, prefix_of
from weightsync.control.hosts import this_host
from weightsync.control.records import Keys
from weightsync.errors import StoreError, WeightSyncError
from weightsync.peer.copies import wait_for_edition
from weightsync.signing import Trust
from weightsync.store import Store

log = logging.getLogger("hotswap.instance")
HEADER = b"x-hotswap-edition"
KNOWN_S = 2.0  # for an edition that a gateway knows already to be known here, too
AGAIN_S = 1.0
FETCH_S = 60.0  # for the peers of the instance's hosts to have it
REFUSED_S = 10.0  # that one which could not be loaded is not tried again
ENGINE_FAULTS = frozenset({"engine_died", "engine_call_failed"})


class Loader(Protocol):
    """The engine, as far as editions concern it (engine.py)."""

    hosts: tuple[str, ...]

    async def load_edition(self, edition: EditionRecord, places: Mapping[str, str]) -> None:
        """Have every worker build it, and vLLM's routes know it by its full name. `places`: the path of its slot on
        each host. Raises EngineError."""

    async def drop_edition(self, name: str) -> None:
        """The inverse."""

    def answers_to(self, name: str) -> bool:
        """Whether the name is that of an adapter which vLLM's routes know."""


class Editions:
    """Those of one model, by full name; at most `most` stay loaded that no request runs through."""

    def __init__(self, engine: Loader, model: str, trust: Trust, most: int) -> None:
        self._engine, self._keys, self._trust, self._most = engine, Keys(model), trust, most
        self._store: Store | None = None
        self._known: dict[str, EditionRecord] = {}
        self._by_key: dict[str, str] = {}
        self._changed = asyncio.Condition()
        self._loaded: OrderedDict[str, None] = OrderedDict()  # the one asked for longest ago first
        self._users: Counter[str] = Counter()
        self._refused: dict[str, tuple[float, Problem]] = {}  # until when a request is told so without another try
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._building = asyncio.Lock()  # one at a time, so that loading takes one core from the running steps
        self._tasks: set[asyncio.Task[Problem | None]] = set()

    async def follow(self, store: Store) -> None:
        """Know the store's editions, for as long as it runs; while the store is away, those of before."""
        self._store, prefix = store, prefix_of(self._keys)
        while True:
            try:
                found, revision = await store.list(prefix)
                self._known, self._by_key = {}, {}
                for kv in found:
                    self._put(kv.key, kv.value)
                await self._tell()
                async for event in store.watch(prefix, revision + 1):
                    if event.kind == "put":
                        self._put(event.kv.key, event.kv.value)
                    else:
                        self._known.pop(self._by_key.pop(event.kv.key, ""), None)
                    await self._tell()
            except StoreError as error:
                log.warning("going on with the editions of adapters that are known: %s", error)
                await asyncio.sleep(AGAIN_S)

    @contextlib.asynccontextmanager
    async def using(self, name: str) -> AsyncIterator[None]:
        """A request runs through the edition: it is loaded, and stays. Raises Problem."""
        self._users[name] += 1
        try:
            async with self._turns[name]:
                if name not in self._loaded and (name in self._known or not self._engine.answers_to(name)):
                    await self._load(name)
                if name in self._loaded:
                    self._loaded.move_to_end(name)
            yield
        finally:
            self._users[name] -= 1
            if not self._users[name]:
                del self._users[name]
                if name not in self._loaded:
                    self._turns.pop(name, None)
            await self._make_room()

    async def _load(self, name: str) -> None:
        record = await self._record(name)
        until, problem = self._refused.get(name, (0.0, None))
        if problem is not None and time.monotonic() < until:
            raise problem.with_traceback(None)
        building = asyncio.create_task(self._build(record))
        self._tasks.add(building)
        building.add_done_callback(self._tasks.discard)
        if (found := await asyncio.shield(building)) is not None:  # a client that goes leaves nothing half built
            raise found.with_traceback(None)

    async def _build(self, record: EditionRecord) -> Problem | None:
        """The refusal, if it cannot be loaded. It is kept, also if the client has gone meanwhile."""
        try:
            await self._have(record)
        except WeightSyncError as error:
            name = record.full_name
            log.error("the edition %s cannot be served: %s", name, error)
            # Not 503, unless engine or store are away: by that the gateway takes an instance for ill, adapters apart.
            status = 503 if error.code in ENGINE_FAULTS or isinstance(error, StoreError) else 422
            problem = Problem(f"The adapter {name} cannot be served: {error}", status=status, code=error.code)
            self._refused = {each: kept for each, kept in self._refused.items() if each in self._known}
            self._refused[name] = (time.monotonic() + REFUSED_S, problem)
            return problem
        return None

    async def _have(self, record: EditionRecord) -> None:
        """Raises EngineError, PeerError, StoreUnavailable, and what a signature is refused with."""
        store, host = self._store, this_host()
        assert store is not None, "an edition is known from the store"
        places = await on_all(
            {host, *self._engine.hosts}, lambda name: wait_for_edition(store, self._keys, record, name, FETCH_S)
        )
        await asyncio.to_thread(self._trust.check_part, self._keys.model, places[host])
        async with self._building:
            if record.full_name not in self._loaded:
                await self._engine.load_edition(record, {name: part.slot for name, part in places.items()})
                self._loaded[record.full_name] = None

    async def _record(self, name: str) -> EditionRecord:
        """Raises Problem (404)."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KNOWN_S), self._changed:
                await self._changed.wait_for(lambda: name in self._known)
        if (record := self._known.get(name)) is None:
            message = f"The model `{name[:200]}` does not exist here; GET /v1/models lists those that do."
            raise Problem(message, status=404, code="model_not_found", param="model")
        return record

    async def _make_room(self) -> None:
        """Drop what no request runs through: beyond `most`, and what is withdrawn."""
        idle = [name for name in self._loaded if name not in self._users]
        gone = [name for name in idle if name not in self._known]
        gone += [name for name in idle if name not in gone][: max(0, len(self._loaded) - len(gone) - self._most)]
        for name in gone:
            async with self._turns[name]:
                if name in self._users or self._loaded.pop(name, name) is not None:
                    continue  # a request came meanwhile, or another one has dropped it
                with contextlib.suppress(WeightSyncError):  # of an engine that has ended
                    await self._engine.drop_edition(name)
            if name not in self._users:
                self._turns.pop(name, None)

    def _put(self, key: str, raw: bytes) -> None:
        if (record := EditionRecord.readable(key, raw)) is not None:
            self._known[record.full_name], self._by_key[key] = record, record.full_name

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()


class WithEditions:
    """Wraps the app: a request for an edition waits until that is loaded."""

    def __init__(self, app: Any, editions: Editions) -> None:
        self._app, self._editions = app, editions

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        name = next((value for key, value in scope.get("headers", ()) if key == HEADER), None)
        if name is None:
            await self._app(scope, receive, send)
            return
        try:
            async with self._editions.using(name.decode()):
                await self._app(scope, receive, send)
        except Problem as problem:
            body = orjson.dumps(problem_body(problem, scope["path"]))
            headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
            await send({"type": "http.response.start", "status": problem.status, "headers": headers})
            await send({"type": "http.response.body", "body": body})
