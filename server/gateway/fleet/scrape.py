"""Short questions of the gateway's own to an instance: is it answering, how loaded is it, and what has it cached."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from server.errors import BadUpstream, HttpError
from server.gateway.config import UpstreamSettings
from server.gateway.fleet.instance import Instance, parse
from server.gateway.fleet.view import Fleet
from server.gateway.wire.relay import ResponseRelay
from server.prefixes import PATH, decode

log = logging.getLogger("hotswap.gateway")

MAX_PAGE = 8 * 2**20
HOLDS_S = 0.25
MOST_ASKED = 32


class _Fetch:
    """Collects one small answer."""

    def __init__(self) -> None:
        self.relay = ResponseRelay(b"probe", http10=True, keep_alive=True)
        self.data: list[bytes] = []
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def upstream_data(self, data: bytes) -> None:
        self._step(lambda: self.relay.feed(data))

    def upstream_lost(self, exc: Exception | None) -> None:
        self._step(self.relay.eof)

    def _step(self, step: Callable[[], bytes]) -> None:
        if self.done.done():
            return
        try:
            self.data.append(step())
            if self.relay.body_bytes > MAX_PAGE:
                raise BadUpstream(f"The instance answered a probe with over {MAX_PAGE} bytes.")
        except BadUpstream as failure:
            self.done.set_exception(failure)
            return
        if self.relay.complete:
            self.done.set_result(None)


async def fetch(instance: Instance, path: bytes, timeout_s: float, lines: bytes = b"") -> tuple[int, bytes]:
    """GET `path` from `instance`, with header `lines`: status and body. Raises HttpError, TimeoutError."""
    async with asyncio.timeout(timeout_s):
        link = instance.pool.take() or await instance.pool.connect()
        ask = _Fetch()
        try:
            link.send(ask, b"GET %b HTTP/1.1\r\n%b%b\r\n" % (path, instance.pool.opening, lines), b"")
            await ask.done
        except BaseException:
            link.abort()
            raise
    if ask.relay.reusable and not link.closed:
        link.release()
    else:
        link.abort()
    return ask.relay.status, b"".join(ask.data).partition(b"\r\n\r\n")[2]


async def answering(instance: Instance, timeout_s: float) -> bool:
    """Whether `/health` of the instance says it is well; vLLM asks its engine."""
    try:
        status, _ = await fetch(instance, b"/health", timeout_s)
    except (HttpError, TimeoutError):
        return False
    return status == 200


class Readiness:
    """The health checks of instances, asked once for all callers at a time.

    All instances are asked at once, up to `MOST_ASKED` of them, and the first good answer is enough. It holds for
    `HOLDS_S`, and as long as the same instances serve: anybody may ask, and an instance is not asked as often.
    """

    def __init__(self) -> None:
        self._asking = asyncio.Lock()
        self._asked: list[Instance] = []
        self._found: Instance | None = None
        self._until = 0.0

    async def find(self, instances: list[Instance], timeout_s: float) -> Instance | None:
        """One of `instances` that answers within `timeout_s`, None if none does."""
        async with self._asking:
            if self._asked != instances or time.monotonic() >= self._until:
                self._found = await _first_answering(instances[:MOST_ASKED], timeout_s)
                self._asked, self._until = instances, time.monotonic() + HOLDS_S
            return self._found


async def _first_answering(instances: list[Instance], timeout_s: float) -> Instance | None:
    async def ask(instance: Instance) -> Instance | None:
        return instance if await answering(instance, timeout_s) else None

    asked = [asyncio.create_task(ask(instance)) for instance in instances]
    try:
        for each in asyncio.as_completed(asked):
            if (found := await each) is not None:
                return found
        return None
    finally:
        for task in asked:
            task.cancel()


async def scrape(instance: Instance, timeout_s: float) -> None:
    """Refreshes `instance.signals`; None when it did not answer in time."""
    inflight = instance.inflight
    try:
        status, page = await fetch(instance, b"/metrics", timeout_s)
    except (HttpError, TimeoutError):
        instance.scraped(None, inflight)
        return
    instance.scraped(parse(page) if status == 200 else None, inflight)


async def learn(instance: Instance, timeout_s: float) -> None:
    """Asks what its prefix cache has come to hold, and what it has dropped, since it was last asked."""
    if not instance.reports:
        return
    key, asked = instance.record.key, instance.cursor
    try:
        status, body = await fetch(instance, f"{PATH}?after={asked}".encode(), timeout_s)
        report = decode(body) if status == 200 else None
    except (HttpError, TimeoutError):
        return
    except ValueError as error:
        log.warning("instance %s does not say what its prefix cache holds: %s", instance.id, error)
        report, status = None, 404
    if (key, asked) != (instance.record.key, instance.cursor):
        return  # it has another version or is another process by now, and is asked for all
    if report is not None or status == 404:
        instance.reported(report, time.monotonic())


async def look_after(fleet: Fleet, instance: Instance, settings: UpstreamSettings) -> None:
    """One round: is it well, how loaded is it, and what has it cached."""
    fleet.probed(instance, well=await answering(instance, settings.health.probe_timeout_s))
    if instance.health.answering:
        await scrape(instance, settings.scrape_timeout_s)
        await learn(instance, settings.scrape_timeout_s)


async def scrape_forever(fleet: Fleet, settings: UpstreamSettings) -> None:
    """Keeps every serving or drained instance's health and signals fresh, at most one round of each at a time.

    A slow one holds up nobody: the next round of the others does not wait for it.
    """
    rounds: dict[Instance, asyncio.Task[None]] = {}
    try:
        while True:
            for task in rounds.values():
                if task.done() and (fault := task.exception()) is not None:
                    log.error("a round of health checks failed", exc_info=fault)
            rounds = {i: task for i, task in rounds.items() if not task.done()}
            for instance in fleet.watched:
                if instance not in rounds:
                    rounds[instance] = asyncio.create_task(look_after(fleet, instance, settings))
            await asyncio.sleep(settings.scrape_interval_s)
    finally:
        for task in rounds.values():
            task.cancel()
