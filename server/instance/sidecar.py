"""The instance's part in swap transactions: stage when a swap opens, flip when it commits, say so in the store."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import orjson
from prometheus_client import Counter, Gauge

from server.instance.editions import Editions
from server.instance.hosts import Saying, located
from server.instance.middleware import Admission
from server.orders import SleepOrder, ordered, stay_asleep
from weightsync.control.agent import Participant
from weightsync.control.agent_state import same
from weightsync.control.hosts import this_host
from weightsync.control.records import ActiveRecord, InstanceRecord, Keys, VersionRecord
from weightsync.control.swap import CommitResult, StageResult
from weightsync.errors import CheckpointError, EngineError, StoreError, StoreUnavailable, WeightSyncError
from weightsync.memory.receiver import SlotReader
from weightsync.publish.checkpoint import Checkpoint, read_config
from weightsync.signing import Trust
from weightsync.store import Store, open_store

from .config import InstanceConfig
from .engine import Engine
from .forms import check_own, tell_own
from .rest import sleeper

log = logging.getLogger("hotswap.instance")

ACTIVE_VERSION = Gauge("hotswap_instance_active_version", "Weight version this instance runs")
SWAPS = Counter("hotswap_instance_swaps", "Commits this instance flipped to")
STAGE_SECONDS = Gauge("hotswap_instance_stage_seconds", "Duration of the last staging")
COMMIT_SECONDS = Gauge("hotswap_instance_commit_seconds", "Duration of the last flip, between two batches")
DEVICE_COPIES = Gauge("hotswap_instance_device_copies", "Versions that have room on each GPU of this instance")
LONG_FLIP_MS = 50.0  # about a step: what is longer is said before the commit
NOT_AS_PUBLISHED = {"digest_mismatch", "checksum_mismatch", "parts_mismatch"}
POLL_S = 0.05
TELL_S = 2.0  # to write to the store that it drains
TORN_LINGER_S = 1.0


class Sidecar:
    """Connects one engine to the swap transactions of its model."""

    def __init__(
        self,
        config: InstanceConfig,
        engine: Engine,
        admission: Admission,
        address: str,
        tether: Mapping[str, object] | None = None,
        warm_up: Callable[[], Awaitable[None]] | None = None,
        editions: Editions | None = None,
    ) -> None:
        """`tether`: what workers on other hosts connect to (tether.py), {} where there are none. `warm_up`: what the
        engine does beside its first staging, and ends before it serves."""
        self._config, self._engine, self._admission = config, engine, admission
        self._tether = dict(tether or {})
        self._warm_up, self._editions = warm_up, editions
        self._warm: asyncio.Task[None] | None = None
        self._trust = Trust(config.trust)
        self._keys, self._host = Keys(config.model), this_host()
        self._participant: Participant | None = None
        self._saying = Saying(self._keys, config.instance_id)
        self._asks = False  # whether it is to say what it needs when it has seen a version
        self._suspect: int | None = None  # the version built last, or one that was not as published
        self.starts_over = False  # whether the process is to begin anew: to sleep, or with an engine of another form
        self.end: Callable[[], None] = lambda: None  # ends the server
        self._record = InstanceRecord(
            id=config.instance_id,
            address=address,
            pid=os.getpid(),
            model_dir=str(config.model_dir),
            key=admission.key,
            form=config.form.digest,
            restarts=not config.spans_hosts,
            swap_id=config.form.swap_id,
        )

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Take part while the context is open; leave the fleet before it closes."""
        tensors = self._config.form.tensors
        schema = orjson.loads(tensors) if tensors else reference_schema(self._config.model_dir)
        await self._engine.prepare(
            schema,
            self._tether,
            allow_non_finite=self._config.allow_non_finite,
            staging=self._config.staging,
        )
        await self._say_needs(schema)
        store = open_store(self._config.store)
        record = replace(self._record, max_num_seqs=self._engine.max_num_seqs, devices=self._engine.devices)
        self._participant = self._new_participant(store, record)
        self._admission.admits = lambda: self._participant is not None and self._participant.admits
        vital = (partial(self._live, store), self._end_with_engine)
        if self._warm_up is not None:
            self._warm = asyncio.create_task(self._vital(self._warm_up))
        tasks = [asyncio.create_task(self._vital(work)) for work in vital]
        if self._editions is not None:
            tasks.append(asyncio.create_task(self._vital(partial(self._editions.follow, store))))
        if self._host:
            tasks.append(asyncio.create_task(self._vital(partial(self._saying.run, store))))
        try:
            yield
        finally:
            tasks += [self._warm] if self._warm is not None else []
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            with contextlib.suppress(StoreUnavailable):
                await self._participant.stop()
            await store.close()

    async def _vital(self, work: Callable[[], Awaitable[None]]) -> None:
        """Runs a task without which this instance would answer on, and take part in no swap: a fault in it ends all."""
        try:
            await work()
        except Exception:
            log.exception("this instance cannot take part any more; it ends, to be started anew")
            os.kill(os.getpid(), signal.SIGTERM)

    async def leave(self) -> bool:
        """On SIGTERM: no new requests, and the fleet is told; returns when those in flight have ended, after `drain_s`
        at other instances. False, and at once, when they cannot end: the engine is dead, or what it runs is unknown."""
        participant = self._participant
        if participant is None or self._engine.dead or participant.record.state == "TORN":
            return False
        await self._empty(participant, self._config.drain_s)
        return True

    async def _empty(self, participant: Participant, drain_s: float) -> None:
        """Take nothing new, let requests end in the time they are given, and hand on what is left then."""
        began = time.monotonic()
        with contextlib.suppress(StoreError, TimeoutError):  # then they are refused here, and the gateway asks others
            async with asyncio.timeout(TELL_S):
                await participant.drain(time.time() + drain_s)
        await self._admission.idle(began + drain_s - time.monotonic())
        if moved := await self._admission.hand_on():
            log.warning("%d requests had not ended after %g s, and go on at other instances", moved, drain_s)

    async def _live(self, store: Store) -> None:
        """Take part in swaps until ordered to sleep; sleep, then take part again, or leave it to the next process."""
        keys = Keys(self._config.model)
        while True:
            assert self._participant is not None
            joining = asyncio.create_task(self._vital(partial(self._join, store, self._participant)))
            try:
                order = await ordered(store, keys, self._config.instance_id)
            finally:
                joining.cancel()
                await asyncio.gather(joining, return_exceptions=True)
            await self._withdraw(self._participant, order)
            if order.level == 2 or not self._engine.sleeps_in_place:
                self._start_over()
                return
            await self._engine.sleep()
            await stay_asleep(store, keys, sleeper(self._config, order, in_place=True))
            await self._engine.wake()
            # It runs what it slept with, and is asked for nothing before it runs what is active now.
            record = self._participant.record
            awake = replace(record, state="STARTING", staged_version=None, swap_id=None, error=None, leaves_at=None)
            self._participant = self._new_participant(store, awake)

    def _start_over(self) -> None:
        """End in order, and begin anew (main.py)."""
        self.starts_over = True
        self.end()

    async def _withdraw(self, participant: Participant, order: SleepOrder) -> None:
        """Out of routing, let requests end in the time they are given, and out of the fleet."""
        log.info("going to sleep, level %d, as ordered by %s", order.level, order.requested_by)
        await self._empty(participant, order.drain_s)
        with contextlib.suppress(StoreError):
            await participant.stop()

    def _new_participant(self, store: Store, record: InstanceRecord) -> Participant:
        return Participant(
            store,
            self._config.model,
            record,
            partial(self._stage, store),
            self._commit,
            drop=self._drop,
            drain=self._admission.idle,
            restart=self._start_over,
            pause=self._engine.pause,
            resume=self._engine.resume,
            guard_url=self._config.store,
        )

    async def _join(self, store: Store, participant: Participant) -> None:
        """Wait for a first version, then take part: until one is loaded, this instance runs dummy weights."""
        while not await _has_told(store, self._config):  # noqa: ASYNC110 - outlives outages of the store
            await asyncio.sleep(POLL_S)
        while not await _has_active(store, self._config.model):  # noqa: ASYNC110 - as above
            await asyncio.sleep(POLL_S)
        participant.start()
        await participant.ended()

    async def _end_with_engine(self) -> None:
        """An instance without its engine must leave the fleet at once, to be started anew."""
        await self._engine.died()
        log.error("the engine has ended; this instance ends too")
        os.kill(os.getpid(), signal.SIGTERM)

    async def _say_needs(self, schema: list[list[object]]) -> None:
        """Have the peers fetch what is read on their hosts, if ranks are on several; signatures are of all bytes."""
        spans = len(set(self._engine.hosts)) > 1
        self._asks = spans and not schema  # until a version has shown the tensors
        reads = None
        if spans and schema:
            try:
                reads = await self._engine.reads(schema)
            except EngineError as error:
                if error.code == "engine_died":
                    raise
                log.warning("this instance needs whole versions: %s", error)
        self._saying.say((self._host, *self._engine.hosts), reads, self._host if self._config.trust else None)

    async def _stage(self, store: Store, version: VersionRecord) -> StageResult:
        await check_own(self._config, store, version)
        timeout_s = self._config.stage_timeout_s
        hosts, slices = {self._host, *self._engine.hosts}, self._saying.digests
        places = await located(store, self._keys, version, hosts, timeout_s, slices)
        config = self._config.form.config or read_config(self._config.model_dir)
        await asyncio.to_thread(self._trust.check, self._config.model, places[self._host], config)
        try:
            report = await self._engine.stage(places[self._host], timeout_s, places, self._saying.unread)
        except WeightSyncError as error:
            if slices and error.code in NOT_AS_PUBLISHED:  # the next attempt has all bytes, whatever was wrong
                log.warning("this instance needs whole versions from now on: %s", error)
                self._saying.say(tuple(hosts), None)
            raise
        if self._asks:
            await self._say_needs(await asyncio.to_thread(_schema_in, places[self._host].slot))
        STAGE_SECONDS.set(report["stage_ms"] / 1e3)
        fingerprint = report.get("fingerprint") or None
        if report["path"] != "retained" or not same(fingerprint, version.fingerprint):
            self._suspect = version.version
        path = None if report["path"] == "retained" else report["path"]  # as it was when it was built
        expected = report.get("expected_flip_ms")
        if expected is not None and expected > LONG_FLIP_MS:
            log.warning("the commit of version %d will stall decoding for about %.0f ms", version.version, expected)
        if self._warm is not None:
            await asyncio.shield(self._warm)
        if (copies := report.get("copies")) is not None:
            DEVICE_COPIES.set(copies)
        return StageResult(
            fingerprint,
            report["staging_gbps"],  # 0 for what was held already
            path,
            built=report.get("built", ""),
            expected_flip_ms=expected,
            device_copies=copies,
            step_loss=report.get("step_loss"),
        )

    async def _drop(self, version: VersionRecord) -> None:
        """Drops the bytes that an aborted swap had staged, so that they are not taken for that version again.

        A version that was held before the swap, and is as published, stays: a rollback to it is a flip.
        """
        await self._engine.drop(version.version, previous=version.version == self._suspect)

    async def _commit(self, active: ActiveRecord, _version: VersionRecord) -> CommitResult:
        withdrawn = self._participant is not None and self._participant.withdraws
        try:
            times = await self._engine.commit(active.version, active.epoch, withdrawn)
        except Exception:
            # Torn: what runs now is unknown. The record says so first; then this process ends, to be started anew.
            asyncio.get_running_loop().call_later(TORN_LINGER_S, os.kill, os.getpid(), signal.SIGTERM)
            raise
        ACTIVE_VERSION.set(active.version)
        COMMIT_SECONDS.set(times["commit_ms"] / 1e3)
        SWAPS.inc()
        return CommitResult(times["commit_ms"])


async def _has_told(store: Store, config: InstanceConfig) -> bool:
    with contextlib.suppress(StoreError):
        await tell_own(config, store)
        return True
    return False


async def _has_active(store: Store, model: str) -> bool:
    try:
        return await store.get(Keys(model).active) is not None
    except StoreError:
        return False


def _schema_in(slot: str) -> list[list[object]]:
    """As `reference_schema`, of a published slot."""
    with SlotReader.open(slot, populate=False, part=True) as reader:
        return [[name, spec.dtype, list(spec.shape)] for name, spec in reader.manifest.schema.tensors.items()]


def reference_schema(model_dir: Path) -> list[list[object]]:
    """[name, dtype, shape] of every tensor in the model's checkpoint; empty if the directory holds no weights."""
    try:
        checkpoint = Checkpoint(model_dir)
    except CheckpointError:
        return []
    return [[name, spec.dtype, list(spec.shape)] for name, spec in checkpoint.schema.tensors.items()]
