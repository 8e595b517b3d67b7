"""Several processes on one port: who starts them, what each is told, and who starts those anew that die.

Each worker has a listener of its own on the public port (SO_REUSEPORT): the kernel spreads connections evenly, where
one listener for all gave the first to wake three quarters of a burst. The supervisor opens the admin listener, which
workers inherit, so a request that comes while the first worker is started anew waits for it. Workers are new
interpreters, never forks: the store's client has threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Coroutine, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson

VARIABLE = "HOTSWAP_GATEWAY_WORKER"


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a worker among the others, beyond the options, which it reads like any gateway.

    It is one of `count` workers. `admin` is the inherited descriptor of that listener, `directory` is where they meet.
    """

    index: int
    count: int
    port: int
    admin: int
    directory: str
    parent: int

    @property
    def leads(self) -> bool:
        """Only this one serves the admin port and is a candidate for coordinator: what they do lives in one process."""
        return self.index == 0

    def page_socket(self, index: int) -> Path:
        """Where worker `index` gives out its metrics."""
        return Path(self.directory) / f"{index}.metrics"

    def to_environment(self) -> dict[str, str]:
        """How it is passed on."""
        return {VARIABLE: orjson.dumps(asdict(self)).decode()}

    @classmethod
    def taken(cls) -> Place | None:
        """The place given to this process, None if it is no worker. No process that it starts gets the same."""
        told = os.environ.pop(VARIABLE, None)
        return None if told is None else cls(**orjson.loads(told))


log = logging.getLogger("hotswap.gateway")

WRONG_SETTINGS = 2  # the status of a gateway whose settings cannot work; it has said why
STEADY_S = 30.0  # a worker that lived as long is started anew at once
MAX_DELAY_S = 10.0
KILL_AFTER_S = 5.0  # over the time that answers in progress are given


class Supervisor:
    """`count` workers of `hotswap gateway` with the options `argv`. `public` holds the port and does not listen."""

    def __init__(
        self, argv: Sequence[str], count: int, public: socket.socket, admin: socket.socket, *, rereads: bool = False
    ) -> None:
        """`rereads`: they read a file anew on SIGHUP, which ends them else."""
        self._rereads = rereads
        self._command = [sys.executable, "-m", "server.gateway", *argv]
        self._count = count
        self._public, self._admin = public, admin
        self._stopping = asyncio.Event()
        self._status = 0
        self._processes: dict[int, asyncio.subprocess.Process] = {}

    async def run(self, grace_s: float) -> int:
        """Until SIGINT or SIGTERM, then ends the workers within `grace_s` and a little; the status to exit with."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stopping.set)
        if self._rereads:
            loop.add_signal_handler(signal.SIGHUP, self._pass_on, signal.SIGHUP)
        with tempfile.TemporaryDirectory(prefix="hotswap-gateway-") as directory:  # nobody else may enter it
            await asyncio.gather(*(self._keep(index, directory, grace_s) for index in range(self._count)))
        return self._status

    async def _keep(self, index: int, directory: str, grace_s: float) -> None:
        deaths = 0
        while not self._stopping.is_set():
            begun = time.monotonic()
            process = self._processes[index] = await self._start(index, directory)
            await self._or_stopping(process.wait())
            if self._stopping.is_set():
                await self._end(process, grace_s)
                return
            if process.returncode == WRONG_SETTINGS:
                self._status = WRONG_SETTINGS
                self._stopping.set()
                return
            deaths = 1 if time.monotonic() - begun > STEADY_S else deaths + 1
            delay = pause_after(deaths)
            log.error("worker %d ended (status %s); another starts in %.1f s", index, process.returncode, delay)
            await self._or_stopping(asyncio.sleep(delay))

    async def _start(self, index: int, directory: str) -> asyncio.subprocess.Process:
        port, admin = self._public.getsockname()[1], self._admin.fileno()
        place = Place(index, self._count, port, admin, directory, os.getpid())
        # In a session of its own: an interrupt at the terminal comes to the supervisor, which tells the workers.
        return await asyncio.create_subprocess_exec(
            *self._command,
            env=os.environ | place.to_environment(),
            pass_fds=(admin,),
            start_new_session=True,
        )

    def _pass_on(self, number: signal.Signals) -> None:
        """Every worker reads its files anew."""
        for process in self._processes.values():
            if process.returncode is None:
                process.send_signal(number)

    @staticmethod
    async def _end(process: asyncio.subprocess.Process, grace_s: float) -> None:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(grace_s + KILL_AFTER_S):
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _or_stopping(self, wait: Coroutine[Any, Any, object]) -> None:
        """Returns when `wait` does, or when the supervisor is to stop."""
        tasks = [asyncio.create_task(wait), asyncio.create_task(self._stopping.wait())]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def pause_after(deaths: int) -> float:
    """Seconds before a worker that died so many times in a row is started anew; it may die for days."""
    return min(MAX_DELAY_S, 0.1 * 2 ** min(deaths - 1, 10))
