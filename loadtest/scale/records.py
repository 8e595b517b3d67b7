"""Writes of one swap into the store, counted: a real publisher, coordinator and agents, whose engines do nothing.

The counts of two fleets of different sizes give what an instance adds and what is there without any; all records and
their sizes grow with the number of instances in no other way. The copies that peers announce are added to them.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from weightsync import CommitResult, Coordinator, Participant, Publisher, StageResult, Store, open_store
from weightsync.control.arenas import ensure_arena
from weightsync.control.records import ActiveRecord, CopyRecord, InstanceRecord, Keys, SwapRecord, VersionRecord
from weightsync.control.state import Step
from weightsync.control.swap import depends_on

MODEL = "bench"
SIZES = (4, 12)
COPY_WRITES = 3  # fetching, ready, and gone when the version is retired
DIGEST = "0" * 32


@dataclass(frozen=True)
class Written:
    """By one swap: keys, and bytes of keys and values. Everybody follows the keys of swaps (`active`, `swap`, `target`,
    `versions`), gateways and publishers those and all others under the model's root; nobody what is elsewhere."""

    swap_writes: float = 0.0
    swap_nbytes: float = 0.0
    root_writes: float = 0.0
    root_nbytes: float = 0.0
    other_writes: float = 0.0
    other_nbytes: float = 0.0


@dataclass(frozen=True)
class Flow:
    """Written by a swap of `n` instances: `fixed` + n x `each`."""

    fixed: Written
    each: Written
    kinds: dict[str, int]  # keys written by a swap of SIZES[-1] instances

    def of(self, instances: int) -> Written:
        fixed, each = asdict(self.fixed), asdict(self.each)
        return Written(**{name: fixed[name] + instances * each[name] for name in fixed})


def measure() -> Flow:
    """Count, in a few seconds."""
    (few, _), (many, kinds) = (asyncio.run(_swap_of(size)) for size in SIZES)
    a, b = asdict(few), asdict(many)
    each = {name: (b[name] - a[name]) / (SIZES[1] - SIZES[0]) for name in a}
    return Flow(Written(**{name: a[name] - SIZES[0] * each[name] for name in a}), Written(**each), kinds)


def at_scale(flow: Flow, instances: int, hosts: int, gateways: int = 2) -> dict[str, Any]:
    """One swap of a fleet: writes, events and bytes of the store, and how many keys its commit compares.

    The keys of swaps go to every instance's agent and every peer. These and the others under the root go twice to every
    gateway (its view and its coordinator) and to the publisher. A copy goes to the peers that are still fetching the
    slot: `fetching` to all, at worst, `ready` to those that are not done, half of them on the average. An event carries
    the value before as well.
    """
    written = flow.of(instances)
    all_of_it = 2 * gateways + 1
    followers = instances + hosts + all_of_it
    copies, copy_nbytes = COPY_WRITES * hosts, COPY_WRITES * hosts * _copy_nbytes()
    root_events, copy_events = (
        written.swap_writes * followers + written.root_writes * all_of_it,
        hosts * hosts + hosts * (hosts - 1) // 2,
    )
    root_nbytes = written.swap_nbytes * followers + written.root_nbytes * all_of_it
    return {
        "writes": round(written.swap_writes + written.root_writes + written.other_writes + copies),
        "written_nbytes": round(written.swap_nbytes + written.root_nbytes + written.other_nbytes + copy_nbytes),
        "root_events": round(root_events),
        "copy_events": copy_events,
        "events": round(root_events) + copy_events,
        "sent_nbytes": round(2 * (root_nbytes + copy_events * _copy_nbytes())),
        "compared_by_commit": _compared(instances),
        "keep_alives_per_s": round((instances + hosts) / (5.0 / 3)),
    }


async def _swap_of(instances: int) -> tuple[Written, dict[str, int]]:
    """The fourth version of a fleet: as every later one, it retires one before."""
    with tempfile.TemporaryDirectory(prefix="hotswap-scale-", dir="/dev/shm") as directory:
        url = f"sqlite://{directory}/store.db"
        async with _fleet(url, Path(directory), instances) as store:
            publisher = await asyncio.to_thread(Publisher, url, model=MODEL)
            for step in range(3):
                await asyncio.to_thread(publisher.publish, _weights(step))
            revision = (await store.list("models/"))[1]
            await asyncio.to_thread(publisher.publish, _weights(3))
            await asyncio.to_thread(publisher.close)
            return await _written(store, revision + 1)


@contextlib.asynccontextmanager
async def _fleet(url: str, directory: Path, instances: int) -> AsyncIterator[Store]:
    """A coordinator and instances with names and addresses of usual length."""
    store = open_store(url)
    await ensure_arena(store, directory / "arena")
    coordinator = Coordinator(store, MODEL)
    coordinator.start()
    fleet = [_participant(store, f"instance-{n:04d}") for n in range(instances)]
    for participant in fleet:
        participant.start()
    try:
        async with asyncio.timeout(60):
            await asyncio.gather(*(participant.serving() for participant in fleet))
        yield store
    finally:
        for participant in fleet:
            await participant.stop()
        await coordinator.stop()
        await store.close()


def _participant(store: Store, name: str) -> Participant:
    async def stage(version: VersionRecord) -> StageResult:
        return StageResult(version.fingerprint, 1.0, "vllm/packed")

    async def commit(_active: ActiveRecord, _version: VersionRecord) -> CommitResult:
        return CommitResult(1.0)

    record = InstanceRecord(
        name, "http://10.200.100.100:8000", pid=100_000, model_dir="/models/served", max_num_seqs=256
    )
    return Participant(store, MODEL, record, stage, commit)


def _weights(step: int) -> list[tuple[str, Any]]:
    return [("weight", np.full(64, step, np.float32))]


async def _written(store: Store, since: int) -> tuple[Written, dict[str, int]]:
    """Writes from a revision on, and how many keys of each kind."""
    keys = Keys(MODEL)
    root, other = await _events(store, keys.root, since), await _events(store, keys.history, since)
    followed = [event for event in root if event[0] == keys.active or event[0] >= keys.swap]
    alone = [event for event in root if event not in followed]
    kinds = Counter(name.removeprefix(keys.root).partition("/")[0] for name, _ in root + other)
    counts = ((len(events), sum(nbytes for _, nbytes in events)) for events in (followed, alone, other))
    return Written(*(count for pair in counts for count in pair)), dict(kinds)


async def _events(store: Store, prefix: str, since: int) -> list[tuple[str, int]]:
    """(key, bytes) of each, up to an end that is put there now."""
    end, found = f"{prefix}~end", list[tuple[str, int]]()
    await store.put(end, b"")
    async with contextlib.aclosing(store.watch(prefix, since)) as events:
        async for event in events:
            if event.kv.key == end:
                break
            found.append((event.kv.key, len(event.kv.key) + len(event.kv.value)))
    return found


def _copy_nbytes() -> int:
    record = CopyRecord("host-0000", f"//host-0000/dev/shm/hotswap-{DIGEST[:12]}/slot-00000000-000", DIGEST, 1 << 40,
                        "fetching", "10.200.100.100:7070", time.time())  # fmt: skip
    return len(record.to_json()) + len(Keys(MODEL).copy(DIGEST, "host-0000"))


def _compared(instances: int) -> int:
    names = tuple(f"instance-{n:04d}" for n in range(instances))
    swap = SwapRecord("0" * 32, 1, "commit", names, 0.0, 0.0)
    return len({*depends_on(Step("commit", swap), Keys(MODEL)), Keys(MODEL).target})
