"""Publications of the harness's gateways, each forked from a process that has imported what `weightsync.push` does.

test_push_process.py has the real processes, and the spare that waits for the next publication.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path
from typing import Any

from server.gateway.models.publishing import Pusher
from tests.warm import SYNC, warm


class Forked:
    """The part of an asyncio.subprocess.Process that a Pusher uses."""

    _files: tuple[Any, ...] = ()

    def __init__(self, args: list[str], pass_fds: tuple[int, ...]) -> None:
        theirs, ours = zip(*(os.pipe() if number == 0 else os.pipe()[::-1] for number in range(3)), strict=True)
        passed = dict(zip((0, 1, 2, *pass_fds), (*theirs, *pass_fds), strict=True))
        self._process = warm(SYNC).start(args, dict(os.environ), Path(os.devnull), passed)
        for descriptor in theirs:
            os.close(descriptor)
        self._files = tuple(os.fdopen(ours[number], mode) for number, mode in enumerate(("wb", "rb", "rb")))
        self.pid, self.terminate, self.kill = self._process.pid, self._process.terminate, self._process.kill

    def __del__(self) -> None:
        for file in self._files:
            file.close()

    @property
    def returncode(self) -> int | None:
        return self._process.poll()

    async def wait(self) -> int:
        return await asyncio.to_thread(self._process.wait)

    async def communicate(self, told: bytes | None = None) -> tuple[bytes, bytes]:
        stdin, *outputs = self._files
        with contextlib.suppress(BrokenPipeError):
            stdin.write(told or b"")
            stdin.close()
        out, err = await asyncio.gather(*(asyncio.to_thread(output.read) for output in outputs))
        await self.wait()
        return out, err


class WarmPusher(Pusher):
    async def _start(
        self,
        options: tuple[str, ...],
        *,
        module: str = "weightsync.push",
        stdin: int = 0,
        pass_fds: tuple[int, ...] = (),
    ) -> Any:
        return await asyncio.to_thread(Forked, [module, *options], pass_fds)

    def _keep_spare(self) -> None:
        """A fork is as quick."""
