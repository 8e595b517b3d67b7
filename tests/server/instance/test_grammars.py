"""Schemas, patterns and grammars that would take the host are refused by their bound; those people send are not."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

from server.instance.grammars.bounds import MOST_BYTES, MOST_CHOICES, MOST_DEPTH, MOST_NODES, TooMuch, check
from server.instance.grammars.guard import bounded

INT = {"type": "integer"}


def array(inner: Any, **bounds: Any) -> dict[str, Any]:
    return {"type": "array", "items": inner, **bounds}


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


TOO_MUCH: list[tuple[dict[str, Any], str]] = [
    ({"json": {"type": "array", "minItems": 10**9}}, "repeated 1000000000 times"),
    ({"json": '{"type": "array", "minItems": 1000000000}'}, "repeated 1000000000 times"),
    ({"json": array(INT, maxItems=1e300)}, "repeated"),
    ({"json": array(array(INT, minItems=100), minItems=100)}, "repeated 10000 times"),
    ({"json": array({"type": "string", "maxLength": 100}, maxItems=100)}, "characters repeated"),
    ({"json": array({"type": "string", "pattern": "a{80}"}, maxItems=80)}, "pattern repeated"),
    ({"json": {"type": "string", "minLength": 10**7}}, "repeated"),
    ({"json": {"type": "object", "minProperties": 10**7}}, "repeated"),
    ({"json": {"enum": [str(n) for n in range(5000)]}}, "enum of 5000"),
    ({"json": {"properties": {f"p{n}": {"type": "string"} for n in range(6000)}}}, "bytes|objects"),
    ({"json": deep(60)}, "deep"),
    ({"json": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}}, "itself"),
    ({"json": {"$ref": "#"}}, "itself"),
    ({"json": {"properties": {"x": {"$defs": {}, "$ref": "#/properties/x"}}}}, "itself"),
    ({"choice": ["x"] * (MOST_CHOICES + 1)}, "choices"),
    ({"choice": ["x" * MOST_BYTES, "y"]}, "bytes"),
    ({"regex": "[a-z]{100000000}"}, "repeated 100000000 times"),
    ({"regex": "((a{1,100}){1,100}){1,100}"}, "repeated"),
    ({"regex": "(?:(x|b{90}){90}|c)"}, "repeated 8100 times"),
    ({"regex": "a{99999999999999999999}"}, "repeated"),
    ({"regex": "\\p{Lu}{5000}"}, "repeated"),
    ({"regex": "a" * (MOST_BYTES + 1)}, "bytes"),
    ({"grammar": 'root ::= root "a" | "a"'}, "'root' begins with itself"),
    ({"grammar": 'root ::= a "x"\na ::= "y" | b\nb ::= (a) "z"'}, "begins with itself"),
    ({"grammar": "root ::= ([a-z]{1000}){1000}"}, "repeated"),
    ({"grammar": "root ::= " + '"a" ' * MOST_BYTES}, "bytes"),
    (
        {"structural_tag": '{"structures": [{"begin": "<f>", "schema": {"minItems": 99999999}, "end": "</f>"}]}'},
        "items",
    ),
]

USUAL: list[dict[str, Any]] = [
    {"json_object": True},
    {"json": {"type": "object", "properties": {"name": {"type": "string", "maxLength": 200}, "age": INT}}},
    {"json": array({"type": "object", "properties": {"tags": array({"type": "string"}, maxItems=20)}}, maxItems=50)},
    {"json": {"$defs": {"node": {"properties": {"next": {"$ref": "#/$defs/node"}}}}, "$ref": "#/$defs/node"}},
    {"json": "not JSON, which vLLM says"},
    {"regex": r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}(\.\d{1,6})?"},
    {"regex": r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"},
    {"regex": ".*[a-z]+(x|y)*"},
    {"choice": ["yes", "no"]},
    {"grammar": 'root ::= expr\nexpr ::= term ("+" term)*\nterm ::= [0-9]+ | "(" expr ")"\n# root ::= root'},
]


@pytest.mark.parametrize(("asked", "says"), TOO_MUCH)
def test_what_explodes_is_refused(asked: dict[str, Any], says: str) -> None:
    with pytest.raises(TooMuch, match=says):
        check(StructuredOutputsParams(**asked))


@pytest.mark.parametrize("asked", USUAL)
def test_what_people_send_passes(asked: dict[str, Any]) -> None:
    check(StructuredOutputsParams(**asked))


def test_a_schema_may_be_as_large_and_as_deep_as_the_bounds() -> None:
    deep: dict[str, Any] = {}
    for _ in range(MOST_DEPTH):
        deep = {"not": deep}
    wide: dict[str, Any] = {"anyOf": [{}] * (MOST_NODES - 2)}  # beside itself and the list
    for schema in (deep, wide):
        check(StructuredOutputsParams(json=schema))
    for schema in ({"not": deep}, {"anyOf": [*wide["anyOf"], {}]}):
        with pytest.raises(TooMuch):
            check(StructuredOutputsParams(json=schema))


@given(st.text(alphabet="ab(){}[]|*+?,0123456789\\^$.:=<>!-# \n\"'", max_size=200))
def test_any_text_is_judged(text: str) -> None:
    for asked in ({"regex": text or "a"}, {"grammar": text or "a"}, {"json": text or "a"}, {"structural_tag": text}):
        with contextlib.suppress(TooMuch):
            check(StructuredOutputsParams(**asked))


def test_a_refusal_comes_before_a_stream_begins() -> None:
    called = []
    generate = bounded(lambda *args, **_: called.append(args) or iter(()))  # type: ignore[arg-type, func-returns-value]
    generate("p", SamplingParams(structured_outputs=StructuredOutputsParams(choice=["a"])), "r")
    generate("p", SamplingParams(), "r")
    assert len(called) == 2
    bad = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["a"] * 2000))
    with pytest.raises(VLLMValidationError, match="structured output: 2000 choices; send 1000 at most"):
        generate("p", bad, "r")
    assert len(called) == 2
