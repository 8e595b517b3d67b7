"""Writes to the ledger until it is killed: `python -m tests.weightsync.control.ledger_process URL NAME [ARCHIVE]`.

Each deed is a key of its own, written with its entry. With ARCHIVE it moves old entries there, too. Prints a line when
the first is written.
"""

from __future__ import annotations

import asyncio
import sys

from server import ledger
from weightsync import open_store
from weightsync.control.chain import LedgerEntry, append


async def main(url: str, name: str, place: str) -> None:
    store = open_store(url)
    ledger.FILE, ledger.KEPT, ledger.BATCH = 10, 10, 3
    for count in range(1_000_000):
        deed = f"deeds/{name}/{count}"
        await append(store, {}, {deed: b"done"}, LedgerEntry("publish", name, subject=deed))
        if place:
            await ledger.archive(store, place)
        if count == 0:
            print("writes", flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3] if len(sys.argv) > 3 else ""))
