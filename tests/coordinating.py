"""A coordinator without a gateway, beside a test that blocks."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator

from anyio.from_thread import start_blocking_portal

from weightsync import Coordinator, open_store


@contextlib.contextmanager
def coordinating(url: str, model: str) -> Iterator[None]:
    """Swaps of the model are coordinated; nobody serves, so every commit is immediate."""

    @contextlib.asynccontextmanager
    async def leading() -> AsyncIterator[None]:
        store = open_store(url)
        coordinator = Coordinator(store, model)
        coordinator.start()
        yield
        await coordinator.stop()
        await store.close()

    with start_blocking_portal() as loop, loop.wrap_async_context_manager(leading()):
        yield
