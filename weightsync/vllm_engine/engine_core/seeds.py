"""Requests with a seed whose prompt is computed in chunks, on a CPU.

vLLM samples after each chunk, throws the token away, and winds the request's generator back by an offset. Generators on
CPUs have none: stock vLLM raises there, which ends the engine for everybody. Here the state from before the sampling is
put back, so the answer is the one that a prompt in one piece gets.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any


def rewind_by_state(runner: Any) -> None:
    """Patch one of vLLM's first model runners on a CPU; others are left as they are."""
    if runner.device.type == "cpu" and hasattr(runner, "discard_request_mask"):
        runner._sample = functools.partial(_sample, runner, runner._sample)
        runner._bookkeeping_sync = functools.partial(_bookkeeping, runner, runner._bookkeeping_sync)


def _sample(runner: Any, sample: Any, *args: Any, **more: Any) -> Any:
    states = [(generator, generator.get_state()) for generator in _discarded(runner).values()]
    try:
        return sample(*args, **more)
    finally:
        for generator, state in states:
            generator.set_state(state)


def _bookkeeping(runner: Any, bookkeeping: Any, *args: Any, **more: Any) -> Any:
    with _hidden(runner.input_batch.generators, _discarded(runner)):
        return bookkeeping(*args, **more)


def _discarded(runner: Any) -> dict[int, Any]:
    """The generators of requests whose token is thrown away, by place in the batch."""
    mask, generators = runner.discard_request_mask.np, runner.input_batch.generators
    return {place: generator for place, generator in generators.items() if mask[place]}


@contextlib.contextmanager
def _hidden(generators: dict[int, Any], some: dict[int, Any]) -> Iterator[None]:
    for place in some:
        del generators[place]
    try:
        yield
    finally:
        generators.update(some)
