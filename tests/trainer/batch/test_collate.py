"""One sequence a row."""

from __future__ import annotations

import pytest

from trainer.batch import MASK, TOKENS, Sequence, collate


def test_collate_aligns_fields_with_the_tokens_they_speak_about() -> None:
    fields = collate([Sequence((1, 2), (3, 4), {"x": [0.3, 0.4]}), Sequence((5,), (6, 7, 8), {"x": [0.6, 0.7, 0.8]})])
    assert fields[TOKENS].tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert fields[MASK].tolist() == [[0, 1, 1], [1, 1, 1]]
    assert fields["x"].tolist() == [[0, pytest.approx(0.3), pytest.approx(0.4)], pytest.approx([0.6, 0.7, 0.8])]
