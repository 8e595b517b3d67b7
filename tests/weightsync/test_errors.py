"""The registry of codes, and the classes of errors."""

from __future__ import annotations

import ast
import pickle
from collections import defaultdict
from pathlib import Path

import pytest

from tests.weightsync.codes import refused
from weightsync import errors
from weightsync.error_codes import CODES
from weightsync.errors import (
    Conflict,
    PeerRefused,
    PublishError,
    SwapError,
    TensorError,
    WeightSyncError,
    publishing,
    shape_mismatch,
    swap_aborted,
)

ROOT = Path(__file__).parents[2]
CLASSES = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, WeightSyncError)
}


def made(path: Path) -> dict[str, set[str]]:
    """The codes of the errors that a file makes, each with their classes."""
    tree, found = ast.parse(path.read_text()), defaultdict[str, set[str]](set)
    named = {
        alias.asname or alias.name: CLASSES[alias.name]
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("weightsync.errors")
        for alias in node.names
        if alias.name in CLASSES
    }
    if path == ROOT / "weightsync" / "errors.py":
        named |= CLASSES
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        match call.func:
            case ast.Name(name) if name in named:
                kind = named[name]
            case ast.Attribute(ast.Name("errors"), name) if name in CLASSES:
                kind = CLASSES[name]
            case _:
                continue
        if any(keyword.arg is None for keyword in call.keywords):  # `publishing`: the code of another one
            continue
        code = next((keyword.value for keyword in call.keywords if keyword.arg == "code"), None)
        match code:
            case None:
                found[kind.code].add(kind.__name__)
            case ast.Constant(str(text)):
                found[text].add(kind.__name__)
    return found


def test_every_code_is_made_of_one_class_and_none_is_unknown_or_unused() -> None:
    found = defaultdict[str, set[str]](set)
    for package in ("weightsync", "server", "trainer"):
        for path in (ROOT / package).rglob("*.py"):
            for code, kinds in made(path).items():
                found[code] |= kinds
    assert {code: kinds for code, kinds in found.items() if len(kinds) > 1} == {}
    assert found.keys() == CODES.keys()


def test_an_unknown_code_is_refused_where_the_error_is_made() -> None:
    with pytest.raises(ValueError, match="'novelty'"):
        PublishError("m", code="novelty")


@pytest.mark.parametrize("error", [shape_mismatch("w", [1], [2]), swap_aborted(3, "why", "w"), PublishError("m")])
def test_an_error_is_the_same_in_another_process(error: WeightSyncError) -> None:
    there = pickle.loads(pickle.dumps(error))
    assert type(there) is type(error)
    assert (str(there), there.code, vars(there)) == (str(error), error.code, vars(error))


def test_a_class_that_is_gone_is_its_family() -> None:
    for name, family in (("SwapAborted", SwapError), ("TensorMismatch", TensorError)):
        with pytest.warns(DeprecationWarning, match=family.__name__):
            assert getattr(errors, name) is family
    with pytest.raises(AttributeError):
        errors.ShapeMismatch  # type: ignore[attr-defined]  # noqa: B018


def test_publishing_fails_with_one_class_that_keeps_what_the_cause_says() -> None:
    @publishing
    def publish(error: Exception) -> None:
        raise error

    for cause in (Conflict("key", 1, 2), PeerRefused("b", 503, "busy", "later")):
        with refused(cause.code) as caught:
            publish(cause)
        assert (type(caught.value), caught.value.__cause__, str(caught.value)) == (PublishError, cause, str(cause))
        assert vars(caught.value).items() >= vars(cause).items()
    for error in (swap_aborted(1, "why"), shape_mismatch("w", [1], [2])):
        with refused(error.code) as caught:
            publish(error)
        assert caught.value is error
    with pytest.raises(OSError, match="neither"):
        publish(OSError("neither"))
