"""What the gateway that leads does for the ledger: it tells traces of new entries, and moves older ones to files."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from weightsync.control import chain
from weightsync.control.chain import LedgerEntry
from weightsync.errors import LedgerUnavailable, RecordError, StoreError
from weightsync.store import Store

log = logging.getLogger("hotswap.gateway")

EVERY = 100  # entries after which it looks whether older ones should leave the store
RETRY_S = 0.5


class LedgerKeeper:
    """Follows the ledger while `leads`. `on_entry` is told of every new entry; older ones leave for `place`."""

    def __init__(self, store: Store, place: str, leads: Callable[[], bool], on_entry: Callable[[LedgerEntry], None]):
        self._store, self._place, self._leads, self._on_entry = store, place, leads, on_entry

    async def run(self) -> None:
        """For ever. Whatever the store or the files do, swaps go on; it is logged."""
        away = False
        while True:
            try:
                _, revision = await self._store.list(chain.HEAD)
                away = False
                async for event in self._store.watch(chain.ENTRIES, revision + 1):
                    if event.kind == "put" and self._leads():
                        await self._take(event.kv.value)
            except StoreError as exc:
                if not away:
                    log.warning("the ledger is not followed until the store answers: %s", exc)
                away = True
                await asyncio.sleep(RETRY_S)

    async def _take(self, line: bytes) -> None:
        try:
            entry = LedgerEntry.from_json(line)
        except RecordError as exc:
            log.error("ignoring an entry of the ledger: %s", exc)
            return
        self._on_entry(entry)
        if entry.number % EVERY:
            return
        try:
            if moved := await chain.archive(self._store, self._place):
                log.info("%d entries of the ledger left the store for %s", moved, self._place or "nowhere")
        except LedgerUnavailable as exc:
            log.error("older entries of the ledger stay in the store: %s", exc)
