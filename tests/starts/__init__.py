"""Engine starts: how many processes load a model while the tests run, forked or not, and in which files.

Engines are what the tests wait for, so the first tier may start MOST of them, over all workers of a run.
"""

from __future__ import annotations

import atexit
import json
import os
import tempfile
from collections import Counter
from pathlib import Path

import pytest

from tests.starts import sitecustomize

MOST = 25
UNKNOWN = "of no test"
_ROOT = Path(__file__).parents[1]


def install() -> None:
    """Have this process, and those that it starts from now on, counted."""
    if sitecustomize.FILE not in os.environ:
        file = tempfile.NamedTemporaryFile(prefix="hotswap-starts-")  # noqa: SIM115 - it goes with this process
        os.environ[sitecustomize.FILE] = file.name
        atexit.register(file.close)
        paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    sitecustomize.install()


def by_file() -> Counter[str]:
    """Starts so far, by the file of the test that asked for each."""
    lines = Path(os.environ[sitecustomize.FILE]).read_text().splitlines()
    return Counter(json.loads(line)["test"].partition("::")[0] or UNKNOWN for line in lines)


def too_many(config: pytest.Config) -> bool:
    """Whether this is a run of the whole first tier that has started more engines than it may."""
    whole = [Path(arg).resolve() for arg in config.args] == [_ROOT]
    first = "not broad" in config.getoption("markexpr") and not config.getoption("keyword")
    return whole and first and by_file().total() > MOST


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput") and too_many(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if not (starts := by_file()):
        return
    terminalreporter.section(f"engine starts: {starts.total()}")
    for path, count in starts.most_common():
        terminalreporter.write_line(f"{count:8}  {path}")
    if too_many(config):
        terminalreporter.write_line(f"the first tier may start {MOST}: use the engines that are there (tests/starts)")
