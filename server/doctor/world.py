"""The world that checks look at: the host, its packages, file systems and addresses."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import importlib.util
import os
import resource
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Annotated

from server.errors import ConfigError
from server.gpus import visible_devices
from server.options import ClusterTlsDirectory, Option
from weightsync import open_store
from weightsync.control.hosts import HOST_ENV, arena_key
from weightsync.control.records import ArenaRecord
from weightsync.errors import StoreError
from weightsync.memory.arena import DEFAULT_ROOT, default_directory
from weightsync.vllm_engine.device.room import UTILIZATION, Room
from weightsync.vllm_engine.gpus import Gpu, Gpus, look

RUN_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class Ran:
    """The outcome of a command. `status` is None if it could not be started or did not end in time; `said` then says
    why."""

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

    `root` stands for `/` where `/proc` and `/sys` are read. `gpus` are all that NVML tells of; None if its package is
    not installed. `limit` gives the soft limit of a resource (-1: none).
    """

    store: Annotated[str | None, Option("store URL to check", env="HOTSWAP_STORE")] = None
    model_dir: Annotated[
        Path | None, Option("checkpoint that is to fit: directory, or name as for `up`", "--model")
    ] = None
    models: Annotated[Path | None, Option("file of several models to check")] = None
    arena: Annotated[Path | None, Option("directory of the slots; default: as the processes choose")] = None
    cluster_tls: ClusterTlsDirectory = None
    bucket: Annotated[str | None, Option("bucket of versions to check: a URL of fsspec's, such as s3://BUCKET/RUN")] = (
        None
    )
    host: Annotated[str, Option("address the gateway is to listen on")] = "127.0.0.1"
    port: Annotated[int, Option("port the gateway is to listen on")] = 8000
    admin_port: Annotated[int | None, Option("its admin port, if it must be that one")] = None
    instances: Annotated[int, Option("vLLM instances on this host")] = 1
    tensor_parallel_size: Annotated[int, Option("GPUs that share the model of an instance")] = 1
    gpu_memory_utilization: Annotated[float, Option("part of a GPU that an instance is given, as for vLLM")] = (
        UTILIZATION
    )
    kv_cache_memory_bytes: Annotated[
        int | None, Option("KV cache of each rank, as for vLLM; default: what is left")
    ] = None
    keep_versions: Annotated[int, Option("versions kept staged, the active one included")] = 2
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    root: Path = Path("/")
    shm: Path = DEFAULT_ROOT
    run: Callable[[Sequence[str]], Ran] = run_command
    gpus: Callable[[], Gpus | None] = look
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

    def room(self, total: int) -> Room:
        """The share of an instance in a GPU of `total` bytes that nothing else uses."""
        utilization, kv_cache = self.gpu_memory_utilization, self.kv_cache_memory_bytes
        return Room.of(total, total, utilization=utilization, kv_cache=kv_cache)

    @property
    def ranks(self) -> int:
        """The ranks of all instances on this host; on GPUs each takes one."""
        return self.instances * self.tensor_parallel_size

    def gpus_taken(self) -> list[Gpu]:
        """Those that the ranks of all instances would have, each once; none where they are not known."""
        if (seen := self.gpus()) is None:
            return []
        try:
            names = visible_devices(self.environ, seen) or []
        except ConfigError:  # the check `gpu` says what is wrong
            return []
        return [gpu for name in dict.fromkeys(names[: self.ranks]) if (gpu := seen.named(name)) is not None]

    @property
    def has_gpu_build(self) -> bool:
        """Whether the torch installed here computes on CUDA devices."""
        return torch_cuda() is not None


def size(nbytes: float) -> str:
    """For people: 1.5 GiB."""
    for unit in ("B", "KiB", "MiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} {unit}"
        nbytes /= 1024
    return f"{nbytes:,.1f} GiB"


def version_of(package: str) -> str | None:
    """Without the local part ("+cpu"); None if it is not installed."""
    try:
        return metadata.version(package).split("+")[0]
    except metadata.PackageNotFoundError:
        return None


def torch_cuda() -> str | None:
    """The CUDA release that the installed torch was built with, such as "13.0"; None for a CPU build or no torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    return cuda_in(Path(spec.origin).with_name("version.py"))


def cuda_in(version_file: Path) -> str | None:
    """The value of `cuda` in torch's version.py."""
    try:
        tree = ast.parse(version_file.read_text())
    except (OSError, SyntaxError):
        return None
    for node in tree.body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or not isinstance(node.value, ast.Constant):
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if any(isinstance(target, ast.Name) and target.id == "cuda" for target in targets):
            return None if node.value.value is None else str(node.value.value)
    return None


def file_system(world: World, path: Path) -> str | None:
    """Its type, such as "tmpfs" or "nfs4"; None if /proc/mounts cannot be read."""
    place, best = path.resolve(), (0, None)
    for line in (world.read("/proc/mounts") or "").splitlines():
        _, point, kind, *_ = line.split()
        where = Path(point.replace("\\040", " "))
        if place.is_relative_to(where) and len(where.parts) >= best[0]:
            best = (len(where.parts), kind)  # type: ignore[assignment]
    return best[1]


UNTOLD = "hotswap"  # no store is named: only where it would be matters


def arena_directory(world: World) -> Path:
    """As asked, as $HOTSWAP_ARENA says, as the store says, or where the default is: in that order."""
    configured = world.arena or world.environ.get("HOTSWAP_ARENA")
    if configured:
        return Path(configured)
    if world.store is None:
        return world.shm / UNTOLD
    with contextlib.suppress(StoreError):  # the check `store` says what is wrong with it
        recorded = asyncio.run(_recorded(world.store, world.environ.get(HOST_ENV, "")))
        if recorded is not None:
            return recorded
    return (
        world.shm
        / default_directory(world.store.partition("?")[0] if world.store.startswith("sqlite:") else world.store).name
    )


async def _recorded(url: str, host: str) -> Path | None:
    store = open_store(url, create=False)
    try:
        found = await store.get(arena_key(host))
        return Path(ArenaRecord.from_json(found.value).directory) if found is not None else None
    finally:
        await store.close()


def held_nbytes(path: Path) -> int:
    """The bytes that a file takes, or the files of an arena. A file that is removed meanwhile takes none."""
    with contextlib.suppress(OSError):
        return sum(map(_nbytes, path.iterdir())) if path.is_dir() else _nbytes(path)
    return 0


def _nbytes(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_blocks * 512 if path.is_file() else 0
    return 0
