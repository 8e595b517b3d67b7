"""Engine starts are counted by process, and named after the test that asked for them."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import starts
from tests.started.sitecustomize import STARTS, TEST, counted


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
    assert starts.scope("tests/test_starts.py::test_z") == "tests/test_starts.py"
