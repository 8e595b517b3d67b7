"""The store of several hosts: etcd v3.

Its limits are etcd's: a lease lasts whole seconds, and at least as long as the server says (2 s with its default
settings); a transaction has at most 128 keys (--max-txn-ops) and 1.5 MiB (--max-request-bytes); etcd's own compaction
decides how long history is kept.

A watch has no gaps. When its stream breaks, it is subscribed again from the revision after the last event. A read at
the revision before the start comes first and tells whether every event from there on is still kept, because etcd does
not say so in two cases: at the very revision of a compaction it may leave a delete out, and it waits in silence for a
revision that it has not reached (its data were lost, and it counts anew).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator, Iterator, Mapping
from typing import Any

from aetcd import rpc

from weightsync.errors import Conflict, LeaseLost, StoreRefused, StoreUnavailable, WatchCompacted
from weightsync.store.etcd_members import Members
from weightsync.store.etcd_url import EtcdUrl
from weightsync.store.protocol import Event, KeyValue
from weightsync.timeouts import timeout

PATIENCE_S = 10.0  # how long a watch that has been running waits for etcd to come back
RETRY_S = 0.1


class EtcdStore:
    """`Store` on a cluster. Belongs to the event loop of its first call; open one per loop and process.

    A write that was on its way when the connection broke may have been applied although StoreUnavailable is raised.
    """

    def __init__(self, url: str) -> None:
        """Raises StoreUnavailable for a URL that is not one, or when nobody listens there."""
        self._url = EtcdUrl.parse(url)
        self._namespace = self._url.namespace
        self._members = Members(self._url)

    @property
    def url(self) -> str:
        return self._url.text

    async def get(self, key: str) -> KeyValue | None:
        found = (await self._members.call("Range", rpc.RangeRequest(key=self._key(key)))).kvs
        return key_value(found[0], self._namespace) if found else None

    async def list(self, prefix: str, *, first: str = "") -> tuple[list[KeyValue], int]:
        key, end = self._range(prefix, first)
        found = await self._members.call("Range", rpc.RangeRequest(key=key, range_end=end))
        return [key_value(kv, self._namespace) for kv in found.kvs], found.header.revision

    async def put(self, key: str, value: bytes, lease: int | None = None) -> int:
        return await self.txn({}, {key: value}, {key: lease} if lease is not None else None)

    async def delete(self, key: str) -> bool:
        request = rpc.DeleteRangeRequest(key=self._key(key))
        return bool((await self._members.call("DeleteRange", request, repeat=False)).deleted)

    async def compare_and_swap(
        self, key: str, expected_mod_revision: int, value: bytes, lease: int | None = None
    ) -> int:
        return await self.txn({key: expected_mod_revision}, {key: value}, {key: lease} if lease is not None else None)

    async def txn(
        self,
        compares: Mapping[str, int],
        puts: Mapping[str, bytes | None],
        leases: Mapping[str, int] | None = None,
    ) -> int:
        leases = leases or {}
        request = rpc.TxnRequest(
            compare=[self._compare(key, expected) for key, expected in compares.items()],
            success=[self._write(key, value, leases.get(key, 0)) for key, value in puts.items()],
            failure=[rpc.RequestOp(request_range=self._newest(key)) for key in compares],
        )
        try:
            answer = await self._members.call("Txn", request, repeat=False)
        except rpc.AioRpcError as error:
            raise LeaseLost(await self._ended(leases)) from error
        if not answer.succeeded:
            raise _conflict(compares, answer.responses)
        return int(answer.header.revision)

    async def grant_lease(self, ttl_s: float) -> int:
        answer = await self._members.call("LeaseGrant", rpc.LeaseGrantRequest(TTL=max(math.ceil(ttl_s), 1)))
        return int(answer.ID)

    async def keep_alive(self, lease: int) -> None:
        answer = await self._members.call("LeaseKeepAlive", rpc.LeaseKeepAliveRequest(ID=lease))
        if answer.TTL <= 0:
            raise LeaseLost(lease)

    async def revoke(self, lease: int) -> None:
        try:
            await self._members.call("LeaseRevoke", rpc.LeaseRevokeRequest(ID=lease))
        except rpc.AioRpcError:
            return  # NOT_FOUND: it has ended

    async def watch(
        self, prefix: str, start_revision: int | None = None, *, first: str = ""
    ) -> AsyncGenerator[Event, None]:
        """As `Store.watch`. Waits ten seconds for an etcd that went away before it raises StoreUnavailable."""
        watch = EtcdWatch(self._members, self._namespace, *self._range(prefix, first), start_revision)
        async for event in watch.events():
            yield event

    async def close(self) -> None:
        await self._members.close()

    async def _ended(self, leases: Mapping[str, int]) -> int:
        """The one of `leases` that etcd does not know."""
        *others, last = dict.fromkeys(leases.values())
        for lease in others:
            if (await self._members.call("LeaseTimeToLive", rpc.LeaseTimeToLiveRequest(ID=lease))).TTL < 0:
                return lease
        return last

    def _key(self, key: str) -> bytes:
        return (self._namespace + key).encode()

    def _range(self, prefix: str, first: str = "") -> tuple[bytes, bytes]:
        """The half-open range of the keys under a prefix, from `first` on. UTF-8 has no byte 0xff, so the last one can
        be raised."""
        key = self._key(prefix)
        return max(key, self._key(first)), key[:-1] + bytes([key[-1] + 1])

    def _compare(self, key: str, expected: int) -> Any:
        """A compare of a range holds when it does for every key that is there."""
        if key.endswith("/"):
            first, end = self._range(key)
            below: dict[str, Any] = {"result": rpc.Compare.LESS, "mod_revision": expected + 1}
            return rpc.Compare(key=first, range_end=end, target=rpc.Compare.MOD, **below)
        return rpc.Compare(key=self._key(key), target=rpc.Compare.MOD, result=rpc.Compare.EQUAL, mod_revision=expected)

    def _newest(self, key: str) -> Any:
        """Reads the key, or of all those under it the one that was written last."""
        if not key.endswith("/"):
            return rpc.RangeRequest(key=self._key(key), keys_only=True)
        first, end = self._range(key)
        last: dict[str, Any] = {"sort_target": rpc.RangeRequest.MOD, "sort_order": rpc.RangeRequest.DESCEND}
        return rpc.RangeRequest(key=first, range_end=end, keys_only=True, limit=1, **last)

    def _write(self, key: str, value: bytes | None, lease: int) -> Any:
        if value is None:
            return rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=self._key(key)))
        return rpc.RequestOp(request_put=rpc.PutRequest(key=self._key(key), value=value, lease=lease))


def _conflict(compares: Mapping[str, int], found: Any) -> Conflict:
    for (key, expected), answer in zip(compares.items(), found, strict=True):
        kvs = answer.response_range.kvs
        revision = kvs[0].mod_revision if kvs else 0
        if revision > expected or (revision != expected and not key.endswith("/")):
            return Conflict(key, expected, revision)
    raise AssertionError("etcd refused a transaction whose compares hold")


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
            except StoreRefused:
                raise
            except StoreUnavailable as error:
                if error.code == "store_lost":
                    raise
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
            async with timeout(1), contextlib.aclosing(self._members.watch(create)) as responses:
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
