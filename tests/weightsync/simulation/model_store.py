"""A model of the store: compare-and-swap, leases, events with revisions, outages; synchronous, its clock its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from weightsync.errors import Conflict, LeaseLost, StoreUnavailable
from weightsync.store.protocol import MISSING, Event, KeyValue

Puts = Mapping[str, bytes | None]


class ModelStore:
    """What `weightsync.store` promises, and nothing more: one transaction may be several events of one revision.

    Whoever watches reads `events` from an index of its own, as late as it likes.
    """

    def __init__(self) -> None:
        self.now, self.up, self.revision = 1000.0, True, 0
        self.lose_answer = False  # of the next transaction: it is written, and who wrote it hears of an outage
        self.events: list[Event] = []
        self.on_write: Callable[[Puts], None] = lambda puts: None
        self._found: dict[str, KeyValue] = {}
        self._leases: dict[int, tuple[float, float]] = {}  # id: time to live, end
        self._granted = 0

    def get(self, key: str) -> KeyValue | None:
        return self._found.get(key)

    def list(self, prefix: str) -> tuple[list[KeyValue], int]:
        self.require()
        return [kv for key, kv in self._found.items() if key.startswith(prefix)], self.revision

    def txn(self, compares: Mapping[str, int], puts: Puts, lease: int | None = None) -> int:
        """`lease` is for every key that is put."""
        self.require()
        for key, expected in compares.items():
            under = key.endswith("/")
            there = [kv.mod_revision for k, kv in self._found.items() if k == key or (under and k.startswith(key))]
            found = max(there, default=MISSING)
            if found > expected or (found != expected and not under):
                raise Conflict(key, expected, found)
        if lease is not None and lease not in self._leases:
            raise LeaseLost(lease)
        self._apply(puts, lease)
        if self.lose_answer:
            self.lose_answer = False
            raise _away()
        return self.revision

    def put(self, key: str, value: bytes, lease: int | None = None) -> int:
        return self.txn({}, {key: value}, lease)

    def grant(self, ttl_s: float) -> int:
        self.require()
        self._granted += 1
        self._leases[self._granted] = (ttl_s, self.now + ttl_s)
        return self._granted

    def holds(self, lease: int | None) -> bool:
        return lease in self._leases

    def revoke(self, lease: int) -> None:
        if self._leases.pop(lease, None) is not None:
            keys = [key for key, kv in self._found.items() if kv.lease == lease]
            self._apply(dict.fromkeys(keys), None)

    def tick(self, seconds: float, renewed: Iterable[int | None]) -> None:
        """Time goes by; leases that nobody renews end. While the store is away nobody can, and none ends."""
        self.now += seconds
        if not self.up:
            return
        for lease in renewed:
            if lease in self._leases:
                ttl_s = self._leases[lease][0]
                self._leases[lease] = (ttl_s, self.now + ttl_s)
        for lease in [lease for lease, (_, end) in self._leases.items() if end < self.now]:
            self.revoke(lease)

    def require(self) -> None:
        if not self.up:
            raise _away()

    def _apply(self, puts: Puts, lease: int | None) -> None:
        self.on_write(puts)
        self.revision += 1
        for key, value in puts.items():
            before = self._found.pop(key, None)
            if value is not None:
                created = before.create_revision if before is not None else self.revision
                self._found[key] = KeyValue(key, value, created, self.revision, lease)
                self.events.append(Event("put", self._found[key]))
            elif before is not None:
                gone = KeyValue(key, before.value, before.create_revision, self.revision, before.lease)
                self.events.append(Event("delete", gone))


def _away() -> StoreUnavailable:
    return StoreUnavailable("model", "away", "wait")
