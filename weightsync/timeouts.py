"""asyncio's `timeout` and `timeout_at`, for Python 3.10, too, which lacks them: publishers run there."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

__all__ = ["timeout", "timeout_at"]

if TYPE_CHECKING or sys.version_info >= (3, 11):
    from asyncio import timeout, timeout_at
else:

    class Timeout:
        """Ends a block with TimeoutError at `when`, in seconds of the loop's clock; None: never. A task that another
        one cancels in that very turn of the loop gets the TimeoutError instead."""

        def __init__(self, when: float | None) -> None:
            self._when, self._timer, self._over = when, None, False

        def reschedule(self, when: float | None) -> None:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = None if when is None else asyncio.get_running_loop().call_at(when, self._end)

        def _end(self) -> None:
            self._over = True
            self._task.cancel()

        async def __aenter__(self) -> Timeout:
            self._task = asyncio.current_task()
            self.reschedule(self._when)
            return self

        async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
            self.reschedule(None)
            if self._over and kind is asyncio.CancelledError:
                raise TimeoutError from error

    timeout_at = Timeout

    def timeout(seconds: float | None) -> Timeout:
        return Timeout(None if seconds is None else asyncio.get_running_loop().time() + seconds)
