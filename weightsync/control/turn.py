"""When an instance's turn comes in a rolling swap: it follows one record of those before it, not all of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Mapping, Sequence

from weightsync.control.records import ActiveRecord, InstanceRecord, Keys, SwapRecord
from weightsync.control.state import PARTICIPATING, in_flight
from weightsync.errors import RecordError
from weightsync.store.protocol import KeyValue, Store


class Turn:
    """Looks at the nearest instance before this one until that has flipped or has given up, and then at all.

    An instance further ahead may still be under way: one that was lost and came back does not wait for a turn. The
    fleet is read once or twice for each instance and swap, as the turns come, and not at all in other swaps.
    """

    def __init__(self, store: Store, keys: Keys) -> None:
        self._store, self._keys = store, keys
        self._of: tuple[int, tuple[str, ...]] | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def waiting(self) -> list[asyncio.Task[None]]:
        """What has to be waited for before `ahead` says something else than it said last."""
        return [self._task] if self._task is not None else []

    def ahead(self, name: str, active: ActiveRecord | None, swap: SwapRecord | None) -> Mapping[str, InstanceRecord]:
        """Whom that instance waits for: the nearest before it, taken for staged until all have passed, or nobody.

        Raises StoreError.
        """
        committed = active is not None and swap is not None and swap.id == active.swap_id and in_flight(swap)
        rolling = committed and swap is not None and swap.mode == "rolling" and not swap.changes
        if active is None or swap is None or not rolling or name not in swap.participants:
            self.end()
            return {}
        before = swap.participants[: swap.participants.index(name)]
        if (active.epoch, before) != self._of:
            self.end()
            self._of = active.epoch, before
            self._task = (
                asyncio.create_task(self._passed(before, active.epoch), name=f"turn {name}") if before else None
            )
        if self._task is None:
            return {}
        if self._task.done():
            passed, self._task = self._task, None
            passed.result()
            return {}
        return {before[-1]: InstanceRecord(before[-1], "", "STAGED")}

    def end(self) -> None:
        """Wait for nobody."""
        if self._task is not None:
            self._task.cancel()
        self._task = self._of = None

    async def _passed(self, before: Sequence[str], epoch: int) -> None:
        """Return when each has flipped for the commit of that epoch, or has given up."""
        pending = before[-1:]
        while pending:
            await self._passes(self._keys.instance(pending[-1]), epoch)
            found, _ = await self._store.list(self._keys.instances)
            pending = list(self._pending(found, before, epoch))

    async def _passes(self, key: str, epoch: int) -> None:
        """Return when the instance of that record has."""
        kv = await self._store.get(key)
        if kv is None or not _under_way(kv, epoch):
            return
        async with contextlib.aclosing(self._store.watch(key, kv.mod_revision + 1)) as events:
            async for event in events:
                if event.kv.key == key and (event.kind == "delete" or not _under_way(event.kv, epoch)):
                    return

    def _pending(self, found: Iterable[KeyValue], before: Sequence[str], epoch: int) -> Iterable[str]:
        records = {kv.key: kv for kv in found}
        for name in before:
            kv = records.get(self._keys.instance(name))
            if kv is not None and _under_way(kv, epoch):
                yield name


def _under_way(kv: KeyValue, epoch: int) -> bool:
    """Whether it has yet to flip. A record that cannot be read is as good as none."""
    try:
        record = InstanceRecord.from_json(kv.value)
    except RecordError:
        return False
    return record.active_epoch < epoch and record.state in PARTICIPATING
