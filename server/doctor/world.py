"""What the checks look at. All of it can be another: a directory for `/`, a table for the environment, a runner."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from server.options import ClusterTlsDirectory, Option
from weightsync.memory.arena import DEFAULT_ROOT

RUN_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class Ran:
    """How a command ended. `status` is None if it could not be started or did not end in time; `said` then says why."""

    status: int | None
    said: str


def run_command(command: Sequence[str]) -> Ran:
    """Both outputs together."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            timeout=RUN_TIMEOUT_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return Ran(None, str(error))
    return Ran(done.returncode, done.stdout.decode(errors="replace").strip())


@dataclass(frozen=True)
class World:
    """This host and what is to run on it. None: not asked for, so what needs it is skipped or takes its default.

    `root` stands for `/` where `/proc` and `/sys` are read. `limit` gives the soft limit of a resource (-1: none).
    """

    store: Annotated[str | None, Option("store URL to check", env="HOTSWAP_STORE")] = None
    model_dir: Annotated[
        Path | None, Option("checkpoint that is to fit: directory, or name as for `up`", "--model")
    ] = None
    arena: Annotated[Path | None, Option("directory of the slots; default: as the processes choose")] = None
    cluster_tls: ClusterTlsDirectory = None
    host: Annotated[str, Option("address the gateway is to listen on")] = "127.0.0.1"
    port: Annotated[int, Option("port the gateway is to listen on")] = 8000
    admin_port: Annotated[int | None, Option("its admin port, if it must be that one")] = None
    instances: Annotated[int, Option("vLLM instances on this host")] = 1
    keep_versions: Annotated[int, Option("versions kept staged, the active one included")] = 2
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    root: Path = Path("/")
    shm: Path = DEFAULT_ROOT
    run: Callable[[Sequence[str]], Ran] = run_command
    limit: Callable[[int], int] = lambda which: resource.getrlimit(which)[0]

    def path(self, absolute: str) -> Path:
        """Where `absolute`, a path such as "/proc/meminfo", is in this world."""
        return self.root / absolute.lstrip("/")

    def read(self, absolute: str) -> str | None:
        """A small file of the kernel's, stripped; None if it is not there or cannot be read."""
        try:
            return self.path(absolute).read_text(errors="replace").strip()
        except OSError:
            return None

    @property
    def has_gpu_build(self) -> bool:
        """Whether the torch installed here computes on CUDA devices."""
        from server.doctor.installed import torch_cuda

        return torch_cuda() is not None


def size(nbytes: float) -> str:
    """For people: 1.5 GiB."""
    for unit in ("B", "KiB", "MiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} {unit}"
        nbytes /= 1024
    return f"{nbytes:,.1f} GiB"
