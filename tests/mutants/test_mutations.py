"""The list is true: what each mutation changes is there, once, and so are the tests that must notice it."""

from __future__ import annotations

import ast
import functools

import pytest

from .__main__ import ROOT
from .mutations import MUTATIONS, Mutation


@functools.cache
def _read(file: str) -> tuple[str, str]:
    """Its text, and what the text means."""
    source = (ROOT / file).read_text()
    return source, ast.dump(ast.parse(source))


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_what_a_mutation_changes_is_there_once(mutation: Mutation) -> None:
    source, meaning = _read(mutation.file)
    assert source.count(mutation.old) == 1
    assert ast.dump(ast.parse(source.replace(mutation.old, mutation.new))) != meaning


@pytest.mark.parametrize("named", sorted({test for mutation in MUTATIONS for test in mutation.tests}))
def test_the_tests_that_must_notice_are_there(named: str) -> None:
    file, _, test = named.partition("::")
    assert f"def {test}(" in (ROOT / file).read_text() if test else (ROOT / file).is_file()
