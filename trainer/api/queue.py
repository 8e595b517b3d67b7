"""The numbered requests of each training client: executed one after the other by number, once each.

The SDK sends several at once, in any order, and sends one again when it has seen no acknowledgement. A request waits
for those with lower numbers. Those of different models run by turns.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections import Counter
from collections.abc import Awaitable, Callable

from trainer.api.errors import ApiError, Ended
from trainer.api.journal import Answer, Done, Journal, Request
from trainer.errors import ConfigError, TrainerError

log = logging.getLogger(__name__)
LONG_POLL_S = 25.0  # the SDK waits for 45


class _Line:
    """The requests of one model that wait, by number; `next` is the one whose turn it is."""

    def __init__(self, first: int) -> None:
        self.next = first
        self.waiting: dict[int, Request] = {}
        self.task: asyncio.Task[None] | None = None


class Queue:
    """Bound to the event loop it is started on."""

    def __init__(self, journal: Journal, execute: Callable[[Request], Awaitable[Done]], pending: int) -> None:
        """`execute` may raise; that is the answer then."""
        self._journal, self._execute, self._most = journal, execute, pending
        self._lines: dict[str, _Line] = {}
        self._answered: dict[str, asyncio.Event] = {}  # of the requests that have no answer
        self.over = asyncio.Event()
        self._why = Ended("the server ends: ask again when it is back")
        self.pending: Counter[str] = Counter()  # by owner

    async def start(self) -> None:
        """Go on with what was acknowledged before a restart."""
        for request in await asyncio.to_thread(self._journal.open):
            await self._wait_its_turn(request)

    async def submit(self, request: Request) -> None:
        """Take a request; returns when it is on disk. One that was taken before is the same one. Raises Ended, ApiError
        (429, 410; 400 for another request under the same number)."""
        self._check()
        line = await self._line(request.model)
        if self.pending[request.owner] >= self._most and request.seq not in line.waiting:
            raise ApiError(429, f"{self._most} requests of this key wait for their turn: wait for answers, then go on")
        if request.seq < line.next:
            digest = await asyncio.to_thread(self._journal.digest, request.model, request.seq)
            if digest is None:
                raise ApiError(410, f"request {request.id} was answered long ago: go on with number {line.next}")
        else:
            digest = await asyncio.to_thread(self._journal.accept, request)
        if digest is not None and digest != request.digest:
            advice = "give each request a number of its own, and send a repeated one as it was"
            raise ApiError(400, f"request {request.id} was another one: {advice}", "sequence_reused")
        await self._wait_its_turn(request)

    async def result(self, model: str, seq: int, timeout_s: float = LONG_POLL_S) -> Answer | None:
        """The answer, as soon as there is one; None if there is none by then. Raises ApiError (410), Ended."""
        event = self._answered.get(f"{model}:{seq}")
        if event is not None:
            try:
                await asyncio.wait_for(event.wait(), timeout_s)
            except TimeoutError:
                return None
        try:
            answer = await asyncio.to_thread(self._journal.answer, model, seq)
        except KeyError:
            raise ApiError(
                410, f"request {model}:{seq} is not known, or was answered long ago: send it again"
            ) from None
        if answer is None:
            self._check()
        return answer

    def end(self, why: Ended | None = None) -> None:
        """Take no more, and tell that to all who wait. The requests taken are executed after the next start."""
        self._why = why or self._why
        self.over.set()
        for event in self._answered.values():
            event.set()

    async def give_up(self, model: str) -> None:
        """Forget the requests of a model that is deleted."""
        line = self._lines.pop(model, None)
        if line is None:
            return
        if line.task is not None:
            line.task.cancel()
            await asyncio.gather(line.task, return_exceptions=True)
        for request in line.waiting.values():
            self.pending[request.owner] -= 1
            self._answered.pop(request.id).set()

    async def close(self) -> None:
        """The running requests are given up; they are executed after the next start."""
        tasks = [line.task for line in self._lines.values() if line.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _check(self) -> None:
        if self.over.is_set():
            raise self._why

    async def _line(self, model: str) -> _Line:
        if model not in self._lines:
            first = await asyncio.to_thread(self._journal.next, model)
            self._lines.setdefault(model, _Line(first))
        return self._lines[model]

    async def _wait_its_turn(self, request: Request) -> None:
        line = await self._line(request.model)
        if request.seq < line.next or request.seq in line.waiting:
            return
        line.waiting[request.seq] = request
        self._answered[request.id] = asyncio.Event()
        self.pending[request.owner] += 1
        if line.task is None:
            line.task = asyncio.create_task(self._run(line))

    async def _run(self, line: _Line) -> None:
        while (request := line.waiting.get(line.next)) is not None:
            try:
                done = await self._outcome(request)
            except Ended as error:
                self.end(error)
                return
            await self._finish(request, done)
            del line.waiting[line.next]
            line.next += 1
            self.pending[request.owner] -= 1
            self._answered.pop(request.id).set()
        line.task = None

    async def _finish(self, request: Request, done: Done) -> None:
        while True:
            try:
                return await asyncio.to_thread(self._journal.finish, request, done)
            except sqlite3.Error as error:  # nothing is said to the client, or executed, before this is on disk
                log.error("cannot write the answer to %s into the journal (%s); trying again", request.id, error)
                await asyncio.sleep(1)

    async def _outcome(self, request: Request) -> Done:
        try:
            return await self._execute(request)
        except Ended:
            raise
        except Exception as error:
            user = isinstance(error, ConfigError) or (isinstance(error, ApiError) and error.user)
            if not isinstance(error, TrainerError):
                log.exception("%s of %s failed", request.kind, request.id)
            said = str(error) or type(error).__name__
            return Done(Answer.json({"error": said, "category": "user" if user else "server"}, failed=True))
