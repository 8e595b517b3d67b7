"""Episodes from the trainer's side: the processes that play them, and what became of one that failed."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from dataclasses import dataclass
from typing import Any

import msgspec

from trainer.config.environments import CallableEnvironment, ToolsEnvironment, VerifiersEnvironment
from trainer.environments import verifiers_worker
from trainer.environments.base import Message, Observation, Task
from trainer.environments.tools import INSTRUCTIONS
from trainer.errors import ConfigError, EnvironmentFailed, RewardError
from trainer.worker_process import WorkerProcess, start_worker

MODULE = "trainer.environments.worker"


class EnvironmentHost:
    """`config.workers` processes. All methods belong to one event loop. `open` it before use, and close it."""

    def __init__(self, config: CallableEnvironment | ToolsEnvironment | VerifiersEnvironment) -> None:
        self.config = config
        self._job = msgspec.to_builtins(config)
        self._command: tuple[str, ...] = ()  # of another interpreter, if it is not this one
        if isinstance(config, VerifiersEnvironment):
            self._command = (config.python, verifiers_worker.__file__)
            self._job["instructions"] = INSTRUCTIONS
        self._workers: list[WorkerProcess] = []
        self._starting = asyncio.Lock()
        self._numbers = itertools.count(1)

    async def open(self) -> None:
        """Start the processes. Raises ConfigError for an environment that cannot be made."""
        self._workers = [await self._start()]
        self._workers += await asyncio.gather(*(self._start() for _ in range(self.config.workers - 1)))

    async def begin(self, task: Task) -> tuple[Episode, Observation]:
        """A new episode. Raises EnvironmentFailed."""
        worker = await self._free()
        worker.busy += 1
        episode = Episode(self, worker, next(self._numbers))
        try:
            return episode, await episode._ask({"op": "reset", "task": dataclasses.asdict(task)})
        except BaseException:
            await episode.close()
            raise

    async def close(self) -> None:
        workers, self._workers = self._workers, []
        await asyncio.gather(*(worker.end() for worker in workers), return_exceptions=True)

    async def _start(self) -> WorkerProcess:
        try:
            return await start_worker(MODULE, self._job, "environment", self._command)
        except FileNotFoundError as error:
            raise ConfigError("environment.python", str(error), "Name an interpreter that has verifiers") from None

    async def _free(self) -> WorkerProcess:
        """The process with the fewest episodes; those that died are replaced first. Raises EnvironmentFailed when there
        is none, nor can be one now."""
        async with self._starting:
            for dead in [worker for worker in self._workers if not worker.alive]:
                self._workers.remove(dead)
                await dead.end()
            try:
                while len(self._workers) < self.config.workers:
                    self._workers.append(await self._start())
            except (RewardError, ConfigError, OSError) as error:
                if not self._workers:
                    raise EnvironmentFailed(f"there is no process to play it in: {error}") from None
        return min(self._workers, key=lambda worker: worker.busy)


@dataclass
class Episode:
    """One episode, in the process that it was begun in. Close it when it is over."""

    host: EnvironmentHost
    worker: WorkerProcess
    number: int
    open: bool = True

    @property
    def alive(self) -> bool:
        """Whether its process still has it."""
        return self.open and self.worker.alive

    async def step(self, answer: str) -> Observation:
        """The observation after the answer. Raises EnvironmentFailed; `interrupted` when another is to blame."""
        return await self._ask({"op": "step", "answer": answer})

    async def close(self) -> None:
        if self.open:
            self.open = False
            self.worker.busy -= 1
            if self.worker.alive:
                asyncio.get_running_loop().create_task(self._forget())

    async def _forget(self) -> None:
        try:
            async with asyncio.timeout(self.host.config.timeout_s):
                await self.worker.ask({"op": "close", "episode": self.number})
        except (ConnectionError, TimeoutError):
            self.worker.kill()

    async def _ask(self, request: dict[str, Any]) -> Observation:
        limit = self.host.config.timeout_s
        if not self.worker.alive:
            raise EnvironmentFailed("its process ended while it waited for an answer of the model.", code="interrupted")
        try:
            async with asyncio.timeout(limit):
                reply = await self.worker.ask({**request, "episode": self.number})
        except TimeoutError:
            self.worker.kill()
            raise EnvironmentFailed(f"the environment took over {limit:g} s for a {request['op']}; killed.") from None
        except ConnectionError:
            if self.worker.killed:
                why = "its process was killed because another episode hangs."
                raise EnvironmentFailed(why, code="interrupted") from None
            raise EnvironmentFailed(f"the environment's process ended (status {await self.worker.status()}).") from None
        if "problem" in reply:
            raise EnvironmentFailed(f"the environment failed: {reply['problem']}")
        value = reply["value"]
        return Observation(tuple(dict[str, Any](m) for m in value["messages"]), value["reward"], value["done"])


def messages_of(prompt: str, messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """A record's messages; a text is one of the user's."""
    return messages or ({"role": "user", "content": prompt},)
