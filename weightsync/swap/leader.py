"""Who coordinates: of any number of candidates, the one that holds the key `leader` under its lease.

A candidate waits until the key is gone, and creates it. A leader that stops takes it away at once; one that dies, is
frozen or loses the store loses it when its lease ends, and its transactions, which compare the key, write nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
import uuid
from typing import Self

from weightsync.board import Board
from weightsync.errors import Conflict, StoreError
from weightsync.lease import LeaseKeeper
from weightsync.records import LeaderRecord
from weightsync.store.protocol import MISSING, Store

LEADER_TTL_S = 3.0


class Term:
    """The time one candidate leads. `lost` is done when its lease ended; `revision` is what its steps compare."""

    def __init__(self, lease: LeaseKeeper, key: str, revision: int) -> None:
        self._lease, self._key, self.revision = lease, key, revision
        self.lost = asyncio.create_task(lease.lost.wait())

    @classmethod
    async def win(cls, store: Store, board: Board, holder: str, ttl_s: float = LEADER_TTL_S) -> Self:
        """Wait for the end of the term before, and win against the other candidates. Raises StoreUnavailable."""
        key = board.keys.leader
        while True:
            while board.revision(key) != MISSING:
                await board.changed()
            lease = await LeaseKeeper.grant(store, ttl_s)
            try:
                record = LeaderRecord(holder, time.time())
                revision = await store.compare_and_swap(key, MISSING, record.to_json(), lease.id)
                while board.seen < revision:
                    await board.changed()
                return cls(lease, key, revision)
            except Conflict:  # another one was faster; its record is the next thing we see
                await lease.end()
                await board.changed()
            except BaseException:
                await lease.end()
                raise

    def lasts(self, board: Board) -> bool:
        """As far as this process knows; a step is checked in its transaction."""
        return not self.lost.done() and board.revision(self._key) == self.revision

    async def end(self) -> None:
        """Let the next one lead now; if the store is away, when the lease ends."""
        self.lost.cancel()
        with contextlib.suppress(StoreError):
            await self._lease.end()


def new_name() -> str:
    """Names a candidate; two in one process differ."""
    return f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
