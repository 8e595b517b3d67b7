"""vLLM's source distributions on PyPI: a tenth of the size of a wheel, and for every release.

pip brings one and checks its hash. It cannot be built here, and pip keeps it all the same (`--no-clean`). What is asked
for of it stays in the virtual environment.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SHA256 = {
    "0.32.0": "d2c957d5eee3d0985012151315ddc62cbe0cd368fc96a5fc3510438d9dddf2ad",
    "0.33.0": "f4c33c2503d52bb411146afa9618a4f48bed68912f617e6803ac8d76e4c74112",
}


class NoSource(RuntimeError):
    """pip did not bring it: PyPI cannot be reached, or has another file under this name."""


def folder(version: str, name: str) -> Path:
    """A top folder of the distribution: "vllm", "tests". Raises NoSource."""
    kept = Path(sys.prefix) / f"vllm-{version}-source" / name
    if not kept.exists():
        kept.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=sys.prefix) as place:
            partial = Path(place) / "whole"
            shutil.copytree(_unpacked(version, Path(place)) / name, partial)
            partial.replace(kept)
    return kept


def _unpacked(version: str, place: Path) -> Path:
    required = place / "requirements.txt"
    required.write_text(f"vllm=={version} --hash=sha256:{SHA256[version]}\n")
    command = [sys.executable, "-m", "pip", "download", "--no-clean", "--no-deps", "--no-build-isolation"]
    command += ["--no-binary", ":all:", "--require-hashes", "-r", str(required), "-d", str(place)]
    done = subprocess.run(command, env=os.environ | {"TMPDIR": str(place)}, capture_output=True, text=True, timeout=240)
    found = next(place.glob("pip-*/vllm_*/tests"), None)
    if found is None:
        raise NoSource(f"pip did not bring the source distribution of vLLM {version}: {done.stderr[-1000:]}")
    return found.parent
