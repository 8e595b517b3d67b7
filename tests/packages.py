"""Packages of other projects that only the second tier runs, in a folder of their own (requirements/clients.txt)."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

LIST = Path(__file__).parents[1] / "requirements" / "clients.txt"


def site() -> Path:
    """The folder, for PYTHONPATH. pip brings the packages once for each state of the list."""
    kept = Path(sys.prefix) / f"clients-{hashlib.sha256(LIST.read_bytes()).hexdigest()[:12]}"
    if not (kept / "complete").exists():
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(kept), "-r", str(LIST)]
        subprocess.run(command, check=True, timeout=600)
        (kept / "complete").touch()
    return kept
