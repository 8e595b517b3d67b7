"""A reward's own process: `python -m trainer.rewards.worker JOB`, a JSON object a line on standard input and output.

JOB names the job and its options. The first line it writes is `{"concurrency": n, "bytes": n}` (bytes: of the models
that it holds), or `{"problem": ...}` if it cannot do the job. Each request has an `id`, which its reply repeats beside
`value`, `problem` or `late`. What the reward's own code prints goes to standard error.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import inspect
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Any, BinaryIO

import orjson

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
    _say(replies, {"concurrency": 1, "bytes": getattr(function, "nbytes", 0)})
    for line in requests:
        request = orjson.loads(line)
        _say(replies, {"id": request["id"], **_outcome(function, request)})


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
    `nbytes` how much that takes."""
    module, _, name = target.partition(":")
    try:
        function: Function = getattr(importlib.import_module(module), name)
    except Exception as error:
        problem = f"cannot import {target} ({error!r})"
        raise ConfigError("rewards.target", problem, "Put it on PYTHONPATH") from None
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
    return made


def _math(boxed_only: bool, precision: int) -> Function:
    from trainer.rewards.math_answer import MathAnswer

    return MathAnswer(boxed_only=boxed_only, precision=precision)


def _regex(pattern: str) -> Function:
    from trainer.rewards.rules import Regex

    return Regex(pattern)


def _classifier(path: str, label: int, probability: bool, max_tokens: int) -> Function:
    from trainer.rewards.classifier import Classifier

    return Classifier(path, label, probability=probability, max_tokens=max_tokens)


JOBS: dict[str, Callable[..., Function]] = {
    "callable": _callable,
    "math": _math,
    "regex": _regex,
    "classifier": _classifier,
}

if __name__ == "__main__":
    main()
