"""Work that must have ended before its caller goes on, and work that nobody waits for."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any, TypeVar

from weightsync.errors import PeerRefused, PeerUnreachable

T = TypeVar("T")


async def to_the_end(work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. Who is cancelled meanwhile, however often, ends when it has."""
    task = asyncio.create_task(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not task.cancelled():
            task.exception()  # nobody is left to be told
        raise cancelled
    return task.result()


class Background:
    """What other peers are told, whether they hear it or not."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        async def told() -> None:
            with contextlib.suppress(PeerRefused, PeerUnreachable):
                await work

        task = asyncio.create_task(told())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def end(self, timeout_s: float) -> None:
        """Returns when all is told, or given up."""
        tasks = set(self._tasks)
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=timeout_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
