"""Tests that a change reaches (scripts/reach.py), on small trees and on this one. Engine starts are counted by process,
and named after the test that asked for them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scripts import quick, reach
from tests import starts, tiers
from tests.started.sitecustomize import STARTS, TEST, counted

BASE = {
    "server/__init__.py": "",
    "server/a.py": "import os\nLIMIT = 1\ndef f():\n    '''says'''\n    return LIMIT\ndef g():\n    return 2\n",
    "server/b.py": "from server import a\nfrom server.a import g as taken\ndef h():\n    return a.f()\n",
    "server/worker.py": "from server.b import h\ndef run():\n    h()\nif __name__ == '__main__':\n    run()\n",
    "server/table.py": "def told(f):\n    return f\n",
    "server/told.py": "from server.table import told\n@told\ndef late():\n    pass\n",
    "weightsync/__init__.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from weightsync.c import C\n"
    "def __getattr__(name):\n    pass\n",
    "weightsync/c.py": "class C:\n    pass\nclass D:\n    pass\n",
    "tests/conftest.py": "import pytest\nfrom server.b import taken\n@pytest.fixture\ndef two():\n    return taken()\n",
    "tests/test_f.py": "from server.a import f\ndef test_f():\n    assert f()\n",
    "tests/test_h.py": "from server import b\ndef test_h():\n    assert b.h()\n",
    "tests/test_two.py": "def test_two(two):\n    assert two\n",
    "tests/test_process.py": "def test_p():\n    start([python, '-m', 'server.worker'])\n",
    "tests/test_patched.py": "def test_l(monkeypatch):\n    monkeypatch.setattr('server.a.LIMIT', 3)\n",
    "tests/test_told.py": "import server.told\ndef test_t():\n    pass\n",
    "tests/test_lazy.py": "def test_c():\n    from weightsync import C\n    C()\n",
    "tests/test_page.py": "def test_page():\n    (ROOT / 'docs' / 'page.md').read_text()\n",
    "tests/test_pages.py": "def test_pages():\n    (ROOT / 'docs').rglob('*.md')\n",
}
F, H, TWO, PROCESS, PATCHED = (f"tests/test_{name}.py" for name in ("f", "h", "two", "process", "patched"))
LIVE = "tests/server/live/swaps/test_swaps.py"


@pytest.mark.parametrize(
    ("path", "change", "reached"),
    [
        ("server/a.py", ("return LIMIT", "return LIMIT + 1"), [F, H, PROCESS]),
        ("server/a.py", ("LIMIT = 1", "LIMIT = 2"), [F, PATCHED, H, PROCESS]),
        ("server/a.py", ("return 2", "return 3"), [TWO]),
        ("server/a.py", ("import os", "import os  # a remark"), []),
        ("server/a.py", ("'''says'''", "'''says more'''"), []),
        ("server/b.py", ("from server.a import g", "from server.a import f"), [TWO]),
        ("server/worker.py", ("    run()\n", "    run(), run()\n"), [PROCESS]),
        ("server/told.py", ("pass", "return 1"), ["tests/test_told.py"]),
        ("weightsync/c.py", ("class C:\n    pass", "class C:\n    x = 1"), ["tests/test_lazy.py"]),
        ("weightsync/c.py", ("class D:\n    pass", "class D:\n    x = 1"), []),
        ("tests/conftest.py", ("return taken()", "return 2"), [TWO]),
        (TWO, ("assert two", "assert two == 2"), [TWO]),
        ("docs/page.md", None, ["tests/test_page.py", "tests/test_pages.py"]),
        ("docs/other.md", None, ["tests/test_page.py", "tests/test_pages.py"]),
    ],
)
def test_what_a_change_reaches(path: str, change: tuple[str, str] | None, reached: list[str]) -> None:
    old = BASE.get(path)
    new = old.replace(*change) if old is not None and change is not None else None
    assert new is None or new != old
    texts = BASE | ({path: new} if new is not None else {})
    modules = {name: reach.Module(name, text) for name, text in texts.items()}
    graph = reach.Graph(modules, ["docs/page.md", "docs/other.md"])
    assert sorted(graph.reached(reach.changed_names(path, old, new))) == sorted(reached)


def test_a_name_that_is_gone_reaches_those_that_used_it() -> None:
    new = BASE["server/a.py"].replace("def g():\n    return 2\n", "")
    graph = reach.Graph({name: reach.Module(name, text) for name, text in (BASE | {"server/a.py": new}).items()})
    assert list(graph.reached(reach.changed_names("server/a.py", BASE["server/a.py"], new))) == [TWO]


@pytest.mark.parametrize(
    ("node", "reached"),
    [
        (("weightsync.vllm_engine.backend", "WorkerMethods"), LIVE),  # in an instance
        (("weightsync.vllm_plugin", "register"), LIVE),
        (("server.gateway.exchange", "Exchange"), "tests/server/gateway/test_process.py"),
        (("trainer.rewards.worker", reach.MAIN), "tests/trainer/rewards/test_scorer.py"),
        (("trainer.loop", "train"), "tests/trainer/faults/test_resume.py"),  # forked by tests/trainer/zygote.py
        (("server/gateway/console/static/fleet.js", ""), "tests/server/console/test_fleet.py"),
        (("README.md", ""), "tests/test_readme.py"),
    ],
)
def test_processes_and_files_of_this_tree(node: reach.Node, reached: str) -> None:
    assert reached in reach.load().reached([node])


def test_a_change_of_the_trainer_reaches_no_test_of_a_live_server() -> None:
    found = reach.load().reached([("trainer.megatron.optimizer", "build_optimizer")])
    assert not [path for path in found if path.startswith("tests/server/live/")]


def test_tests_that_have_up_start_something_say_what() -> None:
    """A module of tests names in STARTS the programs that `server.up` starts in it."""
    assert not reach.load().undeclared()
    source = {
        "server/up/server.py": "class Server:\n    pass\n",
        F: "from server.up.server import Server\ntest = Server()\n",
    }
    assert reach.Graph({name: reach.Module(name, text) for name, text in source.items()}).undeclared() == [F]


def test_common_files_reach_everything_and_recorded_seconds_nothing() -> None:
    graph = reach.Graph({name: reach.Module(name, text) for name, text in BASE.items()})
    assert set(quick.every(graph, {("requirements/cpu.txt", "")})) == {name for name in BASE if reach.is_tests(name)}
    assert reach.changed_names(reach.SECONDS, None, None) == set()
    assert (reach.ROOT / reach.SECONDS) == tiers.SECONDS


def test_the_smoke_is_there_and_short() -> None:
    assert all((reach.ROOT / path).is_file() for path in quick.SMOKE)
    assert sum(tiers.recorded()[tiers.FIRST].get(path, 0.0) for path in quick.SMOKE) < 30


def test_a_test_that_fails_at_times_is_found(tmp_path: Path) -> None:
    test = tmp_path / "test_it.py"
    test.write_text(f"import os\ndef test_it():\n    os.mkdir({str(tmp_path / 'taken')!r})\n")
    command = [sys.executable, "-m", "scripts.flaky", str(test), "--times", "2", "--load", "1"]
    env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # imports, behind a busy loop
    done = subprocess.run(command, cwd=reach.ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "1 of 2 runs failed" in done.stdout
    assert "FileExistsError" in done.stdout


# engine starts


def config(*args: str, markexpr: str = "not broad", keyword: str = "") -> Any:
    return SimpleNamespace(args=args, getoption={"markexpr": markexpr, "keyword": keyword}.get)


def test_a_process_counts_once_and_its_forks_do_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "starts").touch()
    monkeypatch.setenv(STARTS, str(tmp_path / "starts"))
    monkeypatch.setenv(TEST, "tests/test_a.py::test_b (setup)")
    tier = config(str(Path(__file__).parent))
    assert "no start was counted" in starts.fault(tier)
    built = counted(lambda: None)
    for _ in range(starts.MOST):
        if not (pid := os.fork()):
            for _ in range(2):
                built()
            os._exit(0)
        os.waitpid(pid, 0)
    assert starts.by_file() == {"tests/test_a.py": starts.MOST}
    assert starts.fault(tier) == ""
    built()
    assert "may start" in starts.fault(tier)
    assert starts.fault(config("tests/server")) == starts.fault(config(*tier.args, keyword="x")) == ""


def test_files_that_share_a_server_go_to_one_worker() -> None:
    assert starts.scope("tests/server/console/test_live.py::test_x[a]") == "live"
    assert starts.scope("tests/chaos/test_failure_contract.py::test_y") == "pair"
    assert starts.scope("tests/test_reach.py::test_z") == "tests/test_reach.py"
