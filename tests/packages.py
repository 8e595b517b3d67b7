"""Packages of other projects that only tests run or read. Files that pip has brought stay in the virtual environment.

Clients lie in a folder (requirements/clients.txt), servers in a virtual environment of their own
(requirements/servers.txt). Of a distribution in PINNED nothing is installed:
its files are read, or imported one by one.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from tests.lacking import lacking

ROOT = Path(__file__).parents[1]
CLIENTS, SERVERS = ROOT / "requirements" / "clients.txt", ROOT / "requirements" / "servers.txt"
# (name, release) -> the Python of its wheel, and the wheel's hash. vLLM's are sources, which are a tenth as large.
PINNED = {
    ("megatron-core", "0.16.1"): ("3.11", "38f6bef63cd4ebc4c39c1eccbaf578596accba5c47d012faffa0670913aec131"),
    ("megatron-core", "0.19.2"): ("3.12", "8e3e486f13f559450415b9b9dc0ff3331a0bb83dd154553f7f350a75ff9c42b5"),
    ("sglang", "0.5.23"): ("3.11", "00b3cd5b265ac76c64185fbb6b95424f324ddd9f428d0306b77bc9db9d859937"),
    ("sglang-router", "0.3.2"): ("3.11", "ba5a24951e5e0357fe390782fcd1abd861448a87216832dbf2e501a1dd1548eb"),
    ("verl", "0.9.1"): ("3.11", "db6e6f2a8d9d5808d9ec32d357a42319fdc6967df688ff9d9810050f49bfdd14"),
    ("vllm", "0.32.0"): ("", "d2c957d5eee3d0985012151315ddc62cbe0cd368fc96a5fc3510438d9dddf2ad"),
    ("vllm", "0.33.0"): ("", "f4c33c2503d52bb411146afa9618a4f48bed68912f617e6803ac8d76e4c74112"),
}
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_34_x86_64", "manylinux2014_x86_64")


def site() -> Path:
    """The folder of the clients, for PYTHONPATH."""
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "-r", str(CLIENTS), "--target"]
    return _listed("clients", CLIENTS, lambda kept: subprocess.run([*pip, str(kept)], check=True, timeout=600))


def servers() -> Path:
    """The Python of the servers."""

    def install(kept: Path) -> object:
        command, variables = [str(ROOT / "scripts" / "install.sh"), str(kept), str(SERVERS)], {"PYTHON": sys.executable}
        return subprocess.run(command, check=True, timeout=600, cwd=kept.parent, env=os.environ | variables)

    return _listed("servers", SERVERS, install) / "bin" / "python"


def unpacked(name: str, release: str) -> Path:
    """The folder with what a distribution in PINNED holds: `vllm`, `megatron`. Where pip cannot bring it, the test
    lacks it."""
    return _kept(f"{name}-{release}-unpacked", lambda kept: _unpack(name, release, kept))


def _listed(name: str, wanted: Path, install: Callable[[Path], object]) -> Path:
    return _kept(f"{name}-{hashlib.sha256(wanted.read_bytes()).hexdigest()[:12]}", install)


def _kept(name: str, install: Callable[[Path], object]) -> Path:
    """Where the packages are; one process brings them, once."""
    kept = Path(sys.prefix) / name
    with open(f"{kept}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (kept / "complete").exists():
            install(kept)
            (kept / "complete").touch()
    return kept


def _unpack(name: str, release: str, kept: Path) -> None:
    python, digest = PINNED[name, release]
    with tempfile.TemporaryDirectory(dir=sys.prefix) as temporary:
        place = Path(temporary)
        (place / "required").write_text(f"{name}=={release} --hash=sha256:{digest}\n")
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes"]
        command += ["-r", str(place / "required"), "-d", temporary]
        if python:
            command += ["--only-binary", ":all:", "--python-version", python]
            command += [part for platform in PLATFORMS for part in ("--platform", platform)]
        else:  # sources that cannot be built here: pip fails, and keeps what it has unpacked
            command += ["--no-binary", ":all:", "--no-clean", "--no-build-isolation"]
        environment = os.environ | {"TMPDIR": temporary}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
        wheel, source = next(place.glob("*.whl"), None), next(place.glob(f"pip-*/{name}_*/{name}"), None)
        if wheel is not None:
            zipfile.ZipFile(wheel).extractall(kept)
        elif source is not None:
            shutil.copytree(source.parent, kept, dirs_exist_ok=True)
        else:
            lacking(f"pip did not bring {name} {release}: {done.stderr[-1000:]}")
