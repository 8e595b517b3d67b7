"""Comparisons of two checkouts, by turns."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from loadtest.measure import pairs
from loadtest.measure.pairs import Checkout, Ratio
from loadtest.swaps import against as swaps
from loadtest.training.rl_step import against as steps
from server.errors import CliError, ProcessFailed

STARTS = ("server.gateway", "server.cli instance", "weightsync.push")  # for scripts/reach.py


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
    with (
        pytest.raises(ProcessFailed, match="is neither a directory"),
        pairs.serving(here, tmp_path / "state", Path("./no-such-model"), "toy", []),
    ):
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
    measure,
    figures: set[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,  # type: ignore[no-untyped-def]
) -> None:
    monkeypatch.setattr(swaps, "SWAPS", 1)
    monkeypatch.setattr(steps, "SCHEDULES", ("async",))
    monkeypatch.chdir(tmp_path)
    ratios = measure(pairs.HERE, tmp_path / "found.json", pairs=2, small=True)
    assert figures <= ratios.keys()
    assert all(ratio.pairs == 2 and ratio.low > 0 for ratio in ratios.values())
    written = orjson.loads((tmp_path / "found.json").read_bytes())["figures"]
    assert {name: value["median"] for name, value in written.items()} == {n: r.median for n, r in ratios.items()}
