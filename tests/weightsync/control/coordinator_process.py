"""A coordinator in a process of its own: `python -m tests.weightsync.control.coordinator_process URL TTL_S [PHASE]`.

With PHASE it stops itself (SIGSTOP) between its decision to write a swap in that phase and the write. Prints a line
when it leads, when it is about to stop, and how that write ended.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping

from tests.waiting import eventually
from tests.weightsync.fleet import KEYS, MODEL
from weightsync import Coordinator, open_store
from weightsync.control.records import SwapRecord
from weightsync.errors import StoreError


def say(line: str) -> None:
    print(line, flush=True)


async def main(url: str, ttl_s: float, phase: str | None) -> None:
    store = open_store(url)
    real = store.txn

    async def txn(
        compares: Mapping[str, int], puts: Mapping[str, bytes | None], leases: Mapping[str, int] | None = None
    ) -> int:
        swap = puts.get(KEYS.swap)
        if swap is None or SwapRecord.from_json(swap).phase != phase:
            return await real(compares, puts, leases)
        say(f"stops before {phase}")
        store_thread = getattr(store, "_executor", None)  # SQLite's; it is idle then, and holds no lock for ever
        await asyncio.get_running_loop().run_in_executor(store_thread, os.kill, os.getpid(), signal.SIGSTOP)
        try:
            revision = await real(compares, puts, leases)
        except StoreError as error:
            say(f"refused: {error}")
            raise
        say("written")
        return revision

    store.txn = txn  # type: ignore[method-assign]
    coordinator = Coordinator(store, MODEL, leader_ttl_s=ttl_s)
    coordinator.start()
    await eventually(lambda: coordinator.leads, 240)
    say("leads")
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], float(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else None))
