"""Engine starts: how many processes load a model while the tests run, forked or not, and in which files.

Engines are what the tests wait for, so the first tier may start MOST of them, over all workers of a run. Tests that
need an engine use those that are there: `live` and `pair` (tests/conftest.py). One worker runs all files that use the
same, so that each is started once.
"""

from __future__ import annotations

import atexit
import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

from tests.started.sitecustomize import BUILDERS, STARTS

MOST = 25
UNKNOWN = "of no test"
_ROOT = Path(__file__).parent
_LIVE = """
contract/test_openai contract/test_trl server/console/test_live server/live/clients/test_clients
server/live/clients/test_fields_fuzz server/live/clients/test_openapi server/live/clients/test_routes
server/live/clients/test_trainers server/live/fleet/test_faults server/live/fleet/test_monitoring
server/live/fleet/test_sleep server/live/swaps/test_answers server/live/swaps/test_cache
server/live/swaps/test_crossings server/live/swaps/test_policies server/live/swaps/test_prefixes
server/live/swaps/test_swaps server/live/swaps/test_terms test_guides vllm_suite/test_vllm_suite_live
"""
_PAIR = """
chaos/test_failure_contract server/live/fleet/test_failover server/live/fleet/test_routing
server/live/swaps/test_rolling
"""
_SERVER_OF = {f"tests/{file}.py": name for name, files in (("live", _LIVE), ("pair", _PAIR)) for file in files.split()}


def scope(nodeid: str) -> str:
    """Files that one worker runs as a whole: those that share a server, or a single one."""
    path = nodeid.partition("::")[0]
    return _SERVER_OF.get(path, path)


class Shared(LoadFileScheduling):
    """Gives each worker a scope at a time."""

    def _split_scope(self, nodeid: str) -> str:
        return scope(nodeid)


@pytest.hookimpl(optionalhook=True)  # without xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Shared | None:
    return Shared(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Raises UsageError for a file that uses a shared server and is not in its list. One test of such a file starts the
    server, which its time limit does not count."""
    for item in items:
        made = getattr(item, "_fixtureinfo").name2fixturedefs  # noqa: B009 - of functions, which all items are
        used = {name for name in _SERVER_OF.values() if name in made and made[name][-1].baseid == "tests"}
        if used - {scope(item.nodeid)}:
            raise pytest.UsageError(f"{item.nodeid} uses {used}: add its file to the list in tests/starts")
        if used and item.get_closest_marker("timeout") is None:  # the start of a server has a limit of its own
            item.add_marker(pytest.mark.timeout(600, func_only=True))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Ends a shared server after the last test of its scope, which no other worker has a part of: until the end of the
    run an idle server would take 4 to 8 % of a core."""
    try:
        return (yield)
    finally:
        name, follows = scope(item.nodeid), scope(nextitem.nodeid) if nextitem else ""
        if hasattr(item.config, "workerinput") and name in _SERVER_OF.values() and follows not in ("", name):
            made = getattr(item.session, "_fixturemanager").getfixturedefs(name, item)  # noqa: B009 - as above
            next(fixture for fixture in made if fixture.baseid == "tests").finish(getattr(item, "_request"))  # noqa: B009


def install() -> None:
    """Have processes that this one starts from now on begin with tests/started/sitecustomize.py, and be counted."""
    if STARTS not in os.environ:
        file = tempfile.NamedTemporaryFile(prefix="hotswap-starts-")  # noqa: SIM115 - it goes with this process
        os.environ[STARTS] = file.name
        atexit.register(file.close)
        paths = [str(_ROOT / "started"), os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))


def by_file() -> Counter[str]:
    """Starts so far, by the file of the test that asked for each."""
    lines = Path(os.environ[STARTS]).read_text().splitlines()
    return Counter(json.loads(line)["test"].partition("::")[0] or UNKNOWN for line in lines)


def fault(config: pytest.Config) -> str:
    """The fault in the starts of this run, if it is one of the whole first tier."""
    whole = [Path(arg).resolve() for arg in config.args] == [_ROOT]
    chosen = config.getoption("keyword") or config.getoption("collectonly")
    if not whole or chosen or "not broad" not in config.getoption("markexpr"):
        return ""
    if not (count := by_file().total()):
        return f"no start was counted: vLLM builds its models by another function ({BUILDERS})"
    return f"the first tier may start {MOST}: use the engines that are there (tests/starts)" if count > MOST else ""


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput") and fault(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    starts, problem = by_file(), fault(config)
    if starts or problem:
        terminalreporter.section(f"engine starts: {starts.total()}")
    for path, count in starts.most_common():
        terminalreporter.write_line(f"{count:8}  {path}")
    if problem:
        terminalreporter.write_line(problem)
