"""Processes that run other people's code and can be killed: what hangs or dies there cannot stall a step.

A worker is `python -m MODULE JOB`; it reads requests and writes replies, one JSON object a line; nothing is pickled.
Its first line says `{"concurrency": n, "bytes": n}`, or `{"problem": ...}` if it cannot do the job. A reply repeats the
`id` of its request. The trainer's side is `start_worker`, the worker's own `pipes`, `say` and `answer_all`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from trainer.errors import ConfigError, RewardError
from trainer.launch import die_with_parent

START_TIMEOUT_S = 120.0  # a classifier loads a model
LINE_LIMIT = 64 * 2**20
GRACE_S = 0.5  # for a coroutine to be cancelled in its worker before the worker is killed
MARK = "HOTSWAP_WORKER"  # in the environment of a worker and of all that descend from it


class WorkerProcess:
    """One process. `room` requests fit into it, `busy` are in it; `nbytes` is what it says it holds. `killed`: the
    trainer ended it, for the sake of one of its requests."""

    def __init__(self, process: asyncio.subprocess.Process, mark: str) -> None:
        self.process, self.mark = process, mark
        self.room, self.busy, self.nbytes = 1, 0, 0
        self.killed = self._over = False
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._serial = 0
        self._reader: asyncio.Task[None] | None = None

    @property
    def alive(self) -> bool:
        ended = self._over or self.process.returncode is not None
        return not ended and (self._reader is None or not self._reader.done())

    async def hello(self, timeout_s: float) -> dict[str, Any]:
        """Read its first line. Raises RewardError if none comes, or a line that is none."""
        assert self.process.stdout is not None
        try:
            line = await asyncio.wait_for(self.process.stdout.readline(), timeout_s)
            said: dict[str, Any] = orjson.loads(line) if line else {"problem": "its process ended at once"}
        except TimeoutError:
            raise RewardError(f"a worker process did not start within {timeout_s:g} s.") from None
        except ValueError:
            raise RewardError("a worker process printed before it began. Look for a sitecustomize that does.") from None
        self.room, self.nbytes = said.get("concurrency", 1), said.get("bytes", 0)
        self._reader = asyncio.get_running_loop().create_task(self._read())
        return said

    async def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Ask it, and wait for its reply. Raises ConnectionError: it was killed for another request's sake, or died."""
        assert self.process.stdin is not None
        self._serial += 1
        number, future = self._serial, asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            self.process.stdin.write(orjson.dumps({"id": number, **request}) + b"\n")
            await self.process.stdin.drain()
            return await future
        finally:
            self._waiting.pop(number, None)

    def kill(self) -> None:
        """Kill it and everything that it started, wherever that went."""
        self.killed = True
        self._end()

    def _end(self) -> None:
        self._over = True
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for pid in _marked(self.mark):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)

    async def end(self) -> None:
        """Kill it; whoever still waits for a reply gets ConnectionError."""
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
            self._end()  # it does not speak the protocol any more
        finally:
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(ConnectionError())


async def start_worker(
    module: str, job: Mapping[str, Any], key: str = "rewards", command: Sequence[str] = ()
) -> WorkerProcess:
    """Start a worker that can do `job`; `key` of the configuration names it in errors. `command` runs it instead of
    `module` under this Python: then what this one imports is not for it. Raises ConfigError when it says that it
    cannot, RewardError when it says nothing."""
    mark = secrets.token_hex(8)
    own = {} if command else {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    process = await asyncio.create_subprocess_exec(
        *(command or (sys.executable, "-m", module)), orjson.dumps(job).decode(),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, start_new_session=True, limit=LINE_LIMIT,
        env=os.environ | {MARK: mark, "OMP_NUM_THREADS": "1"} | own,
    )  # fmt: skip
    worker = WorkerProcess(process, mark)
    try:
        said = await worker.hello(START_TIMEOUT_S)
    except BaseException:
        await worker.end()
        raise
    if "problem" in said:
        await worker.end()
        raise ConfigError(said.get("key", key), said["problem"], said.get("advice", "Correct it"))
    return worker


def _marked(mark: str) -> list[int]:
    """Processes whose environment has the mark: those that left the process group too."""
    needle, found = f"{MARK}={mark}".encode(), []
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if needle in (directory / "environ").read_bytes():
                found.append(int(directory.name))
    return found


# in the worker --------------------------------------------------------------------------------------------------------


def pipes() -> tuple[BinaryIO, BinaryIO]:
    """Requests and replies. From now on the worker dies with its parent, and what it prints goes to standard error."""
    die_with_parent()
    requests, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    return requests, replies


def say(replies: BinaryIO, reply: Mapping[str, Any]) -> None:
    """One line."""
    replies.write(orjson.dumps(reply) + b"\n")


def refuse(replies: BinaryIO, error: ConfigError) -> None:
    """As the first line: it cannot do its job."""
    say(replies, {"key": error.key, "problem": error.problem, "advice": error.advice})


async def answer_all(
    answer: Callable[[dict[str, Any]], Awaitable[dict[str, Any]]], requests: BinaryIO, replies: BinaryIO
) -> None:
    """Reply to each request with the result of `answer`, all at the same time, until there are no more. An exception
    of `answer` is the reply's `problem`."""
    loop, tasks = asyncio.get_running_loop(), set[asyncio.Task[None]]()

    async def answered(request: dict[str, Any]) -> None:
        try:
            reply = await answer(request)
        except Exception as error:
            reply = {"problem": f"it raised {error!r}."}
        say(replies, {"id": request["id"], **reply})

    with ThreadPoolExecutor(1) as reader:  # of its own: the loop's threads may all be busy
        while line := await loop.run_in_executor(reader, requests.readline):
            task = loop.create_task(answered(orjson.loads(line)))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
