"""What `hotswap bench swap` makes of the gaps that its clients saw."""

from __future__ import annotations

import numpy as np
import pytest

from loadtest.measure.gaps import Gaps
from loadtest.swaps.stall import Windows, cpu_ms_per_token, stall_ms


def test_a_swap_is_compared_with_what_was_before_and_after_it() -> None:
    """Steps grow with the answers; a median over all quiet windows would count the growth as a stall."""
    windows = Windows(quiet=[(0, 3), (5, 8), (10, 13)], swapping=[(3, 5), (8, 10)])
    gaps = Gaps(np.array([1.0, 4.0, 6.0, 9.0, 11.0]), np.array([0.10, 0.13, 0.12, 0.14, 0.14]))
    assert stall_ms(gaps, windows) == pytest.approx(1e3 * (0.02 + 0.01) / 2)


def test_the_cpu_of_a_token_is_of_the_windows_that_are_asked_for() -> None:
    windows = Windows(quiet=[(0, 2), (4, 6)], engine_cpu_s=[0.5, 2.5])
    gaps = Gaps(np.array([0.5, 1.0, 4.5, 5.0, 5.5]), np.full(5, 0.1))
    assert cpu_ms_per_token(gaps, windows) == pytest.approx(600)
    assert cpu_ms_per_token(gaps, windows, 1) == pytest.approx(250)
