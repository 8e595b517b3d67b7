"""`hotswap train` becomes the trainer, so that a signal for one is a signal for the other."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path


def test_the_process_that_was_started_is_the_trainer(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    os.mkfifo(config)  # the trainer waits in reading it
    train = subprocess.Popen([sys.executable, "-m", "server.cli", "train", "--config", str(config)])
    try:
        deadline = time.monotonic() + 60
        while b"trainer.main" not in Path(f"/proc/{train.pid}/cmdline").read_bytes():
            assert train.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        train.terminate()
        assert train.wait(60) == -15
    finally:
        train.kill()
        train.wait()
