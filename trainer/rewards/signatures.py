"""The signatures of users' reward functions: Hotswap's own, TRL's and verl's. Each is called as its author wrote it.

def f(prompt, answer, expected[, extra]) -> float | None
def f(completions, **columns) -> list[float | None]      TRL; any of prompts, completion_ids and columns by name
def f(data_source, solution_str, ground_truth, extra_info) -> float | {"score": float}     verl
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from trainer.errors import ConfigError

Request = dict[str, Any]
TRL = ("prompts", "completions", "completion_ids")
VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
# Columns that hold the record's answer, if it has no other of the name.
ANSWERS = ("answer", "solution", "ground_truth")
ADVICE = "Write f(prompt, answer, expected[, extra]), f(completions, **columns) as for TRL, or f({}) as for verl"


class Signature(NamedTuple):
    """How a function is called for a request (fields as in RewardRequest), and its value for the answer."""

    arguments: Callable[[Request], tuple[tuple[Any, ...], dict[str, Any]]]
    value: Callable[[Any], Any]


def signature_of(function: Callable[..., Any], target: str) -> Signature:
    """Raises ConfigError for a signature of no known kind."""
    signature = inspect.signature(function)
    names = signature.parameters
    try:
        if "solution_str" in names:
            signature.bind(**{name: None for name in VERL if name in names})
            return Signature(partial(_verl, signature), _score)
        if names.keys() & set(TRL) or [p.kind for p in names.values()] == [inspect.Parameter.VAR_KEYWORD]:
            return Signature(partial(_trl, signature), _only)
        more = names.keys() & {"extra"}
        signature.bind("", "", "", **dict.fromkeys(more))
    except TypeError:
        problem = f"{target}{signature} has a signature of no known kind"
        raise ConfigError("rewards.target", problem, ADVICE.format(", ".join(VERL))) from None

    def own(request: Request) -> tuple[tuple[Any, ...], dict[str, Any]]:
        texts = request["prompt"], request["answer"], request["expected"]
        return texts, dict.fromkeys(more, request["extra"])

    return Signature(own, lambda value: value)


def _trl(signature: inspect.Signature, request: Request) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Lists of one. Completions are lists of messages if their annotation says so, or says nothing and the record's
    prompt is one."""
    names = signature.parameters
    annotation = str(names["completions"].annotation) if "completions" in names else ""
    chat = "dict" in annotation or ("str" not in annotation and bool(request.get("messages")))
    prompt, completion = request["prompt"], request["answer"]
    if chat:
        prompt = list(request.get("messages") or [{"role": "user", "content": prompt}])
        completion = list(request.get("turns") or [{"role": "assistant", "content": completion}])
    row = dict.fromkeys(ANSWERS, _golds(request)) | request["extra"]
    row |= dict(zip(TRL, (prompt, completion, request.get("token_ids", ())), strict=True))
    for name, parameter in names.items():
        if name not in row and parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD:
            raise ValueError(f"the record has no column {name!r}. Name it in data.extra_keys")
    return (), {name: [value] for name, value in _taken(signature, row).items()}


def _verl(signature: inspect.Signature, request: Request) -> tuple[tuple[Any, ...], dict[str, Any]]:
    extra = request["extra"]
    info = extra.get("extra_info", extra)
    values = (extra.get("data_source", ""), request["answer"], _golds(request), info)
    return (), _taken(signature, dict(zip(VERL, values, strict=True)))


def _golds(request: Request) -> Any:
    """The record's answer, as the data has it: a text, or a list of texts."""
    others = request.get("alternatives")
    return [request["expected"], *others] if others else request["expected"]


def _taken(signature: inspect.Signature, values: Mapping[str, Any]) -> dict[str, Any]:
    """Those that the function takes."""
    every = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())
    return {name: value for name, value in values.items() if every or name in signature.parameters}


def _only(values: Any) -> Any:
    if len(values) != 1:
        raise ValueError(f"it returned {len(values)} values for one completion")
    return values[0]


def _score(value: Any) -> Any:
    return value["score"] if isinstance(value, Mapping) else value
