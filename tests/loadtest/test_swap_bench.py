"""Benchmarks of swaps, rollbacks and restarts, and of two checkouts by turns: what they make of what clients saw."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import orjson
import pytest

from loadtest.measure import pairs
from loadtest.measure.gaps import Gaps
from loadtest.measure.pairs import Checkout, Ratio
from loadtest.serving import restarts
from loadtest.serving.restarts import PHASES, TARGET_S, Found
from loadtest.swaps import against as swaps
from loadtest.swaps.rollback import evidence_at, policy
from loadtest.swaps.stall import Windows, cpu_ms_per_token, stall_ms
from loadtest.training.rl_step import against as steps
from server.errors import CliError, ProcessFailed

STARTS = ("server.gateway", "server.cli instance", "vllm.entrypoints", "weightsync.push")  # for scripts/reach.py


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


def test_the_evidence_is_there_with_the_answer_that_makes_it_enough() -> None:
    """Answers before the step do not count."""
    text = policy()
    answers = [(0.01 * n, 1 + n % 2) for n in range(2, 200)]
    at = evidence_at(answers, 2, text)
    known = [each for each in answers if each[0] <= at]
    assert 10 < len(known) < 60
    with pytest.raises(RuntimeError, match="no evidence"):
        evidence_at(known[:-1], 2, text)
    early = [(n / 1000, 1) for n in range(1000)]
    step = [(2 + 0.01 * n, 1 + n % 2) for n in range(200)]
    assert evidence_at(early + step, 2, text) == evidence_at(step[1:], 2, text)


def test_the_target_of_a_restart_is_stock_without_its_imports() -> None:
    first, second = (dict(zip(PHASES, ends, strict=True)) for ends in ((0.1, 2, 4, 4, 5), (0.3, 3, 4, 5, 7)))
    found = restarts.figures_of(Found([first, second], [20.0, 22.0], [6.0, 8.0]))
    assert (found["restart_s"], found["target_s"], found["within_target"]) == (6.0, 21.0 - 7.0 + TARGET_S, True)
    assert found["phases_s"] == pytest.approx(
        {"process": 0.2, "engine": 2.3, "weights": 1.5, "warm-up": 0.5, "first token": 1.5}
    )
    late = restarts.figures_of(Found([first, second], [9.0], [6.0]))
    assert (late["target_s"], late["within_target"]) == (3.0 + TARGET_S, False)


@pytest.mark.broad
@pytest.mark.engine
def test_an_instance_that_is_killed_answers_again(tmp_path: Path) -> None:
    restarts.run(tmp_path / "found.json", kills=1, small=True, runs=tmp_path)
    (ends,) = orjson.loads((tmp_path / "found.json").read_bytes())["turns"]["restarts"]
    assert list(ends) == [*PHASES]
    assert list(ends.values()) == sorted(ends.values())


def test_a_ratio_is_of_neighbours() -> None:
    found = Ratio.of([(1.0, 2.0), (10.0, 20.0), (4.0, 4.0)])
    assert (found.median, found.this, found.other) == (0.5, 4.0, 4.0)


def test_sides_take_turns_and_a_round_that_warms_up_does_not_count() -> None:
    visited: list[str] = []

    def visit(side: str) -> dict[str, float]:
        visited.append(side)
        return {"ms": 1000.0 if len(visited) <= 2 else 2.0 if side == "this" else 8.0}

    found = pairs.by_turns(("this", "other"), [visit], 3)
    assert visited == ["other", "this", "this", "other", "other", "this", "this", "other"]
    assert (found["ms"].median, found["ms"].pairs) == (0.25, 3)
    visited.clear()
    assert pairs.by_turns(("this", "other"), [visit], 2, warm_up=0)["ms"].pairs == 2
    assert len(visited) == 4


def test_a_directory_that_is_no_checkout_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CliError, match="is no checkout"):
        pairs.checkouts(tmp_path)


def test_a_server_that_ends_is_told_with_its_log(tmp_path: Path) -> None:
    here = Checkout("this checkout", pairs.HERE)
    missing = pairs.serving(here, tmp_path / "state", Path("./no-such-model"), "toy", [])
    with pytest.raises(ProcessFailed, match="is neither a directory"), missing:
        pass


@pytest.mark.engine
@pytest.mark.broad
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("measure", "figures"),
    [
        (swaps.run, {"longest gap with a swap, ms", "staging, ms", "CPU of the engine, ms a token"}),
        (steps.run, {"async, s a step", "async, training, ms"}),
    ],
)
def test_this_checkout_beside_itself(
    measure: Callable[..., dict[str, Ratio]], figures: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swaps, "SWAPS", 1)
    monkeypatch.setattr(steps, "SCHEDULES", ("async",))
    monkeypatch.chdir(tmp_path)
    ratios = measure(pairs.HERE, tmp_path / "found.json", pairs=2, small=True)
    assert figures <= ratios.keys()
    assert all(ratio.pairs == 2 and ratio.low > 0 for ratio in ratios.values())
    written = orjson.loads((tmp_path / "found.json").read_bytes())["figures"]
    assert {name: value["median"] for name, value in written.items()} == {n: r.median for n, r in ratios.items()}
