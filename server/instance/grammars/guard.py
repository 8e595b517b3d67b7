"""The guard stops structured output before vLLM's parsers read a schema and before the engine's client takes one.

`Backend` is the one place that asks vLLM what it would compile for a request, with which library, tokenizer and
options. With `auto`, vLLM validates a request with one library after the other
(`SamplingParams._validate_structured_outputs`) and takes the first that accepts it. So each library may get each
grammar: all are tried, and one that vLLM would choose has to succeed.
"""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import AsyncIterator, Callable
from typing import Any, NoReturn

from server.instance.grammars import bounds
from server.instance.grammars.trials import Grammar, Trials, refused
from server.instance.inflight import PUBLIC, Problem
from server.instance.provenance import current_trace


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
                    trace = current_trace.get()
                    await trials.check(grammar, trace.wish.scope if trace is not None else PUBLIC)
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
    except Problem as problem:
        _refuse(refused(str(problem)))


def _check_tool(tool: Any) -> None:
    """A tool as OpenAI's chat (`function`) or Responses has it."""
    parameters = getattr(getattr(tool, "function", tool), "parameters", None)
    if isinstance(parameters, dict):
        try:
            bounds.check_schema(parameters)
        except Problem as problem:
            _refuse(refused(f"a tool's parameters: {problem}"))


def _refuse(problem: Problem) -> NoReturn:
    """Raises what vLLM's routes take for a fault of the request's; the middleware answers with `problem` itself."""
    from vllm.exceptions import VLLMValidationError

    trace = current_trace.get()
    if trace is not None:
        trace.problem = problem
    raise VLLMValidationError(str(problem), parameter=problem.param) from problem


class Backend:
    """The engine's way to do structured output with this configuration. `backend` of vLLM's options decides."""

    def __init__(self, vllm_config: Any) -> None:
        self._config = vllm_config

    @property
    def _options(self) -> Any:
        return self._config.structured_outputs_config

    @property
    def libraries(self) -> tuple[str, ...]:
        """Those that are tried out; none where the operator chose one that has no trial."""
        chosen = str(self._options.backend)
        return ("xgrammar", "guidance") if chosen == "auto" else (chosen,) if chosen in ("xgrammar", "guidance") else ()

    def kit(self) -> dict[str, Any]:
        """The values that helper.py needs to set up the libraries as the engine does."""
        from vllm.tokenizers import cached_tokenizer_from_config

        tokenizer = cached_tokenizer_from_config(model_config=self._config.model_config)
        tight = bool(self._options.disable_any_whitespace)
        return {
            "any_whitespace": not tight,
            "separators": [",", ":"] if tight else None,
            "xgrammar": self._xgrammar(tokenizer) if "xgrammar" in self.libraries else None,
            "guidance": self._guidance(tokenizer) if "guidance" in self.libraries else None,
        }

    def _xgrammar(self, tokenizer: Any) -> str:
        from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

        backend = XgrammarBackend(self._config, tokenizer=tokenizer, vocab_size=self._vocabulary)
        return str(backend.compiler.compile_regex("a").tokenizer_info.serialize_json())

    def _guidance(self, tokenizer: Any) -> dict[str, Any] | None:
        """As llguidance.hf.from_tokenizer; None for a tokenizer that it cannot work with."""
        if not hasattr(tokenizer, "backend_tokenizer"):
            return None
        plain = copy.copy(tokenizer.backend_tokenizer)
        plain.no_padding()
        plain.no_truncation()
        n_vocab = max(self._vocabulary, len(tokenizer))
        return {"tokenizer": plain.to_str(), "n_vocab": n_vocab, "eos": tokenizer.eos_token_id}

    @property
    def _vocabulary(self) -> int:
        return int(self._config.model_config.get_vocab_size())

    def grammar(self, asked: Any) -> Grammar | None:
        """Of vLLM's `StructuredOutputsParams`; None where nothing is compiled that a client wrote.

        Raises Problem for what is no schema at all.
        """
        from vllm.v1.structured_output.backend_types import StructuredOutputOptions as Kind
        from vllm.v1.structured_output.request import get_structured_output_key

        if not self.libraries or asked.all_constraints_none() or asked.json_object is not None:
            return None
        kind, text = get_structured_output_key(asked)
        schema = _schema(text) if kind is Kind.JSON else None
        attempts: list[tuple[str, str, str]] = []
        chosen, hindrance = (
            set[int](),
            "no library supports all of its keywords; leave out those beside patternProperties",
        )
        if "xgrammar" in self.libraries:
            chosen |= {0} if schema is None or not _lacking_in_xgrammar(schema) else set()
            attempts.append(("xgrammar", *_for_xgrammar(kind, text)))
        if "guidance" in self.libraries:
            try:
                serialized = self._for_guidance(kind, text)
            except Exception as error:  # vLLM reads what a client wrote
                hindrance = str(error)[:500]
            else:
                chosen |= {len(attempts)} if schema is None or not _lacking_in_guidance(schema) else set()
                attempts.append(("guidance", "grammar", serialized))
        return Grammar(tuple(attempts), frozenset(chosen), hindrance)

    def _for_guidance(self, kind: Any, text: str) -> str:
        from vllm.v1.structured_output.backend_guidance import serialize_guidance_grammar

        tight, closed = self._options.disable_any_whitespace, self._options.disable_additional_properties
        return str(serialize_guidance_grammar(kind, text, tight, closed))


def _schema(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise refused(f"the schema is no JSON ({error}); correct it", "invalid_grammar") from error


def _for_xgrammar(kind: Any, text: str) -> tuple[str, str]:
    """The kind and text that vLLM gives to xgrammar: choices become a grammar."""
    from vllm.v1.structured_output.utils import choice_as_grammar, grammar_is_likely_lark

    if kind.name == "CHOICE":
        return "grammar", choice_as_grammar(json.loads(text))
    if kind.name == "GRAMMAR" and grammar_is_likely_lark(text):
        return "lark", text
    return kind.name.lower(), text


def _lacking_in_xgrammar(schema: Any) -> bool:
    from vllm.v1.structured_output.backend_xgrammar import has_xgrammar_unsupported_json_features

    return bool(has_xgrammar_unsupported_json_features(schema))


def _lacking_in_guidance(schema: Any) -> bool:
    from vllm.v1.structured_output.backend_guidance import has_guidance_unsupported_json_features

    return bool(has_guidance_unsupported_json_features(schema))
