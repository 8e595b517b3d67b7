"""An instance with a toy engine: `python -m tests.hosts.instance URL NAME LEASE_S`. Says `serves` when it does.

Answers lines of stdin: `state` with what it runs, `store` with what the store says to a read.
"""

from __future__ import annotations

import asyncio
import json
import sys

from tests.weightsync.fleet import MODEL, Engine
from weightsync import Participant, open_store
from weightsync.control.records import InstanceRecord
from weightsync.errors import StoreError


async def main(url: str, name: str, lease_s: float) -> None:
    store, engine = open_store(url), Engine()
    record = InstanceRecord(name, f"http://{name}")
    participant = Participant(
        store, MODEL, record, engine.stage, engine.commit, drop=engine.drop, lease_ttl_s=lease_s
    )  # fmt: skip
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
    asyncio.run(main(sys.argv[1], sys.argv[2], float(sys.argv[3])))
