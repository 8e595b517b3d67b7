"""Where structured output is stopped: before vLLM's parsers read a schema, and before the engine's client takes one."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any, NoReturn

from server.instance.inflight import Problem
from server.instance.provenance import current_trace

from . import bounds
from .backend import Backend
from .trials import GrammarRefused, Trials


def bounded(generate: Callable[..., AsyncIterator[Any]]) -> Callable[..., AsyncIterator[Any]]:
    """`AsyncLLM.generate`, which refuses what exceeds a bound before it begins."""

    def wrapper(prompt: Any, sampling_params: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        _check_bounds(getattr(sampling_params, "structured_outputs", None))
        return generate(prompt, sampling_params, *args, **kwargs)

    return wrapper


def tried(
    generate: Callable[..., AsyncIterator[Any]], backend: Backend, trials: Trials
) -> Callable[..., AsyncIterator[Any]]:
    """`AsyncLLM.generate`, which begins when a trial has shown that the engine can compile the grammar."""

    async def wrapper(prompt: Any, sampling_params: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        asked = getattr(sampling_params, "structured_outputs", None)
        if asked is not None:
            try:
                grammar = backend.grammar(asked)
                if grammar is not None:
                    await trials.check(grammar)
            except Problem as problem:
                _refuse(problem)
        async with contextlib.aclosing(generate(prompt, sampling_params, *args, **kwargs)) as outputs:  # type: ignore[type-var]
            async for output in outputs:
                yield output

    return wrapper


def bounded_parser(parser: Any) -> Any:
    """vLLM's class of parsers of reasoning and tool calls; some of them read schemas before there are parameters."""
    if parser is None:
        return None

    class Bounded(parser):
        def adjust_request(self, request: Any) -> Any:
            extract = getattr(request, "extract_structured_outputs", None)
            _check_bounds(extract() if extract is not None else None)
            for tool in getattr(request, "tools", None) or ():
                _check_tool(tool)
            return super().adjust_request(request)

    return Bounded


def _check_bounds(asked: Any) -> None:
    if asked is None:
        return
    try:
        bounds.check(asked)
    except bounds.TooMuch as problem:
        _refuse(GrammarRefused(str(problem)))


def _check_tool(tool: Any) -> None:
    """A tool as OpenAI's chat (`function`) or Responses has it."""
    parameters = getattr(getattr(tool, "function", tool), "parameters", None)
    if isinstance(parameters, dict):
        try:
            bounds.check_schema(parameters)
        except bounds.TooMuch as problem:
            _refuse(GrammarRefused(f"a tool's parameters: {problem}"))


def _refuse(problem: Problem) -> NoReturn:
    """Raises what vLLM's routes take for a fault of the request's; the middleware answers with `problem` itself."""
    from vllm.exceptions import VLLMValidationError

    trace = current_trace.get()
    if trace is not None:
        trace.problem = problem
    raise VLLMValidationError(str(problem), parameter=problem.param) from problem
