"""`coordinator_process` and `ledger_process` as processes that a test stops and kills."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from pathlib import Path

from server.up.forks import Forked
from tests.waiting import eventually
from tests.warm import SYNC, piped


class Child:
    def __init__(self, process: Forked, lines: asyncio.StreamReader) -> None:
        self._process, self._lines = process, lines

    async def says(self, expected: str) -> None:
        """Its next line begins so."""
        line = (await asyncio.wait_for(self._lines.readline(), 240)).decode()
        assert line.startswith(expected), line

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    async def stopped(self) -> None:
        stat = Path(f"/proc/{self._process.pid}/stat")
        await eventually(lambda: stat.read_text().rsplit(")", 1)[1].split()[0] == "T")


@contextlib.asynccontextmanager
async def running(module: str, *arguments: str) -> AsyncIterator[Child]:
    process, printed = piped(SYNC, [f"tests.weightsync.control.{module}", *arguments])
    lines = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), printed)
    try:
        yield Child(process, lines)
    finally:
        process.kill()
        await asyncio.to_thread(process.wait)
        transport.close()
