"""The gateway's view of the fleet: instances, the commit record and swaps, as the store's watch tells them.

The store is only ever read here. When it cannot be reached the last view stays in use and is refreshed as soon as it
answers again; requests never wait for it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from server.errors import BadUpstream, HttpError
from server.gateway.config import UpstreamSettings
from server.gateway.fleet import routing
from server.gateway.fleet.affinity import Hint, Recent, no_hint
from server.gateway.fleet.editions import Editions
from server.gateway.fleet.instance import FAULTS, Instance
from server.gateway.fleet.retries import Patience, RetryBudget, WaitingRoom
from server.gateway.fleet.routing import Need
from server.gateway.fleet.shadow import Shadows
from server.gateway.fleet.splits import Splits
from server.gateway.observe.stats import Stats
from server.gateway.wire.journal import ReplayMemory
from server.orders import DrainRecord, drains
from weightsync.control.editions import prefix_of
from weightsync.control.parts import LORA
from weightsync.control.records import ActiveRecord, DiskRecord, InstanceRecord, Keys, SwapRecord, VersionRecord
from weightsync.errors import RecordError, StoreError, TlsUnavailable
from weightsync.store import KeyValue, Store
from weightsync.tls import ClusterTls

log: Final = logging.getLogger("hotswap.gateway")

RETRY_STORE_S: Final = 0.5
SETTLE_S: Final = 20e-6  # for each instance, before all of them are looked at
SESSIONS: Final = 8192  # remembered, at least
REMEMBERED_S: Final = 60.0  # an instance that has gone is expected back for so long


class Fleet:
    """Instances of one model. `run` keeps the view; everything else is plain look-up."""

    def __init__(
        self, store: Store, model: str, settings: UpstreamSettings, stats: Stats, tls: ClusterTls | None = None
    ) -> None:
        self.model = model
        self.instances: dict[str, Instance] = {}
        self._left: dict[tuple[str, str], Instance] = {}  # by id and address: not in the store, with requests of ours
        self.active: ActiveRecord | None = None
        self.swap: SwapRecord | None = None
        self.drains: dict[str, DrainRecord] = {}  # by instance; an operator wants them to get nothing new
        self.disks: dict[str, DiskRecord] = {}  # what hosts have on disk, by host
        self.adapters: frozenset[str] = frozenset()  # names that instances answer to beside the model's
        self._adapters: dict[str, frozenset[str]] = {}  # by key of a version
        self.editions = Editions()  # of adapters
        self.serving: list[Instance] = []  # those that may be asked; made anew with every change of the view
        self.watched: list[Instance] = []  # the same, and those an operator has drained
        self.unwell: list[Instance] = []  # of those that serve, who are ejected or do not answer probes
        self.budget = RetryBudget(settings.retry_share)
        self.replay = ReplayMemory(settings.failover.max_bytes, settings.failover.max_stream_bytes)
        self.retries = Counter(dict.fromkeys(("not_sent", "lost"), 0))  # requests sent on to another instance, by why
        self.picks = Counter(dict.fromkeys(("only", "load", "prefix", "session"), 0))  # what decided
        self.prompt_bytes = self.cached_bytes = 0  # of prompts that had a choice; and of these, likely cached there
        self.splits = Splits()
        self.shadows = Shadows(self)
        self.room = WaitingRoom(settings.max_held)
        self.on_change: Callable[[], None] = lambda: None  # called after every change, when those held have tried again
        self._changing = False  # `_work_out` is about to be called
        self._last_seen = -REMEMBERED_S  # monotonic, of any instance
        self._store = store
        self._keys = Keys(model)
        self._drains = drains(self._keys)
        self._editions = prefix_of(self._keys)
        self.settings = settings
        self._tls = tls
        self._stats = stats
        self._serial = itertools.count(1)
        self._policy = routing.find(settings.routing)
        self._sessions: Recent[str] = Recent(SESSIONS)  # who answered a session last

    # choosing

    def pick(
        self, tried: Sequence[Instance] = (), need: Need | None = None, hint: Callable[[], Hint] = no_hint
    ) -> Instance | None:
        """The instance for the next request, none of `tried`, running a version that meets `need`.

        `hint` is only called when there is a choice.
        """
        candidates, now = self.serving, time.monotonic()
        if need is not None:
            candidates = [i for i in candidates if need.met_by(i.record.active_version)]
        if self.unwell:
            well = [i for i in candidates if i.health.admits(now)]
            candidates = well or candidates  # better one that may fail than none
        if tried:
            candidates = [i for i in candidates if i not in tried]
        if len(candidates) < 2:
            return self._picked(candidates[0], now, "only") if candidates else None
        candidates = [i for i in candidates if i.working < i.window.limit] or candidates  # no cache is worth a queue
        return self._choose(candidates, now, hint())

    def has_other(self, tried: Sequence[Instance], need: Need | None) -> bool:
        """Whether somebody who was not tried may be asked now."""
        now = time.monotonic()
        meets = [i for i in self.serving if need is None or need.met_by(i.record.active_version)]
        return any(i not in tried and i.health.admits(now) for i in meets)

    def _choose(self, candidates: list[Instance], now: float, hint: Hint) -> Instance:
        if hint.session:
            hint.home = self._sessions.get(hint.session) or ""
        instance = routing.pick(candidates, now, hint, self._policy)
        assert instance is not None
        cached = instance.prefixes.share(hint)
        why = "session" if instance.id == hint.home else "prefix" if cached else "load"
        self.prompt_bytes += hint.size
        self.cached_bytes += int(cached * hint.size)
        if hint.session:
            self._sessions.put(hint.session, instance.id)
        instance.prefixes.add(hint)
        return self._picked(instance, now, why)

    def _picked(self, instance: Instance, now: float, why: str) -> Instance:
        self.picks[why] += 1
        instance.picked_at = next(self._serial)
        instance.health.asked(now)
        return instance

    def patience(self, need: Need | None, failure: HttpError | None) -> Patience:
        """How long a request waits that nobody takes now. `failure` is what came of asking, if anybody was asked."""
        if isinstance(failure, BadUpstream):
            return Patience("fleet", 0.0, failure)  # it was sent and lost, and may be lost again
        if need is not None and failure is None and self.serving:
            return Patience("version", need.wait_s, need.unmet(self.active))
        expected = self.instances or time.monotonic() - self._last_seen < REMEMBERED_S
        hold_s = self.settings.hold_s if expected else 0.0
        if need is not None and need.wait_s:
            return Patience("fleet", max(hold_s, need.wait_s), need.unmet(self.active))
        return Patience("fleet", hold_s, failure or self.unavailable())

    # what came of it

    def connect_failed(self, instance: Instance) -> None:
        """It refused a connection: ask others first for a moment."""
        instance.connect_errors += 1
        instance.failed_at = time.monotonic()
        self.failed(instance)

    def answered(self, instance: Instance, status: int) -> None:
        """The head of its answer has come, and it is no refusal."""
        if status in FAULTS:
            self.failed(instance)
        elif instance.health.success(time.monotonic()):
            log.info("instance %s answers again", instance.id)
            self._judge()
            self.on_change()

    def failed(self, instance: Instance) -> None:
        """It refused or broke a connection, answered with a fault of its own, or was silent for too long."""
        now = time.monotonic()
        if instance.health.failure(now) and self._may_eject(instance):
            seconds = instance.health.eject(now)
            log.warning("instance %s fails: it gets no requests for %g s", instance.id, seconds)
            self._judge()

    def probed(self, instance: Instance, *, well: bool) -> None:
        """It has answered its health check, or has not."""
        before = instance.health.answering
        instance.health.probed(well=well)
        if instance.health.answering != before:
            log.warning("instance %s %s its health checks", instance.id, "answers" if well else "does not answer")
            self._judge()
            self.on_change()

    def _may_eject(self, instance: Instance) -> bool:
        """Not the last one that is well, and not more than the share; who is out already may stay out."""
        if not instance.health.closed:
            return True
        others = [i for i in self.serving if i is not instance]
        out = sum(not i.health.closed for i in others)
        most = max(1, int(self.settings.health.max_ejected * len(self.serving)))
        return out < most and any(i.health.well for i in others)

    def _judge(self) -> None:
        self.unwell = [i for i in self.serving if not i.health.well]
        self.splits.follow(self.active, self.serving)
        self.shadows.follow(self.active)

    def unavailable(self) -> HttpError:
        """Why no instance can be asked, and what to do."""
        if not self.instances and (ago := time.monotonic() - self._last_seen) < REMEMBERED_S:
            return HttpError(
                503,
                f"No instance of {self.model!r} is registered: the last one left {ago:.0f} s ago, to start again or "
                "because it cannot reach the store. Try again; if it stays away, see its log.",
                retry_after_s=2,
            )
        if not self.instances:
            return HttpError(
                503,
                f"No instance of {self.model!r} is registered: start one (`hotswap instance`) or wait for it to load.",
                retry_after_s=5,
            )
        states = ", ".join(f"{i.id} is {self._word(i)}{self._lag(i)}" for i in self.instances.values())
        return HttpError(
            503, f"No instance of {self.model!r} takes requests now ({states}); try again.", retry_after_s=2
        )

    def is_fresh(self, instance: Instance) -> bool:
        """Whether it runs the weights of the commit record, as far as this gateway knows."""
        return routing.fresh(instance.record, self.active, self.swap)

    def is_draining(self, instance: Instance) -> bool:
        """Whether it was asked to take no new requests, by itself or by an operator."""
        drain = self.drains.get(instance.id)
        return instance.state == "DRAINING" or (drain is not None and drain.meant_for(instance.record))

    # keeping the view

    def keep(self, instance: Instance) -> None:
        """It is the only one, for good: a view that no store keeps."""
        self.instances = {instance.id: instance}
        self.watched = self.serving = [instance]

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
        self.drains = {i: record for i, record in self.drains.items() if self._drains + i in present}
        self._adapters = {key: names for key, names in self._adapters.items() if key in present}
        self.editions.keep(present)
        if self._keys.active not in present:
            self.active = None
        for kv in items:
            self._put(kv)
        self._changed()
        self._stats.store_up = True
        return revision

    def close(self) -> None:
        """Closes every idle connection."""
        self.shadows.close()
        for instance_id in list(self.instances):
            self._remove(instance_id)

    async def _follow(self) -> None:
        revision = await self.refresh()
        async for event in self._store.watch(self._keys.root, revision + 1):
            if event.kind == "put":
                self._put(event.kv)
            elif event.kv.key.startswith(self._keys.instances):
                self._remove(event.kv.key.removeprefix(self._keys.instances))
            elif event.kv.key.startswith(self._drains):
                self.drains.pop(event.kv.key.removeprefix(self._drains), None)
            elif event.kv.key == self._keys.active:
                self.active = None
            elif event.kv.key in self._adapters:
                del self._adapters[event.kv.key]
            else:
                self.editions.drop(event.kv.key)
            self._changes()

    def _changes(self) -> None:
        """A swap writes a record of each instance at once: what follows is worked out once for all that come while it
        would take many times as long (20 us an instance: 20 ms with a thousand)."""
        if not self._changing:
            self._changing = True
            asyncio.get_running_loop().call_later(len(self.instances) * SETTLE_S, self._work_out)

    def _work_out(self) -> None:
        self._changing = False
        try:
            self._changed()
        except Exception:  # nobody else would try again before the next change
            log.exception("the view of the fleet could not be worked out; it is tried again in %g s", RETRY_STORE_S)
            asyncio.get_running_loop().call_later(RETRY_STORE_S, self._changes)

    def _changed(self) -> None:
        able = (i for i in self.instances.values() if routing.eligible(i.record, self.active, self.swap))
        self.watched = list(able)
        self.serving = [i for i in self.watched if not self.is_draining(i)]
        self._judge()
        self.adapters = frozenset([name for names in self._adapters.values() for name in names])
        self.room.wake()
        self.on_change()

    def _word(self, instance: Instance) -> str:
        return "DRAINING" if self.is_draining(instance) else instance.state

    def _lag(self, instance: Instance) -> str:
        return "" if self.is_fresh(instance) else " with other weights than the active version's"

    def _put(self, kv: KeyValue) -> None:
        try:
            if kv.key.startswith(self._keys.instances):
                self._put_instance(InstanceRecord.from_json(kv.value))
            elif kv.key.startswith(self._drains):
                self.drains[kv.key.removeprefix(self._drains)] = DrainRecord.from_json(kv.value)
            elif kv.key.startswith(self._keys.disks):
                self.disks[kv.key.removeprefix(self._keys.disks)] = DiskRecord.from_json(kv.value)
            elif kv.key.startswith(self._keys.versions):
                parts = VersionRecord.from_json(kv.value).parts
                self._adapters[kv.key] = frozenset(
                    [p.name.removeprefix(LORA) for p in parts if p.name.startswith(LORA)]
                )
            elif kv.key.startswith(self._editions):
                self.editions.put(kv.key, kv.value)
            elif kv.key == self._keys.active:
                self.active = ActiveRecord.from_json(kv.value)
            elif kv.key == self._keys.swap:
                self._put_swap(SwapRecord.from_json(kv.value))
        except (RecordError, TlsUnavailable) as exc:
            log.error("ignoring %s: %s", kv.key, exc)

    def _put_instance(self, record: InstanceRecord) -> None:
        known = self.instances.get(record.id)
        if known is not None and known.record.address != record.address:
            self._remove(record.id)
            known = None
        if known is None and (known := self._left.pop((record.id, record.address), None)) is not None:
            known.returned()  # its lease had ended, as in an outage of the store; what it had, it has
            self.instances[record.id] = known
        if known is None:
            self.instances[record.id] = Instance(record, self.settings, self._tls)
            return
        self._stats.swaps.instance(known.record, record)
        known.renewed(record)

    def _remove(self, instance_id: str) -> None:
        instance = self.instances.pop(instance_id, None)
        if instance is None:
            return
        self._last_seen = time.monotonic()
        instance.left(self._last_seen)
        self._left = {key: each for key, each in self._left.items() if each.inflight}
        if instance.inflight:
            self._left[instance.id, instance.record.address] = instance

    def _put_swap(self, record: SwapRecord) -> None:
        before, self.swap = self.swap, record
        self._stats.swaps.swap(before, record)
