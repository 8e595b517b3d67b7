"""Leaving on SIGTERM: first whoever sends requests is told, while everything goes on; then uvicorn shuts down."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Awaitable, Callable
from types import FrameType

import uvicorn

log = logging.getLogger("hotswap")


class LeavingServer(uvicorn.Server):
    """SIGTERM: `leave` runs to its end, then uvicorn's own shutdown. SIGINT, or a second SIGTERM: shutdown at once.

    `leave` says whether the process goes on behind `serve`, to give back in order what it holds; if not, or after a
    SIGINT, it dies of its signal, as uvicorn does it.
    """

    def __init__(self, config: uvicorn.Config, leave: Callable[[], Awaitable[bool]]) -> None:
        super().__init__(config)
        self._leave = leave
        self._loop: asyncio.AbstractEventLoop | None = None
        self._leaving: asyncio.Task[None] | None = None
        self._told = False

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called by the interpreter between any two instructions of the main thread."""
        if sig != signal.SIGTERM or self._told or self._loop is None:
            super().handle_exit(sig, frame)
            return
        self._told = True
        self._loop.call_soon_threadsafe(self._begin)

    def _begin(self) -> None:
        self._leaving = asyncio.ensure_future(self._leave_and_stop())

    async def _leave_and_stop(self) -> None:
        in_order = False
        try:
            in_order = await self._leave()
        except Exception:
            log.exception("leaving was cut short")
        finally:
            if not in_order:
                self._captured_signals.append(signal.SIGTERM)
            self.should_exit = True
