"""The store protocol: keys with revisions, leases, and watches without gaps, as etcd has them.

key      a string; `a/b/` is a prefix of `a/b/c`
revision one counter for the whole store; every successful write moves it by one, whatever the number of keys
lease    keys written under it are deleted, as events, when it is not kept alive for its time to live
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

MISSING = 0  # as expected revision: the key must not exist


@dataclass(frozen=True, slots=True)
class KeyValue:
    """A key as it stood at `mod_revision`. `lease` is None when it outlives its writer."""

    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    lease: int | None = None


@dataclass(frozen=True, slots=True)
class Event:
    """A change. A delete carries the last value; its `kv.mod_revision` is the revision of the delete."""

    kind: Literal["put", "delete"]
    kv: KeyValue


@runtime_checkable
class Store(Protocol):
    """Every method raises StoreUnavailable when the store cannot answer; nothing is then known to be written."""

    @property
    def url(self) -> str: ...

    async def get(self, key: str) -> KeyValue | None: ...

    async def list(self, prefix: str, *, first: str = "") -> tuple[list[KeyValue], int]:
        """The keys under `prefix`, from the key `first` on, sorted, and the revision they were read at."""
        ...

    async def put(self, key: str, value: bytes, lease: int | None = None) -> int:
        """Write unconditionally; returns the revision. Raises LeaseLost."""
        ...

    async def delete(self, key: str) -> bool:
        """True if there was something to delete."""
        ...

    async def compare_and_swap(
        self, key: str, expected_mod_revision: int, value: bytes, lease: int | None = None
    ) -> int:
        """Write if the key is at `expected_mod_revision` (0: does not exist); returns the revision. Raises Conflict."""
        ...

    async def txn(
        self,
        compares: Mapping[str, int],
        puts: Mapping[str, bytes | None],
        leases: Mapping[str, int] | None = None,
    ) -> int:
        """All or nothing: if every key of `compares` is at its revision (0: absent), apply `puts` (None deletes).

        A key of `compares` that ends with `/` stands for all keys under it: none may have been written after that
        revision, however many there are. A key that has gone is not noticed: etcd compares what is there.
        A put without an entry in `leases` detaches the key from any lease. Returns the revision.
        Raises Conflict, LeaseLost.
        """
        ...

    async def grant_lease(self, ttl_s: float) -> int: ...

    async def keep_alive(self, lease: int) -> None:
        """Raises LeaseLost when it has ended; it cannot be revived."""
        ...

    async def revoke(self, lease: int) -> None:
        """End the lease now; its keys are deleted. Revoking an ended lease does nothing."""
        ...

    def watch(self, prefix: str, start_revision: int | None = None, *, first: str = "") -> AsyncGenerator[Event, None]:
        """Events under `prefix` from `start_revision` on, in order, without gaps; None: from the first `anext` on.

        Of keys before `first` there are none.
        To miss nothing: `items, revision = await store.list(p)`, then `store.watch(p, revision + 1)`.
        Raises WatchCompacted when the events asked for are no longer kept.
        """
        ...

    async def close(self) -> None: ...
