"""Keeps a lease alive in the background and says when it is lost."""

from __future__ import annotations

import asyncio
import contextlib

from weightsync.errors import LeaseLost, StoreError, StoreUnavailable
from weightsync.store.protocol import Store


class LeaseKeeper:
    """A lease of `ttl_s` seconds, renewed three times as often. `lost` is set when it ended against our will."""

    def __init__(self, store: Store, ttl_s: float) -> None:
        self._store, self.ttl_s = store, ttl_s
        self.lost = asyncio.Event()
        self.id = 0
        self._task: asyncio.Task[None] | None = None

    @classmethod
    async def grant(cls, store: Store, ttl_s: float) -> LeaseKeeper:
        """Raises StoreUnavailable."""
        keeper = cls(store, ttl_s)
        keeper.id = await store.grant_lease(ttl_s)
        keeper._task = asyncio.create_task(keeper._keep(), name=f"lease {keeper.id}")
        return keeper

    async def _keep(self) -> None:
        delay = self.ttl_s / 3
        while True:
            await asyncio.sleep(delay)
            try:
                await self._store.keep_alive(self.id)
                delay = self.ttl_s / 3
            except StoreUnavailable:
                delay = self.ttl_s / 10  # the store may come back before the lease has ended
            except LeaseLost:
                self.lost.set()
                return

    async def stop(self) -> None:
        """Stop renewing: what hangs on the lease goes when its time to live is over."""
        self.lost.set()
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def end(self) -> None:
        """Stop renewing and revoke, so that what hangs on the lease goes now."""
        await self.stop()
        with contextlib.suppress(StoreError):
            await self._store.revoke(self.id)
