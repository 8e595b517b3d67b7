"""Publishing, in a process of its own: reading gigabytes must not stop a single stream.

A publication belongs to the gateway, not to the request that asked for it: a client that leaves changes nothing. Ended
half-way (the gateway stops), it leaves a draft whose lease expires; nobody ever sees it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import orjson

from server.errors import BadRequest, HttpError, UpstreamTimeout
from server.gateway.admin.error_map import from_fields
from server.gateway.config import GatewayConfig

log = logging.getLogger("hotswap.gateway")

T = TypeVar("T")
STOP_GRACE_S = 5.0


class Pusher:
    """Runs publications one after the other: two at once would fence each other off."""

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()

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
        what else goes into the version. Raises HttpError.
        """
        if not all(p.is_absolute() for p in (path, *map(Path, (parts or {}).values()))):
            raise BadRequest("`path` must be an absolute path on the gateway's host.", code="bad_path", param="path")

        async def version_only(answer: dict[str, Any]) -> T:
            return await then(int(answer["version"]))

        noted = ["--part", part, *([] if step is None else ["--step", str(step)])]
        noted += [word for name, where in (parts or {}).items() for word in ("--with", f"{name}={where}")]
        return await self.keep(self._push((*noted, str(path)), version_only))

    async def prepare(self, file: BinaryIO, upload_id: str) -> Prepared:
        """Starts the process that will publish what `file` is going to hold: it imports while the bytes arrive."""
        options = ("--delta", f"/proc/self/fd/{file.fileno()}", "--upload-id", upload_id, "--when-told")
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

    async def keep(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs `work` to its end even if the caller goes away; `close` ends it."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    async def _push(self, what: tuple[str, ...], then: Callable[[dict[str, Any]], Awaitable[T]]) -> T:
        async with self._turn:
            answer = await self._outcome(await self._start(what))
        return await then(answer)

    async def _push_prepared(self, prepared: Prepared, then: Callable[[dict[str, Any]], Awaitable[T]]) -> T:
        try:
            async with self._turn:
                answer = await self._outcome(prepared.process, b"go\n")
        finally:
            await prepared.discard()
        return await then(answer)

    async def _start(
        self, what: tuple[str, ...], *, stdin: int = asyncio.subprocess.DEVNULL, pass_fds: tuple[int, ...] = ()
    ) -> asyncio.subprocess.Process:
        config = self._config
        options = ("--store", config.store, "--model", config.model, "--no-activate", "--json", *what)
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
        try:
            async with asyncio.timeout(timeout_s):
                out, err = await process.communicate(told)
        except TimeoutError:
            raise UpstreamTimeout(
                f"Publishing took over {timeout_s:g} s and was ended; nothing was published.", code="push_timeout"
            ) from None
        finally:
            await _end(process)
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
    await process.wait()


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
