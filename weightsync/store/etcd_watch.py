"""A watch without gaps on etcd: when its stream breaks it is asked for again, from the revision after the last event.

Before each subscription a read at the revision before its start tells whether every event from there on is still
kept. etcd itself does not say so in two cases: at the very revision of a compaction it may leave a delete out, and a
revision that it has not reached yet (its data were lost, and it counts anew) it would wait for in silence.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator
from typing import Any

from aetcd import rpc

from weightsync.errors import StoreLost, StoreRefused, StoreUnavailable, WatchCompacted
from weightsync.store.etcd_members import Members
from weightsync.store.protocol import Event, KeyValue

PATIENCE_S = 10.0  # how long a watch that has been running waits for etcd to come back
RETRY_S = 0.1


class EtcdWatch:
    """One watch of the keys in [`key`, `end`), which carry `namespace`; `start` is None for from now on."""

    def __init__(self, members: Members, namespace: str, key: bytes, end: bytes, start: int | None) -> None:
        self._members, self._namespace, self._key, self._end = members, namespace, key, end
        self._start = max(start, 1) if start is not None else None
        self._running = False  # etcd has been there, and an outage is waited for

    async def events(self) -> AsyncGenerator[Event, None]:
        """Ends when the store is closed. Raises WatchCompacted, and StoreUnavailable as `watch` of the store says."""
        loop = asyncio.get_running_loop()
        lost_at: float | None = None
        while not self._members.closed:
            try:
                async with contextlib.aclosing(self._subscription()) as responses:
                    async for response in responses:
                        lost_at = None
                        for event in self._decode(response):
                            yield event
            except (StoreRefused, StoreLost):
                raise
            except StoreUnavailable:
                if self._members.closed:
                    return
                lost_at = lost_at if lost_at is not None else loop.time()
                if not self._running or loop.time() - lost_at > PATIENCE_S:
                    raise
                await asyncio.sleep(RETRY_S)

    async def _subscription(self) -> AsyncGenerator[Any, None]:
        """The responses of one stream; `_start` follows what was handed out."""
        await self._check_start()
        create = rpc.WatchCreateRequest(
            key=self._key, range_end=self._end, start_revision=self._start, prev_kv=True, progress_notify=True
        )
        async with contextlib.aclosing(self._members.watch(create)) as responses:
            async for response in responses:
                if response.canceled:
                    self._raise_canceled(response)
                yield response
                if response.events:
                    self._start = response.events[-1].kv.mod_revision + 1
                elif not response.created:  # a progress report: nothing up to this revision is still to come
                    self._start = max(self._start or 0, response.header.revision + 1)

    async def _check_start(self) -> None:
        """Raises WatchCompacted when events from `_start` on are not all kept, or it is of another store's life."""
        at = max(self._start - 1, 1) if self._start is not None else 0
        request = rpc.RangeRequest(key=self._key, range_end=self._end, revision=at, limit=1, keys_only=True)
        try:
            found = await self._members.call("Range", request)
        except rpc.AioRpcError as error:
            raise WatchCompacted(self._start or 0, await self._oldest()) from error
        self._running = True
        if self._start is None:
            self._start = found.header.revision + 1

    async def _oldest(self) -> int:
        """The oldest revision a watch may start from: only a watch that is too old is told."""
        create = rpc.WatchCreateRequest(key=self._key, start_revision=1)
        found = await self._members.call("Range", rpc.RangeRequest(key=self._key, revision=0, limit=1, keys_only=True))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1), contextlib.aclosing(self._members.watch(create)) as responses:
                async for response in responses:
                    if response.canceled and response.compact_revision:
                        return int(response.compact_revision) + 1
        return int(found.header.revision) + 1

    def _raise_canceled(self, response: Any) -> None:
        if response.compact_revision:
            raise WatchCompacted(self._start or 0, int(response.compact_revision) + 1)
        # A token that has expired reads as a permission that is lacking: the next subscription shows which it is.
        self._members.forget_token()
        reason = response.cancel_reason or "it ended a watch"
        raise StoreUnavailable(self._members.url, reason, "Look at the log of etcd")

    def _decode(self, response: Any) -> Iterator[Event]:
        for event in response.events:
            if event.type == rpc.Event.PUT:
                yield Event("put", key_value(event.kv, self._namespace))
                continue
            revision = event.kv.mod_revision
            if not event.prev_kv.key:  # compacted while it was on its way
                raise WatchCompacted(revision, revision + 1)
            last = key_value(event.prev_kv, self._namespace)
            yield Event("delete", KeyValue(last.key, last.value, last.create_revision, revision, last.lease))


def key_value(kv: Any, namespace: str) -> KeyValue:
    """etcd's record of a key as ours, without the namespace."""
    key = kv.key.decode().removeprefix(namespace)
    return KeyValue(key, kv.value, kv.create_revision, kv.mod_revision, kv.lease or None)
