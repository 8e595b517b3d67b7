"""The process of environments: `python -m trainer.environments.worker JOB`, a JSON object a line in and out.

JOB is the configuration entry of the environment. The first line it writes is `{}`, or `{"problem": ...}` if it cannot
make one. Requests are `{"id", "episode", "op": "reset" | "step" | "close", ...}`; a reply repeats the `id` beside
`value` or `problem`. Episodes go on at the same time. What the environments print goes to standard error.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import inspect
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO

import orjson

from trainer.config import strict
from trainer.config.environments import CallableEnvironment, ToolsEnvironment
from trainer.environments.base import Environment, Task, observation_to_json
from trainer.environments.tools import Tools, open_tools
from trainer.errors import ConfigError, EnvironmentFailed, SandboxUnavailable

THREADS = 256
KINDS: dict[str, type[CallableEnvironment] | type[ToolsEnvironment]] = {
    "callable": CallableEnvironment,
    "tools": ToolsEnvironment,
}


def main() -> None:
    """Serve until standard input ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # dies with its parent
    requests, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # prints of an environment are no replies
    asyncio.run(_serve(orjson.loads(sys.argv[1]), requests, replies))


async def _serve(job: dict[str, Any], requests: BinaryIO, replies: BinaryIO) -> None:
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(THREADS))
    try:
        async with _made(job) as make:
            _say(replies, {})
            await _answer_all(Episodes(make), requests, replies)
    except ConfigError as error:
        _say(replies, {"key": error.key, "problem": error.problem, "advice": error.advice})
    except SandboxUnavailable as error:
        _say(replies, {"key": "environment.tools", "problem": str(error), "advice": "See docs/trainer/rewards.md"})


async def _answer_all(episodes: Episodes, requests: BinaryIO, replies: BinaryIO) -> None:
    loop, tasks = asyncio.get_running_loop(), set[asyncio.Task[None]]()
    reader = ThreadPoolExecutor(1)
    while line := await loop.run_in_executor(reader, requests.readline):
        task = loop.create_task(_answer(episodes, orjson.loads(line), replies))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


async def _answer(episodes: Episodes, request: dict[str, Any], replies: BinaryIO) -> None:
    try:
        reply: dict[str, Any] = {"value": await episodes.do(request)}
    except EnvironmentFailed as error:
        reply = {"problem": str(error)}
    except Exception as error:
        reply = {"problem": f"it raised {error!r}."}
    _say(replies, {"id": request["id"], **reply})


def _say(replies: BinaryIO, reply: dict[str, Any]) -> None:
    replies.write(orjson.dumps(reply) + b"\n")


class Episodes:
    """The environments of the episodes that are under way. One that is over leaves its environment to another."""

    def __init__(self, make: Callable[[], Environment]) -> None:
        self._make = make
        self._playing: dict[int, Environment] = {}
        self._idle: list[Environment] = []

    async def do(self, request: dict[str, Any]) -> dict[str, Any]:
        """Raises what the environment raised, ValueError for nonsense that it returned."""
        episode = request["episode"]
        if request["op"] == "close":
            if (over := self._playing.pop(episode, None)) is not None:
                self._idle.append(over)
            return {}
        if request["op"] == "reset":
            environment = self._playing[episode] = self._idle.pop() if self._idle else self._make()
            return observation_to_json(await _called(environment.reset, Task(**request["task"])))
        return observation_to_json(await _called(self._playing[episode].step, request["answer"]))


async def _called(method: Callable[..., Any], *arguments: Any) -> Any:
    if inspect.iscoroutinefunction(method):
        return await method(*arguments)
    found = await asyncio.to_thread(method, *arguments)
    return await found if inspect.isawaitable(found) else found


@contextlib.asynccontextmanager
async def _made(job: dict[str, Any]) -> AsyncIterator[Callable[[], Environment]]:
    """What makes an environment. Raises ConfigError, SandboxUnavailable."""
    config = strict.build(KINDS[job["kind"]], job, "environment")
    if isinstance(config, ToolsEnvironment):
        async with open_tools(config.tools) as tools:
            yield lambda: Tools(config, tools)
        return
    target = strict.load_target(config.target, "environment.target")

    def make() -> Environment:
        found = target(**config.options)
        if not isinstance(found, Environment):
            problem = f"{config.target} made {type(found).__name__}, which is no Environment"
            raise ConfigError("environment.target", problem, "Derive it from trainer.environments.Environment")
        return found

    try:
        first = make()
    except TypeError as error:
        raise ConfigError("environment.options", f"{config.target}: {error}", "Correct the options") from None
    pending = [first]
    yield lambda: pending.pop() if pending else make()


if __name__ == "__main__":
    main()
