"""An event loop in a thread of its own, for what goes on while the main thread starts and watches processes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any


class Background:
    """Runs coroutines that have no end until `stop`; the first error of one stops all and is raised by `check`."""

    def __init__(self, *coroutines: Coroutine[Any, Any, None]) -> None:
        self._coroutines = coroutines
        self._error: BaseException | None = None
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), name="demo-clients", daemon=True)
        self._thread.start()
        self._started.wait()

    def check(self) -> None:
        """Raise what ended the thread early, if anything did."""
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Cancel everything and wait for it; safe to call twice."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join()

    async def _main(self) -> None:
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        self._started.set()
        tasks = [asyncio.create_task(c) for c in self._coroutines]
        stopping = asyncio.create_task(self._stopping.wait())
        await asyncio.wait([*tasks, stopping], return_when=asyncio.FIRST_COMPLETED)
        for task in [*tasks, stopping]:
            task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(outcome, Exception):
                self._error = outcome
