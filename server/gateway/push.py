"""Publishing a checkpoint directory, in a process of its own: reading gigabytes must not stop a single stream.

A publication belongs to the gateway, not to the request that asked for it: a client that leaves changes nothing. Ended
half-way (the gateway stops), it leaves a draft whose lease expires; nobody ever sees it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import orjson

from server.errors import BadRequest, HttpError, UpstreamTimeout
from server.gateway.config import GatewayConfig
from server.gateway.error_map import from_fields

log = logging.getLogger("hotswap.gateway")

T = TypeVar("T")
STOP_GRACE_S = 5.0


class Pusher:
    """Runs publications one after the other: two at once would fence each other off."""

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()

    async def push(self, path: Path, then: Callable[[int], Awaitable[T]]) -> T:
        """Publishes the checkpoint in `path` and hands its version to `then`, whether or not the caller waits.

        Raises HttpError.
        """
        if not path.is_absolute():
            raise BadRequest("`path` must be an absolute path on the gateway's host.", code="bad_path", param="path")
        return await self._keep(self._push(path, then))

    async def close(self) -> None:
        """Ends what is running."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _keep(self, work: Coroutine[Any, Any, T]) -> T:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    async def _push(self, path: Path, then: Callable[[int], Awaitable[T]]) -> T:
        async with self._turn:
            version = await self._publish(path)
        return await then(version)

    async def _publish(self, path: Path) -> int:
        config = self._config
        options = ("--store", config.store, "--model", config.model, "--no-activate", "--json", str(path))
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "weightsync.push", *options),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C at the gateway's terminal is the gateway's to handle
        )
        try:
            async with asyncio.timeout(config.push_timeout_s):
                out, err = await process.communicate()
        except TimeoutError:
            raise UpstreamTimeout(
                f"Publishing took over {config.push_timeout_s:g} s and was ended; nothing was published.",
                code="push_timeout",
            ) from None
        finally:
            await _end(process)
        return _version_of(process.returncode, out, err)


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


def _version_of(status: int | None, out: bytes, err: bytes) -> int:
    """The version the process says it published. Raises what it says went wrong."""
    answer = _last_json(out) or _last_json(err)
    if status == 0 and isinstance(answer.get("version"), int):
        return int(answer["version"])
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
