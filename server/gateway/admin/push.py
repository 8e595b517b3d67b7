"""Publishing, in a process of its own: reading gigabytes must not stop a single stream.

After the first publication a spare process waits, imports done, for the next one; each publishes once. One that makes
no progress is ended, so that it does not keep the others waiting.

A publication belongs to the gateway, not to the request that asked for it: a client that leaves changes nothing. Ended
half-way (the gateway stops), it leaves a draft whose lease expires; nobody ever sees it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import orjson

from server.errors import BadRequest, HttpError, UpstreamTimeout
from server.gateway.admin.error_map import from_fields
from server.gateway.config import GatewayConfig
from weightsync.parts import check_name

log = logging.getLogger("hotswap.gateway")

T = TypeVar("T")
STOP_GRACE_S = 5.0
MOST_PATH = 4096  # bytes, as Linux has it
STALLED_S = 60.0  # without a byte read or a moment of computing
SPARE_S = 900.0  # a spare nobody needs for so long gives its memory back


class Pusher:
    """Runs publications one after the other: two at once would fence each other off."""

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._spare: asyncio.Task[asyncio.subprocess.Process] | None = None
        self._expiry: asyncio.TimerHandle | None = None

    async def push(
        self,
        path: Path,
        then: Callable[[int], Awaitable[T]],
        *,
        step: int | None = None,
        part: str = "",
        parts: Mapping[str, str] | None = None,
    ) -> T:
        """Publishes the checkpoint in `path` and hands its version to `then`, whether or not the caller waits.

        `step` is the training step to note down; `part` what is in `path` if not the base model, `parts` {part: path}
        what else goes into the version. Raises HttpError, BadPart.
        """
        for name, where in {part: str(path), **(parts or {})}.items():
            check_name(name)
            _check_path(where)

        async def version_only(answer: dict[str, Any]) -> T:
            return await then(int(answer["version"]))

        noted = [f"--part={part}", *([] if step is None else [f"--step={step}"])]
        noted += [f"--with={name}={where}" for name, where in (parts or {}).items()]
        return await self.keep(self._push((*noted, str(path)), version_only))

    async def prepare(self, file: BinaryIO, upload_id: str) -> Prepared:
        """Starts the process that will publish what `file` is going to hold: it imports while the bytes arrive."""
        what = (f"--delta=/proc/self/fd/{file.fileno()}", f"--upload-id={upload_id}", "--when-told")
        options = self._options(what)
        process = await self._start(options, stdin=asyncio.subprocess.PIPE, pass_fds=(file.fileno(),))
        return Prepared(process, file)

    async def push_delta(self, prepared: Prepared, then: Callable[[dict[str, Any]], Awaitable[T]]) -> T:
        """Publishes the version that the file holds now, and hands what `weightsync.push` says of it to `then`.

        Raises HttpError.
        """
        return await self.keep(self._push_prepared(prepared, then))

    async def close(self) -> None:
        """Ends what is running."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._drop_spare()

    async def keep(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs `work` to its end even if the caller goes away; `close` ends it."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    async def _push(self, what: tuple[str, ...], then: Callable[[dict[str, Any]], Awaitable[T]]) -> T:
        async with self._turn:
            answer = await self._outcome(*await self._begin(what))
        self._keep_spare()
        return await then(answer)

    async def _begin(self, what: tuple[str, ...]) -> tuple[asyncio.subprocess.Process, bytes | None]:
        """The spare process and what to tell it; else a new one, which knows."""
        spare, self._spare = self._spare, None
        with contextlib.suppress(OSError):
            if spare is not None and (process := await spare).returncode is None:
                return process, orjson.dumps(self._options(what)) + b"\n"
        return await self._start(self._options(what)), None

    def _keep_spare(self) -> None:
        """Begin to start one for the next publication, to be ended after a while."""
        if self._spare is None:
            self._spare = asyncio.create_task(self._start(("--wait",), stdin=asyncio.subprocess.PIPE))
            loop = asyncio.get_running_loop()
            if self._expiry is not None:
                self._expiry.cancel()
            self._expiry = loop.call_later(SPARE_S, lambda: loop.create_task(self._drop_spare()))

    async def _drop_spare(self) -> None:
        spare, self._spare = self._spare, None
        if self._expiry is not None:
            self._expiry.cancel()
        if spare is not None:
            with contextlib.suppress(OSError):
                await _end(await spare)

    async def _push_prepared(self, prepared: Prepared, then: Callable[[dict[str, Any]], Awaitable[T]]) -> T:
        try:
            async with self._turn:
                answer = await self._outcome(prepared.process, b"go\n")
        finally:
            await prepared.discard()
        return await then(answer)

    def _options(self, what: tuple[str, ...]) -> tuple[str, ...]:
        """Each with its value in one word: what a client sent is never taken for an option."""
        return f"--store={self._config.store}", f"--model={self._config.model}", "--no-activate", "--json", *what

    async def _start(
        self, options: tuple[str, ...], *, stdin: int = asyncio.subprocess.DEVNULL, pass_fds: tuple[int, ...] = ()
    ) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "weightsync.push", *options),
            stdin=stdin,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C at the gateway's terminal is the gateway's to handle
            pass_fds=pass_fds,
        )

    async def _outcome(self, process: asyncio.subprocess.Process, told: bytes | None = None) -> dict[str, Any]:
        timeout_s = self._config.push_timeout_s
        answering = asyncio.create_task(process.communicate(told))
        stalled = asyncio.create_task(_stalled(process.pid))
        try:
            await asyncio.wait({answering, stalled}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done() and stalled.done():
                what = f"Publishing made no progress for {STALLED_S:g} s and was ended; nothing was published."
                raise UpstreamTimeout(what, code="push_stalled")
            if not answering.done():
                what = f"Publishing took over {timeout_s:g} s and was ended; nothing was published."
                raise UpstreamTimeout(what, code="push_timeout")
            out, err = answering.result()
        finally:
            stalled.cancel()
            await _end(process)
            answering.cancel()
            await asyncio.gather(answering, stalled, return_exceptions=True)
        return _answer_of(process.returncode, out, err)


@dataclass(frozen=True)
class Prepared:
    """A publishing process that waits to be told that its file is whole."""

    process: asyncio.subprocess.Process
    file: BinaryIO

    async def discard(self) -> None:
        """End the process and let go of the file; safe to call twice."""
        self.file.close()
        await _end(self.process)


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(STOP_GRACE_S):
            await process.wait()
            return
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    try:
        async with asyncio.timeout(STOP_GRACE_S):
            await process.wait()
    except TimeoutError:
        log.error("process %d of a publication cannot be ended: it waits for a disk that does not answer", process.pid)


async def _stalled(pid: int) -> None:
    """Returns when the process has done nothing for STALLED_S."""
    seen, since = _work_done(pid), time.monotonic()
    while time.monotonic() - since < STALLED_S:
        await asyncio.sleep(STALLED_S / 20)
        now = _work_done(pid)
        if seen is None or now is None or now.has_gone_on(seen):
            seen, since = now, time.monotonic()


@dataclass(frozen=True)
class _Work:
    """What a process has done: its first thread, which publishes, in bytes and ticks, and all of it in seconds."""

    first: tuple[bytes, ...]
    cpu_s: float

    def has_gone_on(self, since: _Work) -> bool:
        """Another thread keeps a lease alive, whatever the first waits for: of all others a moment is nothing."""
        return self.first != since.first or self.cpu_s - since.cpu_s > STALLED_S / 20


def _work_done(pid: int) -> _Work | None:
    """None where the kernel does not tell."""
    try:
        first, process = Path(f"/proc/{pid}/task/{pid}"), Path(f"/proc/{pid}/stat")
        io = (first / "io").read_bytes().split()
        ticks = [int(n) for n in _times(process)]
        return _Work((*_times(first / "stat"), io[1], io[3]), sum(ticks) / os.sysconf("SC_CLK_TCK"))
    except (OSError, IndexError):
        return None


def _times(stat: Path) -> list[bytes]:
    """User and system time."""
    return stat.read_bytes().rpartition(b")")[2].split()[11:13]


def _check_path(path: str) -> None:
    """Raises BadRequest for what can be no absolute path."""
    try:
        good = Path(path).is_absolute() and "\0" not in path and len(os.fsencode(path)) <= MOST_PATH
    except UnicodeEncodeError:
        good = False
    if not good:
        raise BadRequest("`path` must be an absolute path on the gateway's host.", code="bad_path", param="path")


def _answer_of(status: int | None, out: bytes, err: bytes) -> dict[str, Any]:
    """What the process says of the version it published. Raises what it says went wrong."""
    answer = _last_json(out) or _last_json(err)
    if status == 0 and isinstance(answer.get("version"), int):
        return answer
    if isinstance(answer.get("error"), dict):
        raise from_fields(answer["error"])
    log.error("weightsync.push ended with status %s: %s", status, err.decode(errors="replace")[-2000:])
    raise HttpError(f"Publishing failed (status {status}); the gateway's log has its output.", code="push_failed")


def _last_json(output: bytes) -> dict[str, Any]:
    for line in reversed(output.splitlines()):
        with contextlib.suppress(orjson.JSONDecodeError):
            value = orjson.loads(line)
            if isinstance(value, dict):
                return value
    return {}
