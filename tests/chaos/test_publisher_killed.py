"""A trainer is killed with SIGKILL at every step of a publish, and at moments nobody chose.

The active version stays whole at every moment, nothing half-written is ever visible, and the slot is used again.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.waiting import wait_until
from weightsync import Publisher, SlotReader, SyncStore
from weightsync.control.records import Keys, TargetRecord, VersionRecord
from weightsync.memory.arena import SlotLock

MODEL = "demo"
LEASE_S = 0.8
SHAPE = (64, 1024)

# The child publishes one version slowly enough to be killed at a named step: it says the step's name and stops there.
TRAINER = """
import sys, time
import numpy as np
from weightsync import Publisher
from weightsync.publish import session
from weightsync.publish import draft, publisher

url, stop_at, lease_s = sys.argv[1], sys.argv[2], float(sys.argv[3])

def halt(step):
    if step == stop_at:
        print(step, flush=True)
        time.sleep(600)

def around(owner, name, step, *, after=False):
    original = getattr(owner, name)
    if after:
        async def wrapper(*args, **kwargs):
            result = await original(*args, **kwargs)
            halt(step)
            return result
    else:
        def wrapper(*args, **kwargs):
            halt(step)
            return original(*args, **kwargs)
    setattr(owner, name, wrapper)

around(session.PublishSession, "_write_claim", "slot locked, no record")
around(session.PublishSession, "claim", "claimed", after=True)
around(publisher, "Draft", "mapped, nothing written")
around(draft, "assemble", "all written, no digest list")
around(draft, "write_header", "no header")
around(publisher.Publisher, "_make_ready", "header, not ready")
around(session.PublishSession, "make_ready", "ready, slot still locked", after=True)

names = [f"model.layers.{i}.weight" for i in range(8)]
with Publisher(url, model="demo", lease_ttl_s=lease_s) as pub:
    with pub.begin([(name, "float32", (64, 1024)) for name in names], step=2) as new:
        for i, name in enumerate(names):
            if i == 4:
                halt("half written")
            new.write(name, np.full((64, 1024), 2.0, np.float32))
        new.commit(activate=True)
halt("closed")
"""

BEFORE_COMMIT = [
    "slot locked, no record", "claimed", "mapped, nothing written", "half written", "all written, no digest list",
    "no header", "header, not ready",
]  # fmt: skip
STEPS = [*BEFORE_COMMIT, "ready, slot still locked", "closed"]

BUSY_TRAINER = """
import sys
import numpy as np
from weightsync import Publisher
rng = np.random.default_rng()
with Publisher(sys.argv[1], model="demo", lease_ttl_s=0.8) as pub:
    print("go", flush=True)
    while True:
        tensor = np.full((64, 1024), rng.random(), np.float32)
        pub.publish({f"model.layers.{i}.weight": tensor for i in range(8)}, activate=False)
"""


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("HOTSWAP_ARENA", str(tmp_path / "arena"))
    url = f"sqlite://{tmp_path / 'store.db'}"
    SyncStore(url).close()
    return url


def tensors(value: float) -> dict[str, np.ndarray]:
    return {f"model.layers.{i}.weight": np.full(SHAPE, value, np.float32) for i in range(8)}


def run_and_kill(url: str, step: str) -> None:
    # A lease is waited for only where there is no commit. A short one might end before the commit on a busy machine.
    command = [sys.executable, "-c", TRAINER, url, step, str(LEASE_S if step in BEFORE_COMMIT else 60)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline().strip() == step
        child.kill()


def value_of(record: VersionRecord) -> float:
    """Read a version wholly and verified; every element of it must be the same number."""
    with SlotReader.open(record.slot, manifest_digest=record.manifest_digest, version=record.version) as reader:
        reader.verify_all()
        values = {float(v) for n in reader.manifest.tensors for v in np.unique(np.frombuffer(reader.buffer(n), "f4"))}
    assert len(values) == 1
    return values.pop()


def wait_for_leases(publisher: Publisher) -> list[VersionRecord]:
    """The versions once every dead publisher's lease has ended."""
    wait_until(lambda: not any(v.state == "publishing" for v in publisher.versions()), 60)
    return publisher.versions()


@pytest.mark.parametrize("step", STEPS)
def test_killed_at(step: str, url: str) -> None:
    with Publisher(url, model=MODEL, lineage="before") as before:
        before.publish(tensors(1.0), activate=False)
        (first,) = before.versions()
        serving = SlotReader.open(first.slot, manifest_digest=first.manifest_digest, version=1)
        run_and_kill(url, step)

        serving.verify_all()  # what is served was not touched
        versions = wait_for_leases(before)
        committed = step not in BEFORE_COMMIT
        assert [v.version for v in versions] == ([1, 2] if committed else [1])
        assert [value_of(v) for v in versions] == ([1.0, 2.0] if committed else [1.0])
        wish = before._store.get(Keys(MODEL).target)
        assert (TargetRecord.from_json(wish.value).version if wish else None) == (2 if committed else None)

        taken = {v.slot for v in versions}
        for slot in before.arena.slots(MODEL):  # nothing but records and readers holds a slot
            if str(slot) not in taken:
                lock = SlotLock.try_exclusive(slot)
                assert lock is not None
                lock.release()
        slots = set(before.arena.slots(MODEL))
        third = before.publish(tensors(3.0), activate=False)
        assert third > versions[-1].version
        if not committed:
            assert set(before.arena.slots(MODEL)) == slots, "the dead trainer's slot was not used again"
        assert value_of(before.versions()[-1]) == 3.0
        serving.verify_all()
        serving.close()


def test_killed_at_moments_nobody_chose(url: str) -> None:
    chance = random.Random(7)
    with Publisher(url, model=MODEL, lineage="observer") as observer:

        def publish_and_read() -> None:
            """As often as retention needs to have as many slots as it ever takes."""
            for value in range(8):
                observer.publish(tensors(float(value)), activate=False)
                assert value_of(observer.versions()[-1]) == float(value)

        publish_and_read()
        # Where a kill falls depends on the machine, so trainers are killed until one has died in a publish.
        died = False
        for killed in range(60):
            with subprocess.Popen([sys.executable, "-c", BUSY_TRAINER, url], stdout=subprocess.PIPE) as child:
                assert child.stdout is not None
                child.stdout.readline()
                time.sleep(chance.uniform(0.0, 0.15))
                child.kill()
            versions = observer.versions()
            died |= any(record.state == "publishing" for record in versions)
            for record in versions:
                if record.state == "ready":
                    value_of(record)
            if killed >= 5 and died:
                break
        assert died, "no trainer died in a publish"
        numbers = [v.version for v in wait_for_leases(observer)]
        assert numbers == sorted(set(numbers))
        # Trainers that die within a lease of each other hold a slot each, so how many there are is left to chance.
        slots = set(observer.arena.slots(MODEL))
        publish_and_read()
        # A slot whose trainer died before the slot had its size may go, and none comes.
        assert set(observer.arena.slots(MODEL)) <= slots, "slots of dead trainers were not used again"


def test_a_stopped_trainer_that_wakes_up_late_goes_on(url: str) -> None:
    """SIGSTOP for longer than the lease: its version is forgotten, and claimed again when it commits."""
    with Publisher(url, model=MODEL, lease_ttl_s=LEASE_S) as stopped, Publisher(url, model=MODEL, lineage="b") as other:
        draft = stopped.begin([(name, "float32", SHAPE) for name in tensors(0)])
        lease = stopped._session._lease
        assert lease is not None
        assert lease._task is not None
        stopped._store.loop.call_soon_threadsafe(lease._task.cancel)  # all that a stopped process does not do
        wait_for_leases(other)
        assert other.versions() == []
        other.publish(tensors(5.0), activate=False)
        stopped._session._lease_ttl_s = 60.0  # so that the next one does not end, too
        for name, tensor in tensors(6.0).items():
            draft.write(name, tensor)  # still its own slot: nobody can claim it while it is held
        assert draft.commit() == 1
        assert [value_of(v) for v in other.versions()] == [6.0, 5.0]
        assert stopped.publish(tensors(7.0), activate=False) == 3
