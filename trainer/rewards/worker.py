"""A reward's own process: `python -m trainer.rewards.worker JOB`, a JSON object a line on standard input and output.

JOB names the job and its options. The first line it writes is `{"concurrency": n, "bytes": n}` (bytes: of the models
that it holds), or `{"problem": ...}` if it cannot do the job. Each request has an `id`, which its reply repeats beside
`value`, `problem` or `late`. The output of the reward's own code goes to standard error.

A job whose function has `many`, and a `batch` above 1, batches queued requests; it never waits for more.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, BinaryIO

import orjson

from trainer.config.strict import load_target
from trainer.errors import ConfigError
from trainer.rewards.scorer import Sample, SampleGroup
from trainer.rewards.signatures import signature_of
from trainer.worker_process import answer_all, pipes, refuse, say

Function = Callable[..., Any]


def main() -> None:
    """Do the job until standard input ends."""
    requests, replies = pipes()
    job = orjson.loads(sys.argv[1])
    try:
        function = JOBS[job.pop("job")](**job)
    except ConfigError as error:
        refuse(replies, error)
        return
    if inspect.iscoroutinefunction(function):
        say(replies, {"concurrency": job.get("concurrency", 64), "bytes": getattr(function, "nbytes", 0)})
        asyncio.run(answer_all(partial(_awaited, function), requests, replies))
        return
    batch = getattr(function, "batch", 1)  # the next one comes in while one is computed
    say(replies, {"concurrency": 2 * batch if batch > 1 else 1, "bytes": getattr(function, "nbytes", 0)})
    for lines in _batches(requests, batch) if batch > 1 else ([line] for line in requests):
        asked = [orjson.loads(line) for line in lines]
        for request, outcome in zip(asked, _outcomes(function, asked), strict=True):
            say(replies, {"id": request["id"], **outcome})


async def _awaited(function: Function, request: dict[str, Any]) -> dict[str, Any]:
    try:
        return _valued(await asyncio.wait_for(function(*_arguments(function, request)), request["timeout_s"]))
    except TimeoutError:
        return {"late": True}


def _batches(requests: BinaryIO, most: int) -> Iterator[list[bytes]]:
    """The lines that have come since the last ones were taken, `most` at a time."""
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
            values = [_valued(value) for value in function.many(requests)]  # type: ignore[attr-defined]
            if len(values) == len(requests):
                return values
    return [_outcome(function, request) for request in requests]


def _outcome(function: Function, request: dict[str, Any]) -> dict[str, Any]:
    try:
        return _valued(function(*_arguments(function, request)))
    except Exception as error:
        return {"problem": f"it raised {error!r}."}


def _arguments(function: Function, request: dict[str, Any]) -> tuple[Any, ...]:
    if "group" in request:
        samples = tuple(Sample(**sample) for sample in request["group"]["samples"])
        return (SampleGroup(**{**request["group"], "samples": samples}),)
    return (request,) if getattr(function, "whole", False) else _texts(request)


def _texts(request: dict[str, Any]) -> tuple[Any, ...]:
    return request["prompt"], request["answer"], request["expected"], request["extra"]


def _valued(value: Any) -> dict[str, Any]:
    """The reply: a number, or the numbers of a group; None where the reward does not apply."""
    many = isinstance(value, list | tuple)
    values = [None if each is None else float(each) for each in (value if many else [value])]
    for number in values:
        if number is not None and not math.isfinite(number):  # JSON has no such numbers
            return {"problem": f"it returned {number}. Return a finite number."}
    return {"value": values if many else values[0]}


def _callable(target: str, concurrency: int = 64) -> Function:
    """The user's function, called as its signature says. One that holds a model may say in its attribute `nbytes` how
    much that takes, and value several answers at once by `many`, `batch` at most."""
    function: Function = load_target(target, "rewards.target")
    signature = signature_of(function, target)

    async def asynchronous(request: dict[str, Any]) -> Any:
        placed, named = signature.arguments(request)
        return signature.value(await function(*placed, **named))

    def synchronous(request: dict[str, Any]) -> Any:
        placed, named = signature.arguments(request)
        return signature.value(function(*placed, **named))

    made: Function = asynchronous if inspect.iscoroutinefunction(function) else synchronous
    made.whole = True  # type: ignore[attr-defined]
    return _as_large(made, function)


def _group(target: str, concurrency: int = 64) -> Function:
    """The user's function of all samples of a prompt."""
    function: Function = load_target(target, "rewards.target")
    if inspect.iscoroutinefunction(function):
        return function

    def of_group(group: SampleGroup) -> Any:
        return function(group)

    return _as_large(of_group, function)


def _as_large(made: Function, function: Function) -> Function:
    made.nbytes = getattr(function, "nbytes", 0)  # type: ignore[attr-defined]
    if hasattr(function, "many"):
        many = function.many
        made.many = lambda requests: many([_texts(request) for request in requests])  # type: ignore[attr-defined]
        made.batch = getattr(function, "batch", 16)  # type: ignore[attr-defined]
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
    "group": _group,
    "math": _math,
    "reasoning_gym": _gym,
    "regex": _regex,
    "classifier": _classifier,
}

if __name__ == "__main__":
    main()
