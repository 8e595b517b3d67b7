"""Worker processes that can be killed: what a reward runs there cannot stall a step.

Each worker (worker.py) reads requests and writes replies, one JSON object a line; nothing is pickled. It works on as
many at a time as it says at its start. One that is over its time is killed with all that descend from it, and replaced,
as is one that dies. What else it had in hand is asked again, each alone, so that only the culprit fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from trainer.errors import ConfigError, RewardError, RewardTimeout, RewardWorkerDied

START_TIMEOUT_S = 120.0  # a classifier loads a model
GRACE_S = 0.5  # for a coroutine to be cancelled in its worker before the worker is killed
LINE_LIMIT = 64 * 2**20
MARK = "HOTSWAP_REWARD_WORKER"  # in the environment of a worker and of all that descend from it


class _Lost(Exception):
    """The worker was killed for another request's sake, or died."""


class _Worker:
    """One process. `room` requests fit into it."""

    def __init__(self, process: asyncio.subprocess.Process, mark: str) -> None:
        self.process, self.mark = process, mark
        self.room, self.busy, self.nbytes, self._killed = 1, 0, 0, False
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._serial = 0
        self._reader: asyncio.Task[None] | None = None

    @property
    def alive(self) -> bool:
        ended = self._killed or self.process.returncode is not None
        return not ended and (self._reader is None or not self._reader.done())

    async def hello(self, timeout_s: float) -> dict[str, Any]:
        """Its first line. Raises RewardError if none comes."""
        assert self.process.stdout is not None
        try:
            line = await asyncio.wait_for(self.process.stdout.readline(), timeout_s)
        except TimeoutError:
            raise RewardError(f"a reward's process did not start within {timeout_s:g} s.") from None
        said: dict[str, Any] = orjson.loads(line) if line else {"problem": "its process ended at once"}
        self.room, self.nbytes = said.get("concurrency", 1), said.get("bytes", 0)
        self._reader = asyncio.get_running_loop().create_task(self._read())
        return said

    async def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Its reply. Raises _Lost."""
        assert self.process.stdin is not None
        self._serial += 1
        number, future = self._serial, asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            self.process.stdin.write(orjson.dumps({"id": number, **request}) + b"\n")
            await self.process.stdin.drain()
            return await future
        except (ConnectionError, BrokenPipeError):
            raise _Lost from None
        finally:
            self._waiting.pop(number, None)

    def kill(self) -> None:
        """With everything that it started, wherever that went."""
        self._killed = True
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for pid in _marked(self.mark):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)

    async def end(self) -> None:
        self.kill()
        with contextlib.suppress(ProcessLookupError):
            await self.process.wait()
        if self._reader is not None:
            self._reader.cancel()

    async def _read(self) -> None:
        assert self.process.stdout is not None
        try:
            while line := await self.process.stdout.readline():
                reply = orjson.loads(line)
                future = self._waiting.get(reply.pop("id", 0))
                if future is not None and not future.done():
                    future.set_result(reply)
        except ValueError:
            self.kill()  # it does not speak the protocol any more
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(_Lost())


class WorkerPool:
    """`size` workers of one kind. All methods belong to one event loop."""

    def __init__(self, job: Mapping[str, Any], size: int, timeout_s: float) -> None:
        """`job` is what worker.py is told to do; `timeout_s` bounds one evaluation there."""
        self._job, self._size, self._timeout_s = dict(job), size, timeout_s
        self._workers: list[_Worker] = []
        self._free = asyncio.Condition()
        self.replaced = 0
        self.nbytes = 0  # that all workers say they hold

    async def open(self) -> None:
        """Start all. Raises ConfigError when the first cannot do its job."""
        first = await self._start()
        self._workers.append(first)
        self._workers += await asyncio.gather(*(self._start() for _ in range(self._size - 1)))
        self.nbytes = sum(worker.nbytes for worker in self._workers)

    async def ask(self, request: Mapping[str, Any]) -> Any:
        """The value a worker gives. Raises RewardError: what it raised there, RewardTimeout, RewardWorkerDied."""
        alone = False
        while True:
            worker = await self._take(alone=alone)
            shared = worker.room > 1 and not alone
            try:
                async with asyncio.timeout(self._timeout_s + GRACE_S):
                    reply = await worker.ask({"timeout_s": self._timeout_s, **request})
            except TimeoutError:
                worker.kill()
                if not shared:
                    raise RewardTimeout(f"it took over {self._timeout_s:g} s and was killed.") from None
                alone = True  # whoever stopped the others stops nobody now
                continue
            except _Lost:
                if not shared:
                    raise RewardWorkerDied(f"its process ended (status {await _status(worker)}).") from None
                alone = True
                continue
            finally:
                await self._give_back(worker, alone=alone and not shared)
            if reply.get("late"):
                raise RewardTimeout(f"it took over {self._timeout_s:g} s and was cancelled.")
            if "problem" in reply:
                raise RewardError(reply["problem"])
            return reply["value"]

    async def close(self) -> None:
        """Kill all."""
        workers, self._workers = self._workers, []
        await asyncio.gather(*(worker.end() for worker in workers))

    async def _start(self) -> _Worker:
        mark = secrets.token_hex(8)
        path = os.pathsep.join(p for p in sys.path if p)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "trainer.rewards.worker", orjson.dumps(self._job).decode(),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, start_new_session=True, limit=LINE_LIMIT,
            env=os.environ | {MARK: mark, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        )  # fmt: skip
        worker = _Worker(process, mark)
        try:
            said = await worker.hello(START_TIMEOUT_S)
        except BaseException:
            await worker.end()
            raise
        if "problem" in said:
            await worker.end()
            raise ConfigError(said.get("key", "rewards"), said["problem"], said.get("advice", "Correct it"))
        return worker

    async def _take(self, *, alone: bool) -> _Worker:
        """A worker with room, or with nobody else in it."""
        async with self._free:
            while True:
                able = (w for w in self._workers if w.alive and w.busy < (1 if alone else w.room))
                found = min(able, key=_load, default=None)
                if found is not None:
                    found.busy += found.room if alone else 1
                    return found
                await self._free.wait()

    async def _give_back(self, worker: _Worker, *, alone: bool) -> None:
        """A dead one is replaced by whoever finds it first."""
        replace = not worker.alive and worker in self._workers
        if replace:
            self._workers.remove(worker)
        try:
            if replace:
                await worker.end()
                self.replaced += 1
                self._workers.append(await self._start())
        finally:
            async with self._free:
                worker.busy -= worker.room if alone else 1
                self._free.notify_all()


def _load(worker: _Worker) -> int:
    return worker.busy


async def _status(worker: _Worker) -> int | None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(worker.process.wait(), 1.0)
    return worker.process.returncode


def _marked(mark: str) -> list[int]:
    """Processes whose environment has the mark: those that left the process group too."""
    needle, found = f"{MARK}={mark}".encode(), []
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if needle in (directory / "environ").read_bytes():
                found.append(int(directory.name))
    return found
