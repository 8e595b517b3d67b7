"""The gateway's view of the fleet: instances, the commit record and swaps, as the store's watch tells them.

The store is only ever read here. When it cannot be reached the last view stays in use and is refreshed as soon as it
answers again; requests never wait for it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Sequence
from urllib.parse import urlsplit

from server.errors import HttpError, Unavailable
from server.gateway.config import UpstreamSettings
from server.gateway.fleet import routing
from server.gateway.fleet.signals import Signals
from server.gateway.observe.stats import Stats
from server.gateway.proxy.terms import Need
from server.gateway.proxy.upstream import Pool
from server.gateway.proxy.waiting import Patience, WaitingRoom
from weightsync.errors import RecordError, StoreError
from weightsync.records import ActiveRecord, InstanceRecord, Keys, SwapRecord
from weightsync.store import KeyValue, Store

log = logging.getLogger("hotswap.gateway")

RETRY_STORE_S = 0.5
REMEMBERED_S = 60.0  # an instance that has gone is expected back for so long


class Instance:
    """One instance as this gateway sees it: its record, its connections and the work it has from here."""

    def __init__(self, record: InstanceRecord, settings: UpstreamSettings) -> None:
        self.id = record.id
        self.record = record
        self.pool = _pool(record, settings)
        self.signals: Signals | None = None  # the last scrape, None when it failed
        self.inflight = 0
        self.connect_errors = 0
        self.refusals = 0  # requests it refused for the version it runs
        self.failed_at = 0.0
        self.picked_at = 0

    @property
    def state(self) -> str:
        return self.record.state

    @property
    def reported(self) -> float:
        return self.signals.load if self.signals is not None else 0.0


class Fleet:
    """Instances of one model. `run` keeps the view; everything else is plain look-up."""

    def __init__(self, store: Store, model: str, settings: UpstreamSettings, stats: Stats) -> None:
        self.model = model
        self.instances: dict[str, Instance] = {}
        self.active: ActiveRecord | None = None
        self.swap: SwapRecord | None = None
        self.serving: list[Instance] = []  # those that may be asked; made anew with every change of the view
        self.room = WaitingRoom(settings.max_held)
        self._last_seen = -REMEMBERED_S  # monotonic, of any instance
        self._store = store
        self._keys = Keys(model)
        self._settings = settings
        self._stats = stats
        self._serial = itertools.count(1)

    # choosing

    def pick(self, tried: Sequence[Instance] = (), need: Need | None = None) -> Instance | None:
        """The instance for the next request, none of `tried`, running a version that meets `need`."""
        candidates = [i for i in self.serving if i not in tried] if tried else self.serving
        if need is not None:
            candidates = [i for i in candidates if need.met_by(i.record.active_version)]
        instance = routing.pick(candidates, time.monotonic())
        if instance is not None:
            instance.picked_at = next(self._serial)
        return instance

    def patience(self, need: Need | None, failure: HttpError | None) -> Patience:
        """How long a request waits that nobody takes now. `failure` is what came of asking, if anybody was asked."""
        if need is not None and failure is None and self.serving:
            return Patience("version", need.wait_s, need.unmet(self.active))
        expected = self.instances or time.monotonic() - self._last_seen < REMEMBERED_S
        hold_s = self._settings.hold_s if expected else 0.0
        if need is not None and need.wait_s:
            return Patience("fleet", max(hold_s, need.wait_s), need.unmet(self.active))
        return Patience("fleet", hold_s, failure or self.unavailable())

    def connect_failed(self, instance: Instance) -> None:
        """It refused a connection: ask others first for a moment."""
        instance.connect_errors += 1
        instance.failed_at = time.monotonic()

    def unavailable(self) -> Unavailable:
        """Why no instance can be asked, and what to do."""
        if not self.instances:
            return Unavailable(
                f"No instance of {self.model!r} is registered: start one (`hotswap instance`) or wait for it to load.",
                retry_after_s=5,
            )
        states = ", ".join(f"{i.id} is {i.state}{self._lag(i)}" for i in self.instances.values())
        return Unavailable(f"No instance of {self.model!r} takes requests now ({states}); try again.", retry_after_s=2)

    def is_fresh(self, instance: Instance) -> bool:
        """Whether it runs the weights of the commit record, as far as this gateway knows."""
        return routing.fresh(instance.record, self.active, self.swap)

    # keeping the view

    async def run(self) -> None:
        """Watches the store for ever."""
        while True:
            try:
                await self._follow()
            except StoreError as exc:
                if self._stats.store_up:
                    log.warning("serving from the last view of the fleet: %s", exc)
                self._stats.store_up = False
                await asyncio.sleep(RETRY_STORE_S)

    async def refresh(self) -> int:
        """Reads the whole view; returns its revision. Raises StoreError."""
        items, revision = await self._store.list(self._keys.root)
        present = {kv.key for kv in items}
        for gone in [i for i in self.instances if self._keys.instance(i) not in present]:
            self._remove(gone)
        if self._keys.active not in present:
            self.active = None
        for kv in items:
            self._put(kv)
        self._changed()
        self._stats.store_up = True
        return revision

    def close(self) -> None:
        """Closes every idle connection."""
        for instance_id in list(self.instances):
            self._remove(instance_id)

    async def _follow(self) -> None:
        revision = await self.refresh()
        async for event in self._store.watch(self._keys.root, revision + 1):
            if event.kind == "put":
                self._put(event.kv)
            elif event.kv.key.startswith(self._keys.instances):
                self._remove(event.kv.key.removeprefix(self._keys.instances))
            elif event.kv.key == self._keys.active:
                self.active = None
            self._changed()

    def _changed(self) -> None:
        self.serving = [i for i in self.instances.values() if routing.eligible(i.record, self.active, self.swap)]
        self.room.wake()

    def _lag(self, instance: Instance) -> str:
        return "" if self.is_fresh(instance) else " with other weights than the active version's"

    def _put(self, kv: KeyValue) -> None:
        try:
            if kv.key.startswith(self._keys.instances):
                self._put_instance(InstanceRecord.from_json(kv.value))
            elif kv.key == self._keys.active:
                self.active = ActiveRecord.from_json(kv.value)
            elif kv.key == self._keys.swap:
                self._put_swap(SwapRecord.from_json(kv.value))
        except RecordError as exc:
            log.error("ignoring %s: %s", kv.key, exc)

    def _put_instance(self, record: InstanceRecord) -> None:
        known = self.instances.get(record.id)
        if known is not None and known.record.address == record.address:
            known.record = record
            return
        if known is not None:
            self._remove(record.id)
        self.instances[record.id] = Instance(record, self._settings)

    def _remove(self, instance_id: str) -> None:
        instance = self.instances.pop(instance_id, None)
        if instance is not None:
            self._last_seen = time.monotonic()
            instance.pool.close()

    def _put_swap(self, record: SwapRecord) -> None:
        before, self.swap = self.swap, record
        if record.phase not in ("done", "aborted") or before is None:
            return
        if before.id != record.id or before.phase != record.phase:
            self._stats.swaps[record.phase] += 1
            self._stats.swap_duration.observe(max(0.0, time.time() - record.opened_at))


def _pool(record: InstanceRecord, settings: UpstreamSettings) -> Pool:
    try:
        url = urlsplit(record.address)
        if url.scheme != "http" or url.hostname is None or url.port is None:
            raise ValueError("expected http://HOST:PORT")
    except ValueError as exc:
        raise RecordError("InstanceRecord", f"address {record.address!r}: {exc}") from exc
    return Pool(url.hostname, url.port, settings)
