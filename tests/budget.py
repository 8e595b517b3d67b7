"""What each file of tests took, printed at the end of a run; a file of the first tier that takes too long fails CI."""

from __future__ import annotations

import os
from collections import Counter

import pytest

BUDGET_S = 120.0  # of a file; the longest takes a quarter of it on two cores that do nothing else
SHOWN = 15


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
    return [path for path, seconds in spent(reporter).items() if seconds > BUDGET_S]


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
        terminalreporter.write_line(f"{path} takes more than {BUDGET_S:.0f} s: make it faster, or mark what is broad")
