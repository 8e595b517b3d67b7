"""The GPUs that the ranks of this host compute on: those that the configuration names, else those that no server here
has. No torch: CUDA reads CUDA_VISIBLE_DEVICES once, so it is set before."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping

from trainer.errors import ConfigError
from trainer.launch import is_rank
from weightsync import running
from weightsync.control.records import MODELS_PREFIX, InstanceRecord
from weightsync.errors import RecordError, StoreError
from weightsync.store import SyncStore
from weightsync.vllm_engine import gpus
from weightsync.vllm_engine.gpus import Gpus

DEVICES_ENV = "CUDA_VISIBLE_DEVICES"
CPU = "cpu"
Devices = int | str | None  # as CUDA_VISIBLE_DEVICES has them, "cpu", or None: whichever are free


def take(wanted: Devices, ranks: int, store: str, *, shared: bool = False) -> None:
    """Have this process and the ranks that it starts see a GPU for each rank, and no other.

    Without `wanted` they are those of CUDA_VISIBLE_DEVICES, or of the host, that no instance has, by `store` and the
    stores of the servers that run here; with `shared` those of instances, too. Ranks of another launcher keep what they
    see. Raises ConfigError: too few, one that is not here, or GPUs on which the installed torch cannot compute.
    """
    if wanted == CPU:
        os.environ[DEVICES_ENV] = ""
        return
    seen = gpus.look()
    if seen is None or not seen.devices:
        if wanted is not None:
            why = f" ({seen.why_none})" if seen is not None and seen.why_none else ""
            raise ConfigError("devices", f"{wanted}, and no GPU is seen here{why}", "Leave it out, or load the driver")
        return
    if not is_rank():
        held = {} if shared or wanted is not None else _held({store, *(s.store for s in running.servers())} - {""})
        asked = os.environ.get(DEVICES_ENV) if wanted is None else str(wanted)
        os.environ[DEVICES_ENV] = ",".join(chosen(asked, ranks, seen, held))
    import torch

    if not torch.cuda.is_available():
        problem = f"this host has {len(seen.devices)} GPUs, and torch {torch.__version__} computes on none of them"
        raise ConfigError("devices", problem, "Install torch for CUDA (docs/install.md), or set devices to cpu")


def chosen(asked: str | None, ranks: int, seen: Gpus, held: Mapping[str, str]) -> list[str]:
    """UUIDs of as many GPUs as there are ranks, of those that were `asked` for (None: all whole ones). `held`: by UUID,
    which instance has a GPU. Raises ConfigError."""
    if asked is None:
        names = [str(gpu.index) for gpu in seen.devices if not gpu.is_part]
    else:
        names = [name for name in asked.replace(" ", "").split(",") if name]
    found = {name: gpu for name in names if (gpu := seen.named(name)) is not None}
    if stray := [name for name in names if name not in found]:
        here = ", ".join(gpu.uuid if gpu.is_part else f"{gpu.index} or {gpu.uuid}" for gpu in seen.devices)
        raise ConfigError("devices", f"no GPU here is called {stray[0]}", f"This host has {here}")
    busy = {name: held[gpu.uuid] for name, gpu in found.items() if gpu.uuid in held}
    free = [gpu.uuid for name, gpu in found.items() if name not in busy]
    if len(free) < ranks:
        serving = "".join(f"; {instance} has {name}" for name, instance in busy.items())
        problem = f"{ranks} ranks want a GPU each, and {len(free)} of {len(found)} are free{serving}"
        advice = "Name GPUs in devices, which may be shared, start fewer ranks, or set devices to cpu"
        raise ConfigError("devices", problem, advice)
    return free[:ranks]


def _held(stores: Iterable[str]) -> dict[str, str]:
    """By UUID, the instance that has each GPU. A store that does not answer holds nobody up here."""
    held: dict[str, str] = {}
    for url in stores:
        with contextlib.suppress(StoreError), contextlib.closing(SyncStore(url, create=False)) as store:
            for record in store.list(MODELS_PREFIX)[0]:
                if "/instances/" in record.key:
                    with contextlib.suppress(RecordError):
                        instance = InstanceRecord.from_json(record.value)
                        held |= {device.uuid: instance.id for device in instance.devices}
    return held
