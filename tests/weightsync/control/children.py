"""`coordinator_process` and `ledger_process` as processes that a test stops and kills."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from tests.waiting import eventually


class Child:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def says(self, expected: str) -> None:
        """Its next line begins so."""
        assert self._process.stdout is not None
        line = (await asyncio.wait_for(self._process.stdout.readline(), 240)).decode()
        assert line.startswith(expected), line

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    async def stopped(self) -> None:
        stat = Path(f"/proc/{self._process.pid}/stat")
        await eventually(lambda: stat.read_text().rsplit(")", 1)[1].split()[0] == "T")


@contextlib.asynccontextmanager
async def running(module: str, *arguments: str) -> AsyncIterator[Child]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", f"tests.weightsync.control.{module}", *arguments, stdout=asyncio.subprocess.PIPE
    )
    try:
        yield Child(process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
