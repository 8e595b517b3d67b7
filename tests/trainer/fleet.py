"""A whole serving side for the trainer's tests: store, coordinator, and one instance with a real transformers model.

Weights reach the model as they reach an engine: published slot, staged and verified, flipped at the commit.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.trainer.rollouts.generate_server import GenerateServer, serve
from weightsync.control.agent import Participant
from weightsync.control.arenas import ensure_arena
from weightsync.control.coordinator import Coordinator
from weightsync.control.parts import base_of
from weightsync.control.records import ActiveRecord, InstanceRecord, Keys, VersionRecord
from weightsync.control.swap import CommitResult, StageResult
from weightsync.errors import ManifestError
from weightsync.memory.receiver import SlotReader
from weightsync.peer.copies import wait_for_slots
from weightsync.store import Store, SyncStore, open_store

SLOTS_S = 60.0  # how long a host may take to have a version
LEASE_S = 60.0  # a slow machine holds up the instance for seconds; without its lease no swap waits for it


class Fleet:
    """One instance and its coordinator, on `host`. `refuse` makes the instance refuse to stage; `versions` is what it
    ran."""

    def __init__(self, server: GenerateServer, store_url: str, arena: Path, model: str, host: str = "") -> None:
        self.server, self.store_url, self.model, self._host = server, store_url, model, host
        self.refuse = False
        self.versions: list[int] = []
        self._arena = arena
        self._staged: dict[int, dict[str, torch.Tensor]] = {}
        self._ready = threading.Event()
        self._stopping: asyncio.Event

    @property
    def sections(self) -> dict[str, Any]:
        """Of a run that samples from the instance and publishes to it."""
        publish = {"model": self.model, "store": self.store_url, "dtype": "float32"}
        return {"gateway": {"url": self.server.url}, "publish": publish}

    async def run(self) -> None:
        store: Store = open_store(self.store_url)
        await ensure_arena(store, self._arena, host=self._host)
        self._store = store
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        record = InstanceRecord(id="test", address=self.server.url, state="STARTING")
        participant = Participant(store, self.model, record, self._stage, self._commit, lease_ttl_s=LEASE_S)
        coordinator = Coordinator(store, self.model)
        participant.start()
        coordinator.start()
        await participant.serving()
        self._ready.set()
        await self._stopping.wait()
        await participant.stop()
        await coordinator.stop()
        await store.close()

    async def _stage(self, version: VersionRecord) -> StageResult:
        if self.refuse:
            raise ManifestError("made to refuse")
        version = await wait_for_slots(self._store, Keys(self.model), version, self._host, SLOTS_S)
        base = base_of(version)  # parts beside it are nothing that a transformers model runs
        assert base is not None
        with SlotReader.open(base.slot, manifest_digest=base.manifest_digest, version=base.version) as reader:
            reader.verify_all()
            self._staged = {version.version: {name: _tensor(reader, name) for name in reader.manifest.tensors}}
        return StageResult()

    async def _commit(self, active: ActiveRecord, version: VersionRecord) -> CommitResult:
        self.server.load(self._staged[version.version], version.version)
        self.versions.append(version.version)
        return CommitResult()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stopping.set)


def keep(running: Fleet) -> list[dict[str, torch.Tensor]]:
    """The tensors of each version from now on, which the model does not load: transformers holds experts fused, and
    knows no quantised weights."""
    received: list[dict[str, torch.Tensor]] = []
    running.server.load = lambda tensors, version: received.append(tensors)  # type: ignore[method-assign]
    return received


def same_tensors(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether both have the same names with the same dtypes and bits."""
    return one.keys() == other.keys() and all(
        tensor.dtype is other[name].dtype and torch.equal(_bits(tensor), _bits(other[name]))
        for name, tensor in one.items()
    )


def exported(directory: Path) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint that all ranks have written."""
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@contextlib.contextmanager
def never_behind(running: Fleet) -> Iterator[None]:
    """No answer begins with another version than the active one. Otherwise the first after a commit may, and how many
    those are depends on the moment."""
    store, key = SyncStore(running.store_url), Keys(running.model).active

    def flipped() -> bool:
        found = store.get(key)
        return found is None or ActiveRecord.from_json(found.value).version == running.server.version

    running.server.ready = flipped
    try:
        yield
    finally:
        running.server.ready = lambda: True
        store.close()


def _tensor(reader: SlotReader, name: str) -> torch.Tensor:
    entry = reader.entry(name)
    flat = torch.frombuffer(bytearray(reader.buffer(name)), dtype=getattr(torch, entry.dtype))
    return flat.reshape(entry.shape)


@contextlib.contextmanager
def fleet(
    model_directory: str, root: Path, model: str = "tiny", kind: type[GenerateServer] = GenerateServer, host: str = ""
) -> Iterator[Fleet]:
    """Serve `model_directory` on `host`; the store and the slots lie below `root`."""
    with serve(kind(model_directory)) as server:
        running = Fleet(server, f"sqlite:///{root}/store.db", root / "slots", model, host)
        thread = threading.Thread(target=lambda: asyncio.run(running.run()), daemon=True)
        thread.start()
        assert running._ready.wait(120), "the fleet did not start"
        try:
            yield running
        finally:
            running.stop()
            thread.join(20)
