"""Which tests are of the first tier, in which order they run, and what each file of them took.

The first tier is what a change waits for. A test marked `broad` is of the second; of a test marked `sample(n)` n cases
are of the first. A file of the first tier that takes too long fails CI.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter, defaultdict
from pathlib import Path

import pytest

BUDGET = 0.1  # of the seconds of all files of the first tier, for one of them: a share, so that it holds on any machine
SHOWN = 15
BESIDE = 4  # other files for each one with engines


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    cases: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sample"):
            cases[item.nodeid.partition("[")[0]].append(item)
    for found in cases.values():
        _sample(found)
    items[:] = _in_order(items)


def _sample(cases: list[pytest.Item]) -> None:
    mark = cases[0].get_closest_marker("sample")
    assert mark is not None
    (wanted,) = mark.args
    chosen = {i * len(cases) // wanted for i in range(wanted)}
    for i in set(range(len(cases))) - chosen:
        cases[i].add_marker(pytest.mark.broad)


def _in_order(items: list[pytest.Item]) -> list[pytest.Item]:
    """File by file: those with engines, which keep the cores busy, the longest first; behind each of them some of the
    others, which mostly wait; and what is left of these, so that no worker is alone with a long one at the end."""
    files: defaultdict[Path, list[pytest.Item]] = defaultdict(list)
    for item in items:
        files[item.path].append(item)
    busy = sorted((found for found in files.values() if _rank(found) < 2), key=_rank)
    others = iter([found for found in files.values() if _rank(found) == 2])
    mixed = [found for one in busy for found in (one, *itertools.islice(others, BESIDE))]
    return list(itertools.chain.from_iterable([*mixed, *others]))


def _rank(file: list[pytest.Item]) -> int:
    marks = {mark.name for item in file for mark in item.iter_markers()}
    return 0 if "slow" in marks else 1 if "engine" in marks else 2


def spent(reporter: pytest.TerminalReporter) -> Counter[str]:
    """Seconds by file, with set-up and tear-down."""
    seconds: Counter[str] = Counter()
    for reports in reporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.location[0]] += report.duration
    return seconds


def over(config: pytest.Config) -> list[str]:
    """Files over the budget, if this is a run that has one."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or "not broad" not in config.getoption("markexpr"):
        return []
    seconds = spent(reporter)
    if len(seconds) < SHOWN:
        return []
    return [path for path, took in seconds.items() if took > BUDGET * sum(seconds.values())]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if "CI" in os.environ and not hasattr(session.config, "workerinput") and over(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    seconds = spent(terminalreporter)
    if len(seconds) < SHOWN:
        return
    terminalreporter.section(f"seconds by file, of {sum(seconds.values()):.0f} in all")
    for path, took in seconds.most_common(SHOWN):
        terminalreporter.write_line(f"{took:8.1f}  {path}")
    for path in over(config):
        terminalreporter.write_line(f"{path} takes over {BUDGET:.0%} of all: make it faster, or mark what is broad")
