"""Megatron-Core's wheels on PyPI, for every release that the trainer is written for: each is built for another Python.

pip brings one and checks its hash; nothing of it is imported. It stays in the virtual environment.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEELS = {  # the Python that it is built for, and the hash
    "0.16.1": ("3.11", "38f6bef63cd4ebc4c39c1eccbaf578596accba5c47d012faffa0670913aec131"),
    "0.19.2": ("3.12", "8e3e486f13f559450415b9b9dc0ff3331a0bb83dd154553f7f350a75ff9c42b5"),
}


class NoWheel(RuntimeError):
    """pip did not bring it: PyPI cannot be reached, or has another file under this name."""


def folder(version: str) -> Path:
    """What holds its package `megatron`. Raises NoWheel."""
    kept = Path(sys.prefix) / f"megatron-core-{version}"
    if not kept.exists():
        with tempfile.TemporaryDirectory(dir=sys.prefix) as place:
            partial = Path(place) / "whole"
            with zipfile.ZipFile(_wheel(version, Path(place))) as wheel:
                wheel.extractall(partial)
            partial.replace(kept)
    return kept


def _wheel(version: str, place: Path) -> Path:
    python, digest = WHEELS[version]
    required = place / "requirements.txt"
    required.write_text(f"megatron-core=={version} --hash=sha256:{digest}\n")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--require-hashes"]
    command += [
        "--python-version",
        python,
        "--platform",
        "manylinux_2_28_x86_64",
        "-r",
        str(required),
        "-d",
        str(place),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    found = next(place.glob("megatron_core-*.whl"), None)
    if found is None:
        raise NoWheel(f"pip did not bring Megatron-Core {version}: {done.stderr[-1000:]}")
    return found
