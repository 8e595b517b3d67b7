"""`GET /hotswap/prefixes`: which prefixes of prompts the engine's cache holds (server/prefixes.py).

The prefixes of a request go to the engine with it, and the engine says which of them it has come to hold, and which it
has dropped (weightsync/vllm_engine/engine_core/prefixes.py). It is asked for that when somebody asks here, at most
once in REFRESH_S for all who ask. `Ledger` is what was said so far, with a number for each change, so that every
gateway hears of what is new to it.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable

from fastapi import APIRouter, Request
from starlette.responses import Response

from server.prefixes import PATH, SIZES, Report, chain, scope_line, seed, start
from weightsync.errors import WeightSyncError
from weightsync.vllm_engine.engine_core.prefixes import Changes

REFRESH_S = 0.5
CHANGES = 32_768  # that are remembered for those who ask for what has changed

Key = tuple[int, int]  # version, prefix


def with_shares(route: str, body: bytes, scope: str) -> list[tuple[int, float]]:
    """The prefixes of a request's prompt, the shortest first, and the share of the prompt that each covers, as far as
    bytes tell. `scope`: of the cache."""
    begin = start(route, body)
    if begin < 0:
        return []
    nbytes = len(body) - begin
    found = chain(body, begin, seed(scope_line(scope.encode("latin-1"))))
    return [(prefix, size / nbytes) for prefix, size in zip(found, SIZES, strict=False)]


class Ledger:
    """The prefixes that the caches of all data-parallel ranks hold together, and the last `most` changes of them."""

    def __init__(self, most: int = CHANGES) -> None:
        self._name = secrets.token_hex(8)  # of this process: a cursor of another one says nothing here
        self._ranks: dict[Key, int] = {}  # of what is held: a bit for each rank that holds it
        self._changes: deque[Key] = deque(maxlen=most)  # the last one has the number `_count`
        self._count = 0

    def take_in(self, ranks: Iterable[Changes]) -> None:
        """Takes the changes that the engines report."""
        for rank, changes in enumerate(ranks):
            for label, held, dropped in changes:
                version = int(label) if label.isdecimal() else 0
                for prefix in held:
                    self._mark((version, prefix), self._ranks.get((version, prefix), 0) | 1 << rank)
                for prefix in dropped:
                    self._mark((version, prefix), self._ranks.get((version, prefix), 0) & ~(1 << rank))

    def after(self, cursor: str) -> Report:
        """The changes after the report with this cursor; all prefixes held, if the changes cannot be told."""
        name, _, number = cursor.partition("-")
        told = int(number) if name == self._name and number.isascii() and number.isdigit() else -1
        whole = not self._count - len(self._changes) <= told <= self._count
        keys: Iterable[Key] = self._ranks
        if not whole:
            keys = set(itertools.islice(reversed(self._changes), self._count - told))
        held: dict[int, list[int]] = {}
        dropped: dict[int, list[int]] = {}
        for key in keys:
            (held if key in self._ranks else dropped).setdefault(key[0], []).append(key[1])
        return Report(f"{self._name}-{self._count}", whole, held, dropped)

    def _mark(self, key: Key, ranks: int) -> None:
        if bool(ranks) != (key in self._ranks):
            self._changes.append(key)
            self._count += 1
        if ranks:
            self._ranks[key] = ranks
        else:
            self._ranks.pop(key, None)


class Holdings:
    """The ledger, kept up to date. `ask`: what has changed since it was last asked, in each data-parallel rank."""

    def __init__(self, ask: Callable[[], Awaitable[Iterable[Changes]]]) -> None:
        self._ask = ask
        self._ledger = Ledger()
        self._asking = asyncio.Lock()
        self._fresh_until = 0.0

    async def after(self, cursor: str) -> Report:
        """`Ledger.after`, of what the engine holds now or did REFRESH_S ago. Raises as the engine does."""
        async with self._asking:
            if time.monotonic() >= self._fresh_until:
                self._ledger.take_in(await self._ask())
                self._fresh_until = time.monotonic() + REFRESH_S
        return self._ledger.after(cursor)


router = APIRouter(include_in_schema=False)


@router.get(PATH)
async def prefixes(request: Request, after: str = "") -> Response:
    """The report that gateways ask for with each scrape. `after`: the cursor of the last report."""
    holdings: Holdings = request.app.state.hotswap_prefixes
    try:
        report = await holdings.after(after)
    except WeightSyncError:  # the engine has died, or a rank of it fails, which others notice
        return Response(status_code=503)
    return Response(report.encode(), media_type="application/msgpack")
