"""A reward's own process: `python -m trainer.rewards.worker JOB`, a JSON object a line on standard input and output.

JOB names the job and its options. The first line it writes is `{"concurrency": n, "bytes": n}` (bytes: of the models
that it holds), or `{"problem": ...}` if it cannot do the job. Each request has an `id`, which its reply repeats beside
`value`, `problem` or `late`. What the reward's own code prints goes to standard error.

A job whose function has `many`, and a `batch` above 1, batches queued requests; it never waits for more.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import inspect
import os
import queue
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, BinaryIO

import orjson

from trainer.config.strict import load_target
from trainer.errors import ConfigError

Function = Callable[..., Any]


def main() -> None:
    """Do the job until standard input ends."""
    _die_with_parent()
    requests, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # prints of the reward are no replies
    job = orjson.loads(sys.argv[1])
    try:
        function = JOBS[job.pop("job")](**job)
    except ConfigError as error:
        _say(replies, {"key": error.key, "problem": error.problem, "advice": error.advice})
        return
    if inspect.iscoroutinefunction(function):
        _say(replies, {"concurrency": job.get("concurrency", 64), "bytes": getattr(function, "nbytes", 0)})
        asyncio.run(_serve(function, requests, replies))
        return
    batch = getattr(function, "batch", 1)  # the next one comes in while one is computed
    _say(replies, {"concurrency": 2 * batch if batch > 1 else 1, "bytes": getattr(function, "nbytes", 0)})
    for lines in _batches(requests, batch) if batch > 1 else ([line] for line in requests):
        asked = [orjson.loads(line) for line in lines]
        for request, outcome in zip(asked, _outcomes(function, asked), strict=True):
            _say(replies, {"id": request["id"], **outcome})


async def _serve(function: Function, requests: BinaryIO, replies: BinaryIO) -> None:
    loop, tasks = asyncio.get_running_loop(), set[asyncio.Task[None]]()
    while line := await loop.run_in_executor(None, requests.readline):
        task = loop.create_task(_answer(function, orjson.loads(line), replies))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


async def _answer(function: Function, request: dict[str, Any], replies: BinaryIO) -> None:
    try:
        value = await asyncio.wait_for(function(*_arguments(request)), request["timeout_s"])
        reply: dict[str, Any] = {"value": float(value)}
    except TimeoutError:
        reply = {"late": True}
    except Exception as error:
        reply = {"problem": f"it raised {error!r}."}
    _say(replies, {"id": request["id"], **reply})


def _batches(requests: BinaryIO, most: int) -> Iterator[list[bytes]]:
    """What has come since the last ones were taken, `most` lines at a time."""
    come: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def read() -> None:
        for line in requests:
            come.put(line)
        come.put(b"")

    threading.Thread(target=read, daemon=True).start()
    while line := come.get():
        lines = [line]
        while len(lines) < most and not come.empty() and (line := come.get()):
            lines.append(line)
        yield lines
        if not line:
            return


def _outcomes(function: Function, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each. If a batch fails, each is tried alone, so that only the culprit does."""
    if len(requests) > 1:
        with contextlib.suppress(Exception):
            values = [{"value": float(value)} for value in function.many([_arguments(r) for r in requests])]  # type: ignore[attr-defined]
            if len(values) == len(requests):
                return values
    return [_outcome(function, request) for request in requests]


def _outcome(function: Function, request: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"value": float(function(*_arguments(request)))}
    except Exception as error:
        return {"problem": f"it raised {error!r}."}


def _arguments(request: dict[str, Any]) -> tuple[str, str, str, dict[str, Any]]:
    return request["prompt"], request["answer"], request["expected"], request["extra"]


def _say(replies: BinaryIO, reply: dict[str, Any]) -> None:
    for name in ("value",):
        if isinstance(reply.get(name), float) and reply[name] - reply[name] != 0:  # JSON has no NaN and no infinity
            reply = {"id": reply["id"], "problem": f"it returned {reply[name]}. Return a finite number."}
    replies.write(orjson.dumps(reply) + b"\n")


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _callable(target: str, concurrency: int = 64) -> Function:
    """The user's function, given `extra` if it has such a parameter. One that holds a model may say in its attribute
    `nbytes` how much that takes, and value several answers at once by `many`, `batch` at most."""
    function: Function = load_target(target, "rewards.target")
    takes_extra = "extra" in inspect.signature(function).parameters
    if inspect.iscoroutinefunction(function):

        async def asynchronous(prompt: str, answer: str, expected: str, extra: dict[str, Any]) -> float:
            more = {"extra": extra} if takes_extra else {}
            result: Awaitable[float] = function(prompt, answer, expected, **more)
            return float(await result)

        return _as_large(asynchronous, function)

    def synchronous(prompt: str, answer: str, expected: str, extra: dict[str, Any]) -> Any:
        return function(prompt, answer, expected, **({"extra": extra} if takes_extra else {}))

    return _as_large(synchronous, function)


def _as_large(made: Function, function: Function) -> Function:
    made.nbytes = getattr(function, "nbytes", 0)  # type: ignore[attr-defined]
    if hasattr(function, "many"):
        made.many, made.batch = function.many, getattr(function, "batch", 16)  # type: ignore[attr-defined]
    return made


def _math(boxed_only: bool, precision: int) -> Function:
    from trainer.rewards.rules import MathAnswer

    return MathAnswer(boxed_only=boxed_only, precision=precision)


def _gym(tag: str) -> Function:
    from trainer.rewards.gym import GymAnswer

    return GymAnswer(tag=tag)


def _regex(pattern: str) -> Function:
    from trainer.rewards.rules import Regex

    return Regex(pattern)


def _classifier(path: str, label: int, probability: bool, max_tokens: int, batch: int) -> Function:
    from trainer.rewards.models import Classifier

    return Classifier(path, label, probability=probability, max_tokens=max_tokens, batch=batch)


JOBS: dict[str, Callable[..., Function]] = {
    "callable": _callable,
    "math": _math,
    "reasoning_gym": _gym,
    "regex": _regex,
    "classifier": _classifier,
}

if __name__ == "__main__":
    main()
