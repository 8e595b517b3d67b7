"""The trial compilations of one instance: one helper process, a queue before it, and the verdicts it has given.

A grammar is tried before vLLM gets it, apart from the loop of the API server and from the engine. The helper starts
with the first trial and ends with the instance. A verdict is kept, so a grammar costs its trial once; trials of the
same grammar at one time are one trial. Each API key has its share of the trials: keys have turns.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import logging
import os
import socket
import struct
import sys
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import orjson

from server.errors import ConfigError
from server.instance.inflight import PUBLIC, Problem
from server.options import Option

log = logging.getLogger("hotswap.instance")
HELPER = Path(__file__).with_name("helper.py")
START_S = 120.0  # for its imports, on a machine that is busy
RETRY_S = 2
THREADS = min(8, os.cpu_count() or 1)  # of one trial, as vLLM compiles
# A process of one thread can be forked; and memory that threads only reserve would count.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}


Verdict = tuple[str, str]  # the message of a refusal, and its code


def refused(message: str, code: str = "grammar_too_costly") -> Problem:
    """The answer to a schema, pattern or grammar that vLLM does not get; the message says what to do."""
    return Problem(f"structured output: {message}", code=code, param="structured_outputs")


def busy(why: str) -> Problem:
    """The answer where the cost of a grammar cannot be told now; the same request may be good later."""
    message = f"structured output: {why}; send the request again in some seconds"
    return Problem(message, status=429, code="grammars_busy", param="structured_outputs", retry_after_s=RETRY_S)


@dataclass(frozen=True)
class Limits:
    """The limits of one trial: `seconds` of CPU and `mib` of memory. `at_once` run and `waiting` wait; `verdicts` are
    kept.

    Raises ConfigError.
    """

    # A dozen strings with a maxLength take 10 s with a vocabulary of 120,000.
    seconds: Annotated[float, Option("CPU time to compile one schema, pattern or grammar", "--grammar-seconds")] = 30.0
    mib: Annotated[int, Option("memory to compile one, MiB", "--grammar-mib")] = 512
    at_once: Annotated[int, Option("how many are tried out at one time", "--grammar-at-once")] = 4
    waiting: Annotated[int, Option("how many more may wait for that", "--grammar-waiting")] = 32
    verdicts: Annotated[int, Option("how many verdicts are kept", "--grammar-verdicts")] = 4096

    def __post_init__(self) -> None:
        for name in ("seconds", "mib", "at_once", "waiting", "verdicts"):
            if getattr(self, name) < (0 if name == "waiting" else 1e-3):
                raise ConfigError(f"--grammar-{name.replace('_', '-')}: give a number above 0")


DEFAULT = Limits()


@dataclass(frozen=True)
class Grammar:
    """A grammar that vLLM would compile. `attempts` are (library, kind, text); of those in `chosen`, one has to
    succeed."""

    attempts: tuple[tuple[str, str, str], ...]
    chosen: frozenset[int]
    hindrance: str = ""  # why none is chosen

    @property
    def digest(self) -> bytes:
        return hashlib.blake2b(orjson.dumps([self.attempts, sorted(self.chosen)]), digest_size=16).digest()


class Trials:
    """`kit`: what the helper gets first, worked out in a thread; it may take as long as reading a tokenizer does."""

    def __init__(self, limits: Limits, kit: Callable[[], dict[str, Any]]) -> None:
        self._limits, self._kit = limits, kit
        self._verdicts: OrderedDict[bytes, Verdict | None] = OrderedDict()
        self._running: dict[bytes, asyncio.Task[Verdict | None]] = {}
        self._turns = Turns(limits.at_once, limits.waiting)
        self._starting = asyncio.Lock()
        self._helper: _Helper | None = None

    async def check(self, grammar: Grammar, owner: str = PUBLIC) -> None:
        """Return if vLLM may compile it. `owner`: the request's cache scope. Raises Problem."""
        digest = grammar.digest
        if digest in self._verdicts:
            self._verdicts.move_to_end(digest)
            verdict = self._verdicts[digest]
        else:
            verdict = await self._judged(digest, grammar, owner)
        if verdict is not None:
            raise refused(*verdict)  # each its own: an exception carries its traceback

    async def _judged(self, digest: bytes, grammar: Grammar, owner: str) -> Verdict | None:
        trial = self._trial(digest, grammar, owner)
        try:
            return await asyncio.shield(trial)  # it goes on without this client: others wait for it, or ask next
        except asyncio.CancelledError:
            if trial.cancelled():
                raise busy("this instance stops") from None
            raise

    def _trial(self, digest: bytes, grammar: Grammar, owner: str) -> asyncio.Task[Verdict | None]:
        trial = self._running.get(digest)
        if trial is None:
            try:
                turn = self._turns.ask(owner)
            except asyncio.QueueFull:
                raise busy(f"{len(self._running)} other grammars are being looked at") from None
            trial = asyncio.create_task(self._try_out(digest, grammar, turn))
            self._running[digest] = trial
            trial.add_done_callback(lambda done: self._running.pop(digest) and (done.cancelled() or done.exception()))
        return trial

    async def _try_out(self, digest: bytes, grammar: Grammar, turn: asyncio.Future[None]) -> Verdict | None:
        try:
            await turn
        except asyncio.QueueFull:
            raise busy("the grammars of other clients are looked at first") from None
        try:
            report = await (await self._started()).ask(grammar.attempts)
        except (OSError, EOFError, TimeoutError, asyncio.IncompleteReadError) as error:
            log.warning("the helper that tries grammars out has ended: %s", error or type(error).__name__)
            raise busy("the process that tries grammars out has ended") from error
        finally:
            self._turns.end()
        if report["failed"] == "starved":
            raise busy("this host is too busy to try it out")
        verdict = self._judge(grammar, report)
        self._verdicts[digest] = verdict
        while len(self._verdicts) > self._limits.verdicts:
            self._verdicts.popitem(last=False)
        return verdict

    def _judge(self, grammar: Grammar, report: dict[str, Any]) -> Verdict | None:
        if (failed := report["failed"]) is not None:
            why = {
                "time": f"it takes more than {self._limits.seconds:g} s to compile",
                "memory": f"it takes more than {self._limits.mib} MiB to compile",
                "mask": "each token of an answer would take too long to choose",
            }.get(failed, "it cannot be compiled")
            return f"{why}; simplify it: fewer properties, alternatives and repetitions", "grammar_too_costly"
        errors = [error for i, error in enumerate(report["errors"]) if i in grammar.chosen]
        if all(errors):
            why = errors[0] if errors else grammar.hindrance
            return f"it does not compile ({why}); correct it", "invalid_grammar"
        return None

    async def _started(self) -> _Helper:
        async with self._starting:
            if self._helper is None or self._helper.ended:
                await self._end_helper()
                try:
                    kit = await asyncio.to_thread(self._kit)
                except Exception as error:
                    log.exception("no grammar can be tried out")
                    why = f"no library can be set up for this model's tokenizer ({error}); leave it out"
                    raise refused(why, "grammars_unavailable") from error
                kit |= {"seconds": self._limits.seconds, "nbytes": self._limits.mib << 20, "threads": THREADS}
                self._helper = await _Helper.start(kit)
            return self._helper

    async def close(self) -> None:
        """End the helper, and what is tried out at that moment."""
        for trial in list(self._running.values()):
            trial.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)
        await self._end_helper()

    async def _end_helper(self) -> None:
        helper, self._helper = self._helper, None
        if helper is not None:
            await helper.close()


class _Helper:
    """The other end of `helper.py`."""

    def __init__(self, process: asyncio.subprocess.Process, reader: Any, writer: Any) -> None:
        self._process, self._reader, self._writer = process, reader, writer
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reading: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, kit: dict[str, Any]) -> _Helper:
        """Raises EOFError, OSError or TimeoutError if it does not come up."""
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-P", str(HELPER), str(theirs.fileno()), str(os.getpid())]
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=os.environ | ENVIRONMENT,
            )
        helper = cls(process, *await asyncio.open_unix_connection(sock=ours))
        try:
            async with asyncio.timeout(START_S):
                await helper._send(kit)
                await helper._receive()
        except BaseException:
            await helper.close()
            raise
        helper._reading = asyncio.create_task(helper._read())
        return helper

    @property
    def ended(self) -> bool:
        return self._reading is None or self._reading.done()

    async def ask(self, attempts: tuple[tuple[str, str, str], ...]) -> dict[str, Any]:
        """The helper's report of one trial. Raises EOFError or OSError when the helper has ended."""
        if self.ended:
            raise EOFError
        number = next(self._numbers)
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            await self._send({"id": number, "attempts": attempts})
            return await answer
        finally:
            self._asked.pop(number, None)

    async def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
        self._writer.close()
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()

    async def _read(self) -> None:
        try:
            while True:
                report = await self._receive()
                if (answer := self._asked.get(report["id"])) is not None and not answer.done():
                    answer.set_result(report)
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            for answer in self._asked.values():
                if not answer.done():
                    answer.set_exception(EOFError("it ended while it tried"))

    async def _send(self, message: dict[str, Any]) -> None:
        data = orjson.dumps(message)
        self._writer.write(struct.pack("!I", len(data)) + data)
        await self._writer.drain()

    async def _receive(self) -> dict[str, Any]:
        (length,) = struct.unpack("!I", await self._reader.readexactly(4))
        report: dict[str, Any] = orjson.loads(await self._reader.readexactly(length))
        return report


class Turns:
    """`at_once` turns, and `waiting` places to wait for one: the owners that wait get them one after the other, however
    many each of them waits for. Belongs to one event loop."""

    def __init__(self, at_once: int, waiting: int) -> None:
        self._free, self._most = at_once, waiting
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    def ask(self, owner: str) -> asyncio.Future[None]:
        """Done when the turn begins. QueueFull ends it where its place goes to an owner that has fewer.

        Raises QueueFull: all places are taken, and no other owner waits for two more than this one.
        """
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._free:
            self._free -= 1
            turn.set_result(None)
            return turn
        if sum(map(len, self._waiting.values())) >= self._most:
            left = {one: deque(t for t in turns if not t.done()) for one, turns in self._waiting.items()}
            self._waiting = {one: turns for one, turns in left.items() if turns}  # without cancelled tasks
        if sum(map(len, self._waiting.values())) >= self._most:
            greediest = max(self._waiting.values(), key=len, default=deque())
            if len(greediest) < len(self._waiting.get(owner, ())) + 2:
                raise asyncio.QueueFull
            greediest.pop().set_exception(asyncio.QueueFull())
        self._waiting.setdefault(owner, deque()).append(turn)
        return turn

    def end(self) -> None:
        """The end of one turn, at which the next begins."""
        while self._waiting:
            owner = next(iter(self._waiting))
            turns = self._waiting.pop(owner)
            turn = turns.popleft()
            if turns:
                self._waiting[owner] = turns  # behind all others
            if not turn.done():  # else its task is cancelled
                turn.set_result(None)
                return
        self._free += 1
