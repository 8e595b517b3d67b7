"""Programs that tests run on hosts: `python -m tests.hosts.programs ...`.

`publish URL MIB VALUE` publishes a version, and says its number. `instance URL NAME LEASE_S` is an instance with a toy
engine, which says `serves` when it does. It answers lines of stdin: `state` with what it runs, `store` with what the
store says to a read.
"""

from __future__ import annotations

import asyncio
import json
import sys

import numpy as np

from tests.weightsync.fleet import MODEL, Engine
from weightsync import Participant, Publisher, open_store
from weightsync.control.records import InstanceRecord
from weightsync.errors import StoreError

CHANGES = 4  # MiB of every version that its value decides; the rest is noise, the same in all


def publish(url: str, mebibytes: int, value: float) -> None:
    noise = np.random.default_rng(0).standard_normal((mebibytes - CHANGES) << 18, np.float32)
    tensors = {"a.noise": noise, "b.value": np.full(CHANGES << 18, value, np.float32)}
    with Publisher(url, model=MODEL) as publisher:
        print(publisher.publish(tensors, activate=False), flush=True)


async def instance(url: str, name: str, lease_s: float) -> None:
    store, engine = open_store(url), Engine()
    record = InstanceRecord(name, f"http://{name}")
    participant = Participant(store, MODEL, record, engine.stage, engine.commit, drop=engine.drop, lease_ttl_s=lease_s)
    participant.start()
    await participant.serving()
    print("serves", flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        answer: object = {"running": engine.running, "state": participant.record.state}
        if line.strip() == "store":
            try:
                await store.get("anything")
                answer = "ok"
            except StoreError as error:
                answer = error.code
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    program, url, given, number = sys.argv[1:]
    if program == "publish":
        publish(url, int(given), float(number))
    else:
        asyncio.run(instance(url, given, float(number)))
