"""The moment of the evidence, from what clients saw; the benchmark itself is run by hand."""

from __future__ import annotations

import pytest

from loadtest.swaps.rollback import evidence_at, policy

TEXT = policy()


def test_the_evidence_is_there_with_the_answer_that_makes_it_enough() -> None:
    answers = [(0.01 * n, 1 + n % 2) for n in range(2, 200)]
    at = evidence_at(answers, 2, TEXT)
    known = [each for each in answers if each[0] <= at]
    assert 10 < len(known) < 60
    with pytest.raises(RuntimeError, match="no evidence"):
        evidence_at(known[:-1], 2, TEXT)


def test_answers_before_the_step_do_not_count() -> None:
    early = [(n / 1000, 1) for n in range(1000)]
    step = [(2 + 0.01 * n, 1 + n % 2) for n in range(200)]
    assert evidence_at(early + step, 2, TEXT) == evidence_at(step[1:], 2, TEXT)
