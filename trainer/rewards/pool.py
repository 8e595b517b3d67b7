"""Worker processes that can be killed: what a reward runs there cannot stall a step.

Each worker (worker.py) reads requests and writes replies, one JSON object a line; nothing is pickled. It works on as
many at a time as it says at its start. One that is over its time is killed with all that descend from it, and replaced,
as is one that dies, be it at work or not. What else it had in hand is asked again, each alone, so that only the culprit
fails. Who gives up waiting leaves the worker to it: nobody else is sent there before it has answered or was killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import sys
from collections.abc import Coroutine, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

import orjson

from trainer.errors import ConfigError, RewardError, RewardTimeout, RewardWorkerDied

GRACE_S = 0.5  # for a coroutine to be cancelled in its worker before the worker is killed
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 30.0  # between attempts to replace a worker
START_TIMEOUT_S = 120.0  # a classifier loads a model
LINE_LIMIT = 64 * 2**20
MARK = "HOTSWAP_REWARD_WORKER"  # in the environment of a worker and of all that descend from it


class WorkerPool:
    """`size` workers of one kind. All methods belong to one event loop."""

    def __init__(self, job: Mapping[str, Any], size: int, timeout_s: float) -> None:
        """`job` is what worker.py is told to do; `timeout_s` bounds one evaluation there."""
        self._job, self._size, self._timeout_s = dict(job), size, timeout_s
        self._workers: list[WorkerProcess] = []
        self._changed = asyncio.Event()  # set, and made anew, when there may be room
        self._tasks: set[asyncio.Task[Any]] = set()
        self._replacing: set[asyncio.Task[Any]] = set()
        self._problem = ""  # why there is no worker, when there is none
        self.nbytes = 0  # that all workers say they hold

    async def open(self) -> None:
        """Start all workers. Raises ConfigError when the first cannot do its job."""
        first = await start_worker(self._job)
        self._workers.append(first)
        self._workers += await asyncio.gather(*(start_worker(self._job) for _ in range(self._size - 1)))
        self._problem = ""
        self.nbytes = sum(worker.nbytes for worker in self._workers)

    async def ask(self, request: Mapping[str, Any]) -> Any:
        """The value a worker gives. Raises RewardError: what it raised there, RewardTimeout, RewardWorkerDied."""
        alone = False
        while True:
            worker = await self._take(alone=alone)
            try:
                return await asyncio.shield(_spawn(self._tasks, self._evaluate(worker, request, alone=alone)))
            except Lost:
                alone = True  # whoever stopped the others stops nobody now

    async def close(self) -> None:
        """Kill all workers."""
        workers, self._workers, self._problem = self._workers, [], "it was closed"
        for task in self._replacing:
            task.cancel()
        await asyncio.gather(*self._replacing, *(worker.end() for worker in workers), return_exceptions=True)
        self._wake()

    async def _evaluate(self, worker: WorkerProcess, request: Mapping[str, Any], *, alone: bool) -> Any:
        """As `ask`; raises Lost when another request may be to blame."""
        shared = worker.room > 1 and not alone
        try:
            async with asyncio.timeout(self._timeout_s + GRACE_S):
                reply = await worker.ask({"timeout_s": self._timeout_s, **request})
        except TimeoutError:
            worker.kill()
            if shared:
                raise Lost from None
            raise RewardTimeout(f"it took over {self._timeout_s:g} s and was killed.") from None
        except Lost:
            if shared:
                raise
            raise RewardWorkerDied(f"its process ended (status {await worker.status()}).") from None
        finally:
            worker.busy -= worker.room if alone else 1
            self._replace_dead()
            self._wake()
        if reply.get("late"):
            raise RewardTimeout(f"it took over {self._timeout_s:g} s and was cancelled.")
        if "problem" in reply:
            raise RewardError(reply["problem"])
        return reply["value"]

    async def _take(self, *, alone: bool) -> WorkerProcess:
        """A worker with room, or with nobody else in it. Raises RewardWorkerDied when there are none, nor will be."""
        while True:
            self._replace_dead()
            able = (w for w in self._workers if w.alive and w.busy < (1 if alone else w.room))
            found = min(able, key=attrgetter("busy"), default=None)
            if found is not None:
                found.busy += found.room if alone else 1
                return found
            if not self._workers and self._problem:
                raise RewardWorkerDied(f"there is no process left to evaluate it: {self._problem}")
            await self._changed.wait()

    def _replace_dead(self) -> None:
        for worker in [w for w in self._workers if not w.alive]:
            self._workers.remove(worker)
            _spawn(self._replacing, self._replace(worker))

    async def _replace(self, dead: WorkerProcess) -> None:
        """Try until another worker has started: what keeps one from starting may pass."""
        await dead.end()
        pause = FIRST_PAUSE_S
        while True:
            try:
                self._workers.append(await start_worker(self._job))
                break
            except (RewardError, ConfigError, OSError) as error:
                self._problem = str(error)
                self._wake()
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)
        self._problem = ""
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _spawn(tasks: set[asyncio.Task[Any]], work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """A task that is held until it ends, whether or not somebody still waits for it."""

    def ended(task: asyncio.Task[Any]) -> None:
        tasks.discard(task)
        if not task.cancelled():
            task.exception()  # seen, so that it is not logged as forgotten

    task = asyncio.get_running_loop().create_task(work)
    tasks.add(task)
    task.add_done_callback(ended)
    return task


class Lost(Exception):
    """The worker was killed for another request's sake, or died."""


class WorkerProcess:
    """One process. `room` requests fit into it, `busy` are in it; `nbytes` is what it says it holds."""

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
        """Read its first line. Raises RewardError if none comes, or a line that is none."""
        assert self.process.stdout is not None
        try:
            line = await asyncio.wait_for(self.process.stdout.readline(), timeout_s)
            said: dict[str, Any] = orjson.loads(line) if line else {"problem": "its process ended at once"}
        except TimeoutError:
            raise RewardError(f"a reward's process did not start within {timeout_s:g} s.") from None
        except ValueError:
            raise RewardError(
                "a reward's process printed before it began. Look for a sitecustomize that does."
            ) from None
        self.room, self.nbytes = said.get("concurrency", 1), said.get("bytes", 0)
        self._reader = asyncio.get_running_loop().create_task(self._read())
        return said

    async def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Ask it, and wait for its reply. Raises Lost."""
        assert self.process.stdin is not None
        self._serial += 1
        number, future = self._serial, asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            self.process.stdin.write(orjson.dumps({"id": number, **request}) + b"\n")
            await self.process.stdin.drain()
            return await future
        except (ConnectionError, BrokenPipeError):
            raise Lost from None
        finally:
            self._waiting.pop(number, None)

    def kill(self) -> None:
        """Kill it and everything that it started, wherever that went."""
        self._killed = True
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for pid in _marked(self.mark):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)

    async def end(self) -> None:
        """Kill it; whoever still waits for a reply gets Lost."""
        self.kill()
        with contextlib.suppress(ProcessLookupError):
            await self.process.wait()
        if self._reader is not None:
            self._reader.cancel()

    async def status(self) -> int | None:
        """The status with which it ended; None if it has not ended within a second."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.process.wait(), 1.0)
        return self.process.returncode

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
        finally:
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(Lost())


async def start_worker(job: Mapping[str, Any]) -> WorkerProcess:
    """Start a worker that can do `job`. Raises ConfigError when it says that it cannot, RewardError when it says
    nothing."""
    mark = secrets.token_hex(8)
    path = os.pathsep.join(p for p in sys.path if p)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "trainer.rewards.worker", orjson.dumps(job).decode(),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, start_new_session=True, limit=LINE_LIMIT,
        env=os.environ | {MARK: mark, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
    )  # fmt: skip
    worker = WorkerProcess(process, mark)
    try:
        said = await worker.hello(START_TIMEOUT_S)
    except BaseException:
        await worker.end()
        raise
    if "problem" in said:
        await worker.end()
        raise ConfigError(said.get("key", "rewards"), said["problem"], said.get("advice", "Correct it"))
    return worker


def _marked(mark: str) -> list[int]:
    """Processes whose environment has the mark: those that left the process group too."""
    needle, found = f"{MARK}={mark}".encode(), []
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if needle in (directory / "environ").read_bytes():
                found.append(int(directory.name))
    return found
