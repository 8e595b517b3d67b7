"""Worker processes that can be killed: what a reward runs there cannot stall a step.

Each worker (worker.py) reads requests and writes replies, one JSON object a line; nothing is pickled. It works on as
many at a time as it says at its start. A worker over its time is killed with all that descend from it, and replaced, as
is one that dies, at work or not. Its other requests are asked again, each alone, so that only the culprit fails. A
caller that gives up leaves the worker to its request: no other is sent there before the worker has answered or is dead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from operator import attrgetter
from typing import Any

from trainer.errors import ConfigError, RewardError
from trainer.worker_process import GRACE_S, WorkerProcess, start_worker

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 30.0  # between attempts to replace a worker
MODULE = "trainer.rewards.worker"


class WorkerPool:
    """`size` workers of one kind. All methods belong to one event loop."""

    def __init__(self, job: Mapping[str, Any], size: int, timeout_s: float) -> None:
        """`job` is what worker.py is told to do; `timeout_s` bounds one evaluation there."""
        self._job, self._size, self._timeout_s = dict(job), size, timeout_s
        self._workers: list[WorkerProcess] = []
        self._changed = asyncio.Event()  # set, and made anew, when there may be room
        self._tasks: set[asyncio.Task[Any]] = set()
        self._replacing: set[asyncio.Task[Any]] = set()
        self._ending: set[asyncio.Task[Any]] = set()  # of dead workers, until their processes have been waited for
        self._problem = ""  # why there is no worker, when there is none
        self.nbytes = 0  # that all workers say they hold

    async def open(self) -> None:
        """Start all workers. Raises ConfigError when the first cannot do its job."""
        first = await start_worker(MODULE, self._job)
        self._workers.append(first)
        self._workers += await asyncio.gather(*(start_worker(MODULE, self._job) for _ in range(self._size - 1)))
        self._problem = ""
        self.nbytes = sum(worker.nbytes for worker in self._workers)

    async def ask(self, request: Mapping[str, Any]) -> Any:
        """The value a worker gives. Raises RewardError: what it raised there, its process ended, or `timeout`."""
        alone = False
        while True:
            worker = await self._take(alone=alone)
            try:
                return await asyncio.shield(_spawn(self._tasks, self._evaluate(worker, request, alone=alone)))
            except ConnectionError:
                alone = True  # whoever stopped the others stops nobody now

    async def close(self) -> None:
        """Kill all workers."""
        workers, self._workers, self._problem = self._workers, [], "it was closed"
        for task in self._replacing:
            task.cancel()
        ends = (worker.end() for worker in workers)
        await asyncio.gather(*self._replacing, *self._ending, *ends, return_exceptions=True)
        self._wake()

    async def _evaluate(self, worker: WorkerProcess, request: Mapping[str, Any], *, alone: bool) -> Any:
        """As `ask`; raises ConnectionError when another request may be to blame."""
        shared = worker.room > 1 and not alone
        try:
            async with asyncio.timeout(self._timeout_s + GRACE_S):
                reply = await worker.ask({"timeout_s": self._timeout_s, **request})
        except TimeoutError:
            worker.kill()
            if shared:
                raise ConnectionError from None
            raise RewardError(f"it took over {self._timeout_s:g} s and was killed.", code="timeout") from None
        except ConnectionError:
            if shared:
                raise
            raise RewardError(f"its process ended (status {await worker.status()}).") from None
        finally:
            worker.busy -= worker.room if alone else 1
            self._replace_dead()
            self._wake()
        if reply.get("late"):
            raise RewardError(f"it took over {self._timeout_s:g} s and was cancelled.", code="timeout")
        if "problem" in reply:
            raise RewardError(reply["problem"])
        return reply["value"]

    async def _take(self, *, alone: bool) -> WorkerProcess:
        """A worker with room, or with nobody else in it. Raises RewardError when there are none, nor will be."""
        while True:
            self._replace_dead()
            able = (w for w in self._workers if w.alive and w.busy < (1 if alone else w.room))
            found = min(able, key=attrgetter("busy"), default=None)
            if found is not None:
                found.busy += found.room if alone else 1
                return found
            if not self._workers and self._problem:
                raise RewardError(f"there is no process left to evaluate it: {self._problem}")
            await self._changed.wait()

    def _replace_dead(self) -> None:
        for worker in [w for w in self._workers if not w.alive]:
            self._workers.remove(worker)
            _spawn(self._replacing, self._replace(_spawn(self._ending, worker.end())))

    async def _replace(self, ended: asyncio.Task[Any]) -> None:
        """Try until another worker has started: what keeps one from starting may pass."""
        await asyncio.shield(ended)
        pause = FIRST_PAUSE_S
        while True:
            try:
                self._workers.append(await start_worker(MODULE, self._job))
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
