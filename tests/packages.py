"""Packages of other projects that only the second tier runs: clients in a folder (requirements/clients.txt), servers in
a virtual environment of their own (requirements/servers.txt)."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
CLIENTS, SERVERS = ROOT / "requirements" / "clients.txt", ROOT / "requirements" / "servers.txt"


def site() -> Path:
    """The folder of the clients, for PYTHONPATH."""
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "-r", str(CLIENTS), "--target"]
    return _kept("clients", CLIENTS, lambda kept: subprocess.run([*pip, str(kept)], check=True, timeout=600))


def servers() -> Path:
    """The Python of the servers."""

    def install(kept: Path) -> object:
        command, variables = [str(ROOT / "scripts" / "install.sh"), str(kept), str(SERVERS)], {"PYTHON": sys.executable}
        return subprocess.run(command, check=True, timeout=600, cwd=kept.parent, env=os.environ | variables)

    return _kept("servers", SERVERS, install) / "bin" / "python"


def _kept(name: str, wanted: Path, install: Callable[[Path], object]) -> Path:
    """Where the packages are; they are brought once for each state of the list, by one process."""
    kept = Path(sys.prefix) / f"{name}-{hashlib.sha256(wanted.read_bytes()).hexdigest()[:12]}"
    with open(f"{kept}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (kept / "complete").exists():
            install(kept)
            (kept / "complete").touch()
    return kept
