"""What the store says all the time, read by a thread: the fleet now, swaps that ended, swaps that are late."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from weightsync.control.records import ActiveRecord, InstanceRecord, Keys, PastSwapRecord, SwapRecord
from weightsync.control.state import confirm_within_s, in_flight
from weightsync.errors import RecordError, StoreError
from weightsync.store import SyncStore

EVERY_S, HISTORY_EVERY_S = 0.4, 1.0
SERVES = frozenset({"SERVING", "STAGING", "STAGED", "COMMITTING"})


@dataclass(frozen=True)
class Snapshot:
    """Records of one moment; `at` is monotonic, None while the store has not been read."""

    at: float | None = None
    active: ActiveRecord | None = None
    swap: SwapRecord | None = None
    instances: dict[str, InstanceRecord] = field(default_factory=dict)

    def behind(self, names: list[str]) -> list[str]:
        """Which of these instances do not run what is committed, and how they stand."""
        return [f"{name} {self._state(name)}" for name in names if not self._follows(self.instances.get(name))]

    def _follows(self, instance: InstanceRecord | None) -> bool:
        if instance is None or self.active is None or instance.state not in SERVES:
            return False
        return (instance.active_version, instance.active_epoch) == (self.active.version, self.active.epoch)

    def _state(self, name: str) -> str:
        found = self.instances.get(name)
        return "is gone" if found is None else f"is {found.state} with version {found.active_version}"


class Watch:
    """Use as a context. `late`: by how much a phase of each swap exceeded its time, at worst, seconds; 0: none did."""

    def __init__(self, store: str, model: str) -> None:
        self.now = Snapshot()
        self.past: dict[str, PastSwapRecord] = {}
        self.late: dict[str, float] = {}
        self._url, self._keys = store, Keys(model)
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ends.set()
        self._thread.join()

    def whole_swaps(self, participants: int, since: float) -> int:
        """Swaps done by so many instances, all of which follow, that were opened after the time `since` (unix)."""
        return sum(
            past.outcome == "done" and past.opened_at > since and _followed(past) >= participants
            for past in list(self.past.values())
        )

    def _run(self) -> None:
        store, read_at = None, 0.0
        while not self._ends.wait(EVERY_S):
            try:
                store = store or SyncStore(self._url, create=False)
                self._look(store)
                if time.monotonic() - read_at > HISTORY_EVERY_S:
                    self._read_history(store)
                    read_at = time.monotonic()
            except (StoreError, RecordError):
                continue  # the fleet is not whole while it cannot be read
        if store is not None:
            store.close()

    def _look(self, store: SyncStore) -> None:
        keys, at = self._keys, time.monotonic()
        found = {kv.key: kv.value for kv in store.list(keys.root)[0]}
        instances = [InstanceRecord.from_json(v) for k, v in found.items() if k.startswith(keys.instances)]
        active = ActiveRecord.from_json(found[keys.active]) if keys.active in found else None
        swap = SwapRecord.from_json(found[keys.swap]) if keys.swap in found else None
        self.now = Snapshot(at, active, swap, {record.id: record for record in instances})
        if swap is not None and in_flight(swap):
            self.late[swap.id] = max(self.late.get(swap.id, 0.0), time.time() - must_end(swap, active))

    def _read_history(self, store: SyncStore) -> None:
        for kv in store.list(self._keys.history)[0]:
            record = PastSwapRecord.from_json(kv.value)
            self.past[record.id] = record


def must_end(swap: SwapRecord, active: ActiveRecord | None) -> float:
    """When a swap in flight must have ended, or left its phase, unix seconds."""
    if swap.phase == "commit" and active is not None and active.swap_id == swap.id:
        return active.committed_at + confirm_within_s(swap)
    return swap.deadline


def _followed(past: PastSwapRecord) -> int:
    return sum(flip.version == past.version for flip in past.flips)
