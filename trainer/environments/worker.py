"""The process of environments: `python -m trainer.environments.worker JOB`, a JSON object a line in and out.

JOB is the configuration entry of the environment. The first line it writes is `{}`, or `{"problem": ...}` if it cannot
make one. Requests are `{"id", "episode", "op": "reset" | "step" | "close", ...}`; a reply repeats the `id` beside
`value` or `problem`. Episodes go on at the same time. The environments' own output goes to standard error.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import sys
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO

import orjson

from trainer.config import strict
from trainer.config.environments import CallableEnvironment, ToolsEnvironment
from trainer.environments.base import CHARACTERS, Environment, Task, observation_to_json
from trainer.environments.tools import Tools, open_tools
from trainer.errors import ConfigError, EnvironmentFailed, RewardError
from trainer.worker_process import answer_all, pipes, refuse, say

THREADS = 256
KINDS: dict[str, type[CallableEnvironment] | type[ToolsEnvironment]] = {
    "callable": CallableEnvironment,
    "tools": ToolsEnvironment,
}


def main() -> None:
    """Serve until standard input ends."""
    asyncio.run(_serve(orjson.loads(sys.argv[1]), *pipes()))


async def _serve(job: dict[str, Any], requests: BinaryIO, replies: BinaryIO) -> None:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(THREADS))
    try:
        async with _made(job) as make:
            say(replies, {})
            await answer_all(Episodes(make, CHARACTERS * job["max_observation_tokens"]).answer, requests, replies)
    except ConfigError as error:
        refuse(replies, error)
    except RewardError as error:
        refuse(replies, ConfigError("environment.tools", str(error), "See docs/trainer/rewards.md"))


class Episodes:
    """The environments of the episodes that are under way. One that is over leaves its environment to another. An
    observation after a step is cut after `most` characters."""

    def __init__(self, make: Callable[[], Environment], most: int) -> None:
        self._make, self._most = make, most
        self._playing: dict[int, Environment] = {}
        self._idle: list[Environment] = []

    async def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """The reply to a request. Raises what the environment raised, ValueError for nonsense that it returned."""
        try:
            return {"value": await self._do(request)}
        except EnvironmentFailed as error:
            return {"problem": str(error)}

    async def _do(self, request: dict[str, Any]) -> dict[str, Any]:
        episode = request["episode"]
        if request["op"] == "close":
            if (over := self._playing.pop(episode, None)) is not None:
                self._idle.append(over)
            return {}
        if request["op"] == "reset":
            environment = self._playing[episode] = self._idle.pop() if self._idle else self._make()
            return observation_to_json(await _called(environment.reset, Task(**request["task"])))
        return observation_to_json(await _called(self._playing[episode].step, request["answer"]), self._most)


async def _called(method: Callable[..., Any], *arguments: Any) -> Any:
    if inspect.iscoroutinefunction(method):
        return await method(*arguments)
    found = await asyncio.to_thread(method, *arguments)
    return await found if inspect.isawaitable(found) else found


@contextlib.asynccontextmanager
async def _made(job: dict[str, Any]) -> AsyncIterator[Callable[[], Environment]]:
    """The function that makes an environment. Raises ConfigError, RewardError."""
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
