"""Tests of the first tier, and the order in which files run.

The first tier is what a change waits for. A test marked `broad` is of the second; of a test marked `sample(n)` n cases
are of the first. `make test RECORD=1` and `make broad RECORD=1` write the seconds of each file into SECONDS, by tier.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
SECONDS = ROOT / "tests" / "seconds.json"
FIRST, SECOND = "first", "second"
# Settings of a run: any order of files and tests, by its seed; files as they are named; when the last test may begin.
SHUFFLE, AS_NAMED, UNTIL = "SHUFFLE", "HOTSWAP_TESTS_AS_NAMED", "HOTSWAP_TESTS_UNTIL"
Files = list[list[pytest.Item]]


def recorded() -> dict[str, dict[str, float]]:
    """Seconds of test by file, by tier."""
    found: dict[str, dict[str, float]] = json.loads(SECONDS.read_text()) if SECONDS.exists() else {}
    return {FIRST: {}, SECOND: {}} | found


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    cases: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sample"):
            cases[item.nodeid.partition("[")[0]].append(item)
    for found in cases.values():
        _sample(found)
    files: defaultdict[Path, list[pytest.Item]] = defaultdict(list)
    for item in items:
        files[item.path].append(item)
    items[:] = itertools.chain.from_iterable(_in_order(list(files.values())))


def _sample(cases: list[pytest.Item]) -> None:
    mark = cases[0].get_closest_marker("sample")
    assert mark is not None
    (wanted,) = mark.args
    chosen = {i * len(cases) // wanted for i in range(wanted)}
    for i in set(range(len(cases))) - chosen:
        cases[i].add_marker(pytest.mark.broad)


def _in_order(files: Files) -> Files:
    """The longest first, so that no worker is alone with a long one at the end. Files with engines keep the cores busy
    and most others wait: both kinds progress alike."""
    if AS_NAMED in os.environ:
        return files
    if seed := os.environ.get(SHUFFLE):
        chance = random.Random(seed)
        for file in files:
            chance.shuffle(file)
        return chance.sample(files, len(files))
    known = recorded()
    seconds = {path: took for tier in (SECOND, FIRST) for path, took in known[tier].items()}
    usual = sum(seconds.values()) / max(1, len(seconds)) or 1.0

    def length(file: list[pytest.Item]) -> float:
        return seconds.get(file[0].path.relative_to(ROOT).as_posix(), usual)

    kinds: tuple[Files, Files] = ([], [])
    for file in sorted(files, key=length):
        kinds[any(item.get_closest_marker("engine") for item in file)].append(file)
    whole = [sum(map(length, kind)) or 1.0 for kind in kinds]
    left, order = list(whole), []
    while any(kinds):
        kind = max((0, 1), key=lambda kind: (bool(kinds[kind]), left[kind] / whole[kind], kind))
        order.append(kinds[kind].pop())
        left[kind] -= length(order[-1])
    return order


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    if time.time() > float(os.environ.get(UNTIL, "inf")):
        pytest.skip("not begun: the time of this run is over")


def record(spent: dict[str, dict[str, float]]) -> None:
    """Takes these seconds for those of their files; forgets files that are gone."""
    known: dict[str, Any] = recorded()
    for tier, seconds in known.items():
        merged = {**seconds, **{path: round(took, 1) for path, took in spent[tier].items()}}
        known[tier] = {path: merged[path] for path in sorted(merged) if (ROOT / path).is_file()}
    SECONDS.write_text(json.dumps(known, indent=1) + "\n")
