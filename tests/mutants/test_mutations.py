"""The list is true: what each mutation changes is there, once."""

from __future__ import annotations

import ast

import pytest

from .__main__ import ROOT
from .mutations import MUTATIONS, Mutation


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: f"{m.file}: {m.new.strip()[:40]}")
def test_what_a_mutation_changes_is_there_once(mutation: Mutation) -> None:
    source = (ROOT / mutation.file).read_text()
    assert source.count(mutation.old) == 1
    mutated = source.replace(mutation.old, mutation.new)
    assert ast.dump(ast.parse(mutated)) != ast.dump(ast.parse(source))
    for test in mutation.tests:
        assert (ROOT / test).is_file()
