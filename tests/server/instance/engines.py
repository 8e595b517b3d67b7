"""A sidecar without a server, an engine that answers it at once, and engine cores that the real engine asks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from server.instance import engine as real
from server.instance.config import InstanceConfig
from server.instance.hosts import Tethers
from server.instance.middleware import Admission
from server.instance.sidecar import Sidecar
from weightsync.control.records import DeviceRecord, VersionRecord

ADDRESS = "http://127.0.0.1:1"


def version(number: int = 2, **fields: Any) -> VersionRecord:
    given = {"fingerprint": f"f{number}", **fields}
    return VersionRecord(number, "ready", "slot", 1, "d", None, None, "p", 1, 0.0, "", 1, **given)


class Engine:
    """`log` is what it was told, and `dropped` what it was told to drop. It says `path` of what it stages, and the
    fingerprint of the version, or `fingerprint`."""

    max_num_seqs = 4
    hosts = ("",)
    devices = (DeviceRecord("GPU-8a", 0),)

    def __init__(self, *, dead: bool = False, sleeps_in_place: bool = False) -> None:
        self.dead, self.sleeps_in_place = dead, sleeps_in_place
        self.path, self.fingerprint = "pointer", None
        self.log, self.dropped = list[str](), list[tuple[int, bool]]()

    async def prepare(self, *_: object, **__: object) -> None: ...

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def died(self) -> None:
        await asyncio.Event().wait()

    async def stage(self, version: VersionRecord, *_: object) -> dict[str, Any]:
        self.log.append(f"stage {version.version}")
        fingerprint = version.fingerprint if self.fingerprint is None else self.fingerprint
        gbps = 0.0 if self.path == "retained" else 1.0
        return {"stage_ms": 1.0, "staging_gbps": gbps, "path": self.path, "fingerprint": fingerprint}

    async def commit(self, version: int, epoch: int, withdrawn: bool) -> dict[str, float]:
        self.log.append(f"run {version}")
        return {"flip_ms": 0.1, "commit_ms": 0.1}

    async def drop(self, version: int, *, previous: bool) -> None:
        self.dropped.append((version, previous))

    async def sleep(self) -> None:
        self.log.append("sleep")

    async def wake(self) -> None:
        self.log.append("wake")


def config_of(directory: Path, **fields: Any) -> InstanceConfig:
    return InstanceConfig(directory, "toy", f"sqlite://{directory}/store.db", "i", **fields)


def sidecar_of(
    config: InstanceConfig,
    engine: Any = None,
    admission: Admission | None = None,
    warm_up: Callable[[], Awaitable[None]] | None = None,
) -> Sidecar:
    return Sidecar(config, engine or Engine(), admission or Admission(None), ADDRESS, warm_up=warm_up)


def report(**fields: Any) -> dict[str, Any]:
    """A worker's, of a version that it has staged."""
    sums = {"w": [[2, 2, 0, 2, 0, 2, 7]]}
    return {"running": False, "error": None, "stage_ms": 1.0, "sums": sums, "parts": {}, "version": 2} | fields


class Core:
    """One engine core with a worker on each of `hosts`; where a host has no name, a worker has no GPU.

    Its workers say one of `reports` after the other (the last for ever): all the same one, or those of a list.
    """

    def __init__(
        self, *reports: Any, flip: Callable[[], dict[str, float]] | None = None, hosts: Sequence[str] = ("",)
    ) -> None:
        self.reports, self.calls, self.orders = list(reports) or [report()], list[str](), list[Any]()
        self.commits: list[tuple[Any, ...]] = []
        self.flip = flip or (lambda: {"flip_ms": 1.0, "commit_ms": 2.0, "crossed": {}})
        self.hosts = hosts

    async def call(self, utility: str, *args: Any) -> Any:
        await asyncio.sleep(0)
        method = args[0] if utility == "collective_rpc" else utility
        self.calls.append(method)
        if method == "hotswap_attach":
            return list(self.hosts)
        if method == "hotswap_device":
            return [(f"GPU-{rank}", 7) if host else None for rank, host in enumerate(self.hosts)]
        if method == "hotswap_commit":
            self.commits.append(args)
            return self.flip()
        if method == "hotswap_drop":
            cancelled = {"code": "staging_cancelled", "message": "", "tensor": None}
            self.reports = [*self.reports[:1], report(error=cancelled)]
        if method == "hotswap_stage":
            self.orders.append(args[2][0])
        if method in ("hotswap_stage", "hotswap_report"):
            said = self.reports.pop(0) if len(self.reports) > 1 else self.reports[0]
            return said if isinstance(said, list) else [said] * len(self.hosts)
        return [""] * len(self.hosts)


def engine_of(
    *cores: Core, moe: bool = False, draft: Any = None, tethers: Tethers | None = None, **parallel: bool
) -> real.Engine:
    """The engine over these cores, one for each data-parallel rank. `parallel`: settings of vLLM's that are on."""
    ranks = {str(rank).encode(): core for rank, core in enumerate(cores)}

    async def call(method: str, *args: Any, engine: bytes) -> Any:
        return await ranks[engine].call(method, *args)

    off = dict.fromkeys(("data_parallel_external_lb", "data_parallel_hybrid_lb"), False)
    hosts = len(set(cores[0].hosts))
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(nnodes=hosts, data_parallel_size=len(cores), **off | parallel),
        model_config=SimpleNamespace(is_moe=moe),
        speculative_config=draft,
    )
    client = SimpleNamespace(
        errored=False,
        model_config=SimpleNamespace(get_vocab_size=lambda: 8),
        generate=None,
        encode=None,
        vllm_config=config,
        engine_core=SimpleNamespace(core_engines=list(ranks), _call_utility_async=call),
    )
    return real.Engine(client, tethers or Tethers())
