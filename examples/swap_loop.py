"""A swap of weights in one process: what a server does, with engines of twenty lines.

    python examples/swap_loop.py

Two instances answer a stream while versions come, fail, and go back. All is real but for the engines: the store with
its records, the slots in shared memory, the publisher that writes them, the coordinator that leads each swap, and the
participant that speaks for each instance. An engine has one tensor, and its token is the number in it; a server puts
vLLM in its place (weightsync/vllm_engine).

A swap, as the lines below print it:

    the publisher   writes the tensors into a slot, and a record that the version is ready and wanted
    the instances   stage it beside the version that they run: read the slot, verify each byte, build
    the leader      commits: one record names the version, once every instance has staged the same bytes
    the instances   flip between two tokens, and keep the version before, so that a rollback is one more commit

Nothing is wanted of a GPU or of vLLM. It takes a few seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np

from weightsync import (
    ActiveRecord,
    CommitResult,
    Coordinator,
    InstanceRecord,
    Participant,
    Publisher,
    SlotReader,
    StageResult,
    Store,
    VersionRecord,
    WeightSyncError,
    open_store,
)

MODEL = "demo"
TOKEN_S = 0.002  # between two tokens of a stream


class Engine:
    """The model of one instance. Its calls are the four that a participant makes of any engine."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.version = 0
        self.weights = {0: 0.0}  # what it runs and what it has staged, by version

    def token(self) -> float:
        """The next token. A flip comes between two of them, never within one."""
        return self.weights[self.version]

    async def stage(self, version: VersionRecord) -> StageResult:
        """Build a version beside the one that runs. An error refuses it, and the leader aborts the swap."""
        with SlotReader.open(Path(version.slot), manifest_digest=version.manifest_digest) as slot:
            slot.verify_all()
            weight = np.frombuffer(bytes(slot.buffer("weight")), np.float32)
            fingerprint = slot.manifest.fingerprint
        if not np.isfinite(weight).all():
            raise ValueError("the tensor weight has values that are not finite")
        self.weights[version.version] = float(weight[0])
        return StageResult(fingerprint=fingerprint)

    async def commit(self, active: ActiveRecord, version: VersionRecord) -> CommitResult:
        """Flip to a version that is staged. An error would leave the instance torn, out of the fleet."""
        self.version = version.version
        return CommitResult(commit_ms=0.0)

    async def drop(self, version: VersionRecord) -> None:
        """Forget a version that was staged for nothing."""
        self.weights.pop(version.version, None)


@contextlib.asynccontextmanager
async def fleet(url: str, names: str) -> AsyncIterator[list[Engine]]:
    """An instance of each name, and the coordinator of their swaps: a server has one in each gateway."""
    engines = [Engine(name) for name in names]
    async with contextlib.AsyncExitStack() as stack:

        def connect() -> Store:
            store = open_store(url)
            stack.push_async_callback(store.close)
            return store

        coordinator = Coordinator(connect(), MODEL)
        coordinator.start()
        stack.push_async_callback(coordinator.stop)
        for engine in engines:
            record = InstanceRecord(engine.name, f"http://{engine.name}")
            participant = Participant(connect(), MODEL, record, engine.stage, engine.commit, drop=engine.drop)
            participant.start()
            stack.push_async_callback(participant.stop)
            await participant.serving()
        yield engines


async def stream(engine: Engine, stop: asyncio.Event) -> list[tuple[int, float]]:
    """The tokens that an engine generates until `stop`, each with the version that wrote it."""
    tokens = []
    while not stop.is_set():
        tokens.append((engine.version, engine.token()))
        await asyncio.sleep(TOKEN_S)
    return tokens


def spans(tokens: list[tuple[int, float]]) -> str:
    """`version 1 wrote 0-40, version 2 wrote 40-95`, as every answer of a server has it."""
    found, at = [], 0
    for version, run in itertools.groupby(tokens, key=lambda token: token[0]):
        length = len(list(run))
        found.append(f"version {version} wrote {at}-{at + length}")
        at += length
    return ", ".join(found)


async def publish(publisher: Publisher, value: float) -> None:
    """A version whose tensor has this value; returns once it serves. A trainer's loop calls `publish` likewise."""
    try:
        version = await asyncio.to_thread(publisher.publish, {"weight": np.full(4, value, np.float32)})
        print(f"published {value}: serves as version {version}")
    except WeightSyncError as error:
        print(f"published {value}: {error.code}, {error}")
    active = await asyncio.to_thread(publisher.active)
    print(f"  active: version {active.version if active is not None else None}")


async def main(directory: Path) -> None:
    url = f"sqlite://{directory / 'store.db'}"
    async with fleet(url, "ab") as engines:
        stop = asyncio.Event()
        streams = [asyncio.create_task(stream(engine, stop)) for engine in engines]
        publisher = await asyncio.to_thread(Publisher, url, model=MODEL)
        try:
            await publish(publisher, 1.0)
            await publish(publisher, 2.0)
            await publish(publisher, float("nan"))  # both instances refuse it: version 2 goes on serving
            version = await asyncio.to_thread(publisher.rollback)
            print(f"rolled back: version {version} serves")
        finally:
            publisher.close()
            shutil.rmtree(publisher.arena.directory)  # the slots, which a server keeps for its next start
        stop.set()
        for engine, tokens in zip(engines, await asyncio.gather(*streams), strict=True):
            assert all(token == float(version) for version, token in tokens), "a token has its version's value"
            print(f"stream of {engine.name}: {spans(tokens)}")


if __name__ == "__main__":
    logging.getLogger("weightsync").setLevel(logging.ERROR)  # the outcomes are printed
    with tempfile.TemporaryDirectory() as name:
        asyncio.run(main(Path(name)))
