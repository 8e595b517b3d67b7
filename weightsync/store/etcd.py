"""The store of several hosts: etcd v3.

Its limits, which are etcd's: leases last whole seconds and at least as long as the server says (2 s with its default
settings), a transaction has at most 128 keys (--max-txn-ops) and 1.5 MiB (--max-request-bytes), and history is kept
for as long as etcd's own compaction lets it.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from aetcd import rpc

from weightsync.errors import Conflict, LeaseLost
from weightsync.store.etcd_members import Members
from weightsync.store.etcd_url import EtcdUrl
from weightsync.store.etcd_watch import EtcdWatch, key_value
from weightsync.store.protocol import Event, KeyValue


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

    async def list(self, prefix: str) -> tuple[list[KeyValue], int]:
        key, end = self._range(prefix)
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
            failure=[rpc.RequestOp(request_range=rpc.RangeRequest(key=self._key(k), keys_only=True)) for k in compares],
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

    async def watch(self, prefix: str, start_revision: int | None = None) -> AsyncGenerator[Event, None]:
        """As `Store.watch`. Waits ten seconds for an etcd that went away before it raises StoreUnavailable."""
        watch = EtcdWatch(self._members, self._namespace, *self._range(prefix), start_revision)
        async for event in watch.events():
            yield event

    async def close(self) -> None:
        await self._members.close()

    async def _ended(self, leases: Mapping[str, int]) -> int:
        """Which of `leases` is the one that etcd does not know."""
        *others, last = dict.fromkeys(leases.values())
        for lease in others:
            if (await self._members.call("LeaseTimeToLive", rpc.LeaseTimeToLiveRequest(ID=lease))).TTL < 0:
                return lease
        return last

    def _key(self, key: str) -> bytes:
        return (self._namespace + key).encode()

    def _range(self, prefix: str) -> tuple[bytes, bytes]:
        """The half-open range of the keys under a prefix. UTF-8 has no byte 0xff, so the last one can be raised."""
        key = self._key(prefix)
        return key, key[:-1] + bytes([key[-1] + 1])

    def _compare(self, key: str, expected: int) -> Any:
        return rpc.Compare(key=self._key(key), target=rpc.Compare.MOD, result=rpc.Compare.EQUAL, mod_revision=expected)

    def _write(self, key: str, value: bytes | None, lease: int) -> Any:
        if value is None:
            return rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=self._key(key)))
        return rpc.RequestOp(request_put=rpc.PutRequest(key=self._key(key), value=value, lease=lease))


def _conflict(compares: Mapping[str, int], found: Any) -> Conflict:
    for (key, expected), answer in zip(compares.items(), found, strict=True):
        kvs = answer.response_range.kvs
        revision = kvs[0].mod_revision if kvs else 0
        if revision != expected:
            return Conflict(key, expected, revision)
    raise AssertionError("etcd refused a transaction whose compares hold")
