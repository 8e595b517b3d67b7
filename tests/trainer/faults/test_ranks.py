"""Two ranks under torchrun's agent: one is stopped, one is killed, all are asked to leave."""

from __future__ import annotations

import ipaddress
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.trainer.faults.runs import PATIENCE_S, arguments, curve, events
from tests.waiting import wait_until

pytestmark = [pytest.mark.timeout(900), pytest.mark.broad]


Start = Callable[[dict[str, Any], Path], "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts runs, and ends those that a failed test leaves behind, with their ranks."""
    runs = []

    def begin(config: dict[str, Any], root: Path) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "trainer.main", *arguments(config, root)]
        runs.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
        return runs[-1]

    yield begin
    for run in (run for run in runs if run.poll() is None):
        for rank in psutil.Process(run.pid).children(recursive=True):
            rank.kill()
        run.kill()
        run.wait()


def rank_process(launcher: int, rank: int) -> psutil.Process:
    children = psutil.Process(launcher).children(recursive=True)
    (found,) = [child for child in children if child.environ().get("RANK") == str(rank)]
    return found


def test_faults_of_ranks(config: dict[str, Any], tmp_path: Path, start: Start) -> None:
    """One after the other in one run, since starting two ranks is what takes time. The run first loses a rank that is
    stopped, then, at its second attempt, is asked to leave; run again it comes to the end that it would have had."""
    config |= {"parallel": {"data": 2}, "steps": 100_000, "checkpoint": config["checkpoint"] | {"every": 20}}
    config |= {"faults": {"max_restarts": 1, "heartbeat_s": 0.2, "heartbeat_timeout_s": 15.0}}
    config["optimizer"] |= {"decay": "constant"}
    path = config["metrics"]
    run = start(config, tmp_path)

    wait_until(lambda: len(curve(path)) > 50 and events(path, "checkpoint"), PATIENCE_S, process=run)
    listening = {c.laddr.ip for p in (psutil.Process(run.pid), *psutil.Process(run.pid).children(recursive=True))
                 for c in p.net_connections("tcp") if c.status == psutil.CONN_LISTEN}  # fmt: skip
    assert listening
    assert all(ipaddress.ip_address(ip).is_loopback for ip in listening), listening
    stopped = rank_process(run.pid, 1)
    stopped.suspend()
    # The launcher writes `restart`, a new rank the second `start`; either may come first.
    again = ("start", 2), ("restart", 1)
    wait_until(lambda: all(len(events(path, e)) == n for e, n in again), PATIENCE_S, "the ranks started again", run)
    assert not stopped.is_running()
    (restart,) = events(path, "restart")
    assert restart["attempt"] == 1
    assert "no heartbeat" in restart["reason"]
    assert f"rank 1 (process {stopped.pid}" in restart["reason"]

    second = events(path, "start")[1]["step"]
    assert second >= 20
    wait_until(lambda: max(curve(path)) > second + 50, PATIENCE_S, process=run)
    run.send_signal(signal.SIGTERM)
    assert run.wait(120) == 128 + signal.SIGTERM
    assert run.stderr is not None
    said = run.stderr.read()
    assert said.count("error: no heartbeat for") == 1
    assert said.count("stopped by SIGTERM: saved at step") == 1
    assert "Traceback" not in said
    saved = events(path, "checkpoint")[-1]["step"]
    assert saved == max(curve(path)), "the last step that was done is the one that was saved"

    # The run goes on as if nothing had happened to it.
    config |= {"steps": saved + 3, "faults": {}}
    (tmp_path / "checkpoints" / "unrelated").touch()
    last = start(config, tmp_path)
    assert last.wait(240) == 0
    assert events(path, "start")[2]["step"] == saved
    steps = [event["step"] for event in events(path, "step")]
    assert steps.count(saved + 1) == 1


def test_a_killed_rank_is_named_and_a_mistake_is_not_repeated(
    config: dict[str, Any], tmp_path: Path, start: Start
) -> None:
    """Without restarts left the run ends with 1. One that the user must correct is not started a second time."""
    config |= {"parallel": {"data": 2}, "steps": 100_000}
    run = start(config, tmp_path)
    wait_until(lambda: len(curve(config["metrics"])) > 5, PATIENCE_S, process=run)
    killed = rank_process(run.pid, 1)
    os.kill(killed.pid, signal.SIGKILL)
    assert run.wait(120) == 1
    assert run.stderr is not None
    said = run.stderr.read()
    assert f"lost rank 1 (process {killed.pid}) to SIGKILL" in said
    assert "Traceback" not in said

    config |= {"seed": 7, "faults": {"max_restarts": 3}}
    run = start(config, tmp_path)
    assert run.wait(240) == 2
    assert run.stderr is not None
    assert run.stderr.read().count("was written with seed 0, this run has 7") == 1
