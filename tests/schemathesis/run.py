"""Runs schemathesis as its users do, from the command line; what it finds is the message of the failure."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def schemathesis(url: str, settings: str, *arguments: str, model: str = "toy", timeout_s: float = 280) -> str:
    """Its report on the document at `url`. Fails the test if it finds anything. The same examples every time."""
    command = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(HERE / settings), "run", url]
    command += ["--seed", "1", "--generation-database", "none", "--no-color", "--request-timeout", "60", *arguments]
    environment = os.environ | {"SERVED_MODEL": model, "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as directory:  # it leaves its notes where it runs
        done = subprocess.run(
            command, cwd=directory, env=environment, capture_output=True, text=True, timeout=timeout_s
        )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout
