"""The compiled load client and upstream: a Python one would be the bottleneck of what it measures."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

from server.cli.errors import CliError

SOURCES = Path(__file__).parent.parent / "native"
BUILD = Path("runs/native")
FLAGS = ("-O2", "-std=gnu11", "-Wall", "-Wextra")


class CannotBuild(CliError):
    """There is no C compiler, or it refused."""


def compiled(name: str, build: Path = BUILD) -> Path:
    """The program of `native/NAME.c`, compiled if it has not been in its present form. Raises CannotBuild."""
    source = SOURCES / f"{name}.c"
    digest = hashlib.sha256(" ".join(FLAGS).encode())
    for file in (source, SOURCES / "http.h"):
        digest.update(file.read_bytes())
    program = build / f"{name}-{digest.hexdigest()[:16]}"
    if not program.exists():
        _compile(source, program)
    return program.resolve()


def _compile(source: Path, program: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise CannotBuild("There is no C compiler: install one (`apt-get install gcc libc6-dev`), then run this again.")
    program.parent.mkdir(parents=True, exist_ok=True)
    unfinished = program.with_name(f"{program.name}.{os.getpid()}")
    done = subprocess.run([compiler, *FLAGS, str(source), "-o", str(unfinished)], capture_output=True, text=True)
    if done.returncode != 0:
        raise CannotBuild(f"{source} does not compile with {compiler}:\n{done.stderr[-2000:]}")
    unfinished.rename(program)
