"""The output of a run of the tests: progress, and each failure as it occurs; at the end the failures' output, the
slowest tests and files, and the commands that repeat the failures. Other output of the processes that the tests start
goes to a file, which stays if a test has failed."""

from __future__ import annotations

import os
import shlex
import tempfile
from collections import Counter, defaultdict
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests import tiers

SHOWN = 10
FEW = 20  # files: of fewer there is nothing to compare
SETTINGS = ("CPU", "SEED", tiers.SHUFFLE)  # of make, which a failure may depend on
RECORD = "RECORD"
_stderr = pytest.StashKey[int]()
_beside = pytest.StashKey[Path]()


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """The workers of a run, and the processes that they share, are started from now on (see pytest_sessionstart)."""
    if config.getoption("numprocesses", None):
        file, name = tempfile.mkstemp(prefix="hotswap-tests-", suffix=".log")
        config.stash[_stderr], config.stash[_beside] = os.dup(2), Path(name)
        os.dup2(file, 2)
        os.close(file)
        config.pluginmanager.register(_Failures(config))


class _Failures:
    """Names each failure at once: a run that is ended, or loses a worker, has no summary."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    @pytest.hookimpl(trylast=True)  # after the letter of the test
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            reporter = self._config.pluginmanager.get_plugin("terminalreporter")
            assert isinstance(reporter, pytest.TerminalReporter)
            place = report.longreprtext.rstrip().rpartition("\n")[2]
            reporter.write(f"\nfailed: {report.nodeid} ({report.when}, {place})\n")


@pytest.hookimpl(wrapper=True)
def pytest_sessionstart(session: pytest.Session) -> Generator[None, None, None]:
    try:
        yield
    finally:
        if (stderr := session.config.stash.get(_stderr, None)) is not None:
            os.dup2(stderr, 2)
            os.close(stderr)


def _reports(reporter: pytest.TerminalReporter) -> Iterator[pytest.TestReport]:
    return (report for found in reporter.stats.values() for report in found if isinstance(report, pytest.TestReport))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config, exitstatus: int) -> None:
    tests: Counter[str] = Counter()
    files: Counter[str] = Counter()
    spent: dict[str, defaultdict[str, float]] = {tier: defaultdict(float) for tier in (tiers.FIRST, tiers.SECOND)}
    for report in _reports(terminalreporter):
        file, tier = report.nodeid.partition("::")[0], tiers.SECOND if "broad" in report.keywords else tiers.FIRST
        tests[report.nodeid] += report.duration  # with set-up and tear-down
        files[file] += report.duration
        spent[tier][file] += report.duration
    if len(files) >= FEW:
        for what, seconds in (("tests", tests), ("files", files)):
            terminalreporter.section(f"slowest {what}, of {len(seconds)} that took {seconds.total():.0f} s in all")
            for name, took in seconds.most_common(SHOWN):
                terminalreporter.write_line(f"{took:8.1f}  {name}")
    if os.environ.get(RECORD) and "PYTEST_CURRENT_TEST" not in os.environ:  # not by a run that a test has started
        tiers.record(spent)
    _say_how_to_repeat(terminalreporter)
    if (beside := config.stash.get(_beside, None)) is not None:
        if exitstatus and beside.stat().st_size:
            terminalreporter.write_line(f"what processes said beside the tests: {beside}")
        else:
            beside.unlink()


def _say_how_to_repeat(reporter: pytest.TerminalReporter) -> None:
    failed = {report.nodeid: "broad" in report.keywords for report in _reports(reporter) if report.failed}
    if not failed:
        return
    reporter.section("to repeat")
    settings = "".join(f" {name}={shlex.quote(os.environ[name])}" for name in SETTINGS if os.environ.get(name))
    for test, broad in failed.items():
        target, name = "broad" if broad else "test", shlex.quote(test).replace("$", "$$")
        reporter.write_line(f"make {target} TEST={name}{settings}")
