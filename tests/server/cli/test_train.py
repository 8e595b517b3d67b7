"""`hotswap train` and its like become what they start, so that a signal for one is one for the other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import wait_until


@pytest.mark.parametrize(
    ("command", "module"),
    [("train", "trainer.main"), ("train-server", "trainer.api"), ("reward-server", "trainer.rewards.server")],
)
def test_the_process_that_was_started_is_the_trainer(tmp_path: Path, command: str, module: str) -> None:
    config = tmp_path / "config.yaml"
    os.mkfifo(config)  # the trainer waits in reading it
    train = subprocess.Popen([sys.executable, "-m", "server.cli", command, "--config", str(config)])
    try:
        wait_until(lambda: module.encode() in Path(f"/proc/{train.pid}/cmdline").read_bytes(), 60, process=train)
        train.terminate()
        assert train.wait(60) == -15
    finally:
        train.kill()
        train.wait()
