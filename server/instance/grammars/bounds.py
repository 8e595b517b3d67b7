"""Bounds on structured output, so that no schema, pattern or grammar takes the memory or the time of the others.

The cost of compiling a grammar grows with what it spells out, not with its length: `{"minItems": 1000000000}` is 20
bytes and takes the memory of the host. So each is looked at before vLLM gets it: how long it is, how many nodes and how
deep, how often its repetitions multiply (a bound inside a bound), whether a reference or a rule leads to itself before
anything is read. The look itself is linear in the length, and stops at the first bound that is exceeded.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping
from re import _parser as sre  # type: ignore[attr-defined]
from typing import Any

import orjson

from server.instance.inflight import Problem

MOST_BYTES = 64 << 10  # of a schema, pattern or grammar, and of all choices together
MOST_CHOICES = 1000
MOST_NODES, MOST_DEPTH = 5000, 48  # of a schema
MOST_REPEATS = 4096  # how often one part may be repeated, over all repetitions that it stands in
ITEMS = ("minItems", "maxItems", "minContains", "maxContains", "minProperties", "maxProperties")
CHARACTERS = ("minLength", "maxLength")
_SET_OR_TEXT = re.compile(r'"(?:[^"\\\n]|\\.)*"|\[(?:[^\]\\\n]|\\.)*\]|#[^\n]*')
_RULE = re.compile(r"^\s*([A-Za-z_][\w-]*)\s*::=", re.MULTILINE)
_COUNTS = re.compile(r"\{\s*(\d+)\s*(?:,\s*(\d+)?\s*)?\}")
_WORD = re.compile(r"\s*(?:\(\s*)*([A-Za-z_][\w-]*)")


def check(asked: Any) -> None:
    """Look at vLLM's `StructuredOutputsParams`. Raises Problem."""
    if asked.choice is not None:
        _check_choices(asked.choice)
    for pattern in (asked.regex, asked.whitespace_pattern):
        if pattern is not None:
            check_pattern(pattern)
    if asked.grammar is not None:
        check_grammar(asked.grammar)
    for schema in (asked.json, asked.structural_tag):
        if schema is not None:
            check_schema(schema)


def _check_choices(choices: list[str]) -> None:
    if len(choices) > MOST_CHOICES:
        raise Problem(f"{len(choices)} choices; send {MOST_CHOICES} at most")
    _check_bytes("choices", sum(len(choice.encode("utf-8", "replace")) for choice in choices))


def _check_bytes(what: str, nbytes: int) -> None:
    if nbytes > MOST_BYTES:
        raise Problem(f"{what} of {nbytes} bytes; send {MOST_BYTES} at most")


# JSON schemas, and structural tags, which hold schemas ---------------------------------------------------------------


def check_schema(schema: str | Mapping[str, Any]) -> None:
    """Raises Problem. Text that is no JSON is left to vLLM, which says so."""
    try:
        text = schema.encode("utf-8", "replace") if isinstance(schema, str) else orjson.dumps(schema)
        _check_bytes("a schema", len(text))
        root = orjson.loads(text)
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):
        return
    if not isinstance(root, dict):
        return
    left: list[tuple[dict[str, Any] | list[Any], int, int]] = [(root, 0, 1)]
    nodes = 0
    while left:
        node, depth, repeats = left.pop()
        nodes += 1
        if nodes > MOST_NODES:
            raise Problem(f"a schema of more than {MOST_NODES} objects and lists; send a simpler one")
        if depth > MOST_DEPTH:
            raise Problem(f"a schema nested more than {MOST_DEPTH} deep; send a flatter one")
        if isinstance(node, dict):
            repeats = _check_node(root, node, repeats)
        children = node.values() if isinstance(node, dict) else node
        left += [(child, depth + 1, repeats) for child in children if isinstance(child, dict | list)]


def _check_node(root: Mapping[str, Any], node: Mapping[str, Any], repeats: int) -> int:
    """How often what stands in `node` is repeated."""
    inner = repeats * max(1, *(_number(node.get(name)) for name in ITEMS))
    _check_repeats(inner, "items")
    _check_repeats(repeats * max(1, *(_number(node.get(name)) for name in CHARACTERS)), "characters")
    if isinstance(node.get("enum"), list) and len(node["enum"]) > MOST_CHOICES:
        raise Problem(f"an enum of {len(node['enum'])} values; send {MOST_CHOICES} at most")
    if isinstance(node.get("pattern"), str):
        check_pattern(node["pattern"], repeats)
    if isinstance(node.get("$ref"), str):
        _follow(root, node)
    return inner


def _follow(root: Mapping[str, Any], node: Mapping[str, Any]) -> None:
    """Raises Problem for a reference that leads back to itself with nothing to read on the way."""
    seen = set()
    while isinstance(reference := node.get("$ref"), str) and reference.startswith("#"):
        if reference in seen:
            raise Problem(f"the reference {reference[:80]!r} leads only to itself; let it reach a type")
        seen.add(reference)
        found: Any = root
        for name in filter(None, reference[1:].split("/")):
            found = found.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
        if not isinstance(found, dict) or set(found) - {"$ref", "$defs", "title", "description"}:
            return
        node = found


def _number(value: object) -> int:
    return int(value) if isinstance(value, int | float) and 0 < value < float("inf") else 0


def _check_repeats(count: int, what: str) -> None:
    if count > MOST_REPEATS:
        raise Problem(f"{what} repeated {count} times, over all repetitions they stand in; send {MOST_REPEATS} at most")


# patterns ------------------------------------------------------------------------------------------------------------


def check_pattern(pattern: str, repeats: int = 1) -> None:
    """A regular expression that stands where things are repeated so often. Raises Problem."""
    _check_bytes("a pattern", len(pattern.encode("utf-8", "replace")))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parsed = sre.parse(pattern)
    except (
        re.error,
        OverflowError,
        RecursionError,
        ValueError,
    ):  # another dialect: every count may stand in all others
        for count in _counts(pattern):
            repeats *= max(1, count)
            _check_repeats(repeats, "parts of a pattern")
        return
    left = [(parsed, repeats)]
    while left:
        items, outer = left.pop()
        for operation, argument in items:
            inner = outer
            if operation in (sre.MAX_REPEAT, sre.MIN_REPEAT, sre.POSSESSIVE_REPEAT):
                low, high = int(argument[0]), int(argument[1])
                inner *= max(1, low if high >= int(sre.MAXREPEAT) else high)
                _check_repeats(inner, "parts of a pattern")
            left += [(part, inner) for part in _parts(argument)]


def _parts(argument: Any) -> Iterator[Any]:
    """The patterns inside of one operation of a parsed pattern."""
    for part in argument if isinstance(argument, tuple | list) else (argument,):
        if isinstance(part, sre.SubPattern):
            yield part
        elif isinstance(part, tuple | list):
            yield from _parts(part)


def _counts(text: str) -> Iterator[int]:
    for low, high in _COUNTS.findall(text):
        yield int((high or low)[:12])


# grammars (EBNF as xgrammar and llama.cpp write it) ------------------------------------------------------------------


def check_grammar(grammar: str) -> None:
    """Raises Problem: it is too long, repeats too often, or has a rule that begins with itself."""
    _check_bytes("a grammar", len(grammar.encode("utf-8", "replace")))
    bare = _SET_OR_TEXT.sub("''", grammar)
    repeats = 1
    for count in _counts(bare):
        repeats *= max(1, count)
        _check_repeats(repeats, "parts of a grammar")
    rules = list(_RULE.finditer(bare))
    first: dict[str, set[str]] = {}
    ends = [*(rule.start() for rule in rules[1:]), len(bare)]
    for rule, end in zip(rules, ends, strict=False):
        body = bare[rule.end() : end]
        first.setdefault(rule[1], set()).update(m[1] for part in body.split("|") if (m := _WORD.match(part)))
    for name in first:
        if name in _reached(first, name):
            raise Problem(f"the rule {name[:80]!r} begins with itself; write it with a repetition instead")


def _reached(first: Mapping[str, set[str]], name: str) -> set[str]:
    """The rules that `name` may begin with, directly or by way of others."""
    reached, left = set[str](), list(first[name])
    while left:
        rule = left.pop()
        if rule not in reached:
            reached.add(rule)
            left += first.get(rule, ())
    return reached
