"""A sidecar without a server, and an engine that answers it at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from server.instance.config import InstanceConfig
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
        return {"stage_ms": 1.0, "staging_gbps": 1.0, "path": self.path, "fingerprint": fingerprint}

    async def commit(self, version: int, epoch: int) -> dict[str, float]:
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
