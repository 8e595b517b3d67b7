"""Releases of one gateway process: it follows the one under way, counts for it, and carries it on where it leads.

Every gateway follows the record in the store. The one whose coordinator leads takes the steps that `progress.advance`
chooses. It writes each of them by compare-and-swap, so that of two who take themselves for the leader one goes on; what
a leader that died had begun is seen in the record and in the commit record, and is done again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

from server.errors import ConfigError, HttpError, ServerError
from server.gateway.access.records import By
from server.gateway.config import NamedSettings
from server.gateway.release.answers import AnswerReader
from server.gateway.release.evidence import FLUSH_S, Observer, Watched, summed
from server.gateway.release.judge import Evidence, Finding, judged
from server.gateway.release.policy import Policy, parse, seconds_of
from server.gateway.release.progress import (
    Commit,
    Evaluate,
    Share,
    Split,
    Wait,
    World,
    Write,
    advance,
    failed,
    turned,
)
from server.gateway.release.records import EvidenceRecord, ReleaseKeys, ReleaseRecord
from server.gateway.release.scoring import Evaluator, RewardClient
from weightsync.control import placement
from weightsync.control.chain import LedgerEntry, append
from weightsync.control.coordinator import Coordinator
from weightsync.control.records import ActiveRecord, InstanceRecord, Keys, SwapRecord, VersionRecord
from weightsync.control.state import PARTICIPATING, in_flight
from weightsync.control.swap import Approval
from weightsync.errors import Conflict as StoreConflict
from weightsync.errors import RecordError, StoreError, WeightSyncError, not_enough_instances, swap_aborted
from weightsync.store import MISSING, KeyValue, Store
from weightsync.tls import ClusterTls

log: Final = logging.getLogger("hotswap.gateway")

RETRY_S: Final = 1.0
AGAIN_S: Final = 2.0  # between two attempts to bring the stable version back
WATCHED: Final = ("judging", "held")


class Releases:
    """The releases of one model. `current` is the one under way, or the last one."""

    def __init__(
        self,
        store: Store,
        model: str,
        control: FleetControl,
        observer: Observer,
        leads: Callable[[], bool],
        reader: AnswerReader | None = None,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`tell` is told of each state that it comes to."""
        self._store, self._keys, self._control, self._observer = store, ReleaseKeys(model), control, observer
        self._leads, self._reader, self._tell = leads, reader, tell
        self._me = secrets.token_hex(6)
        self._revision = MISSING
        self._changed, self._changed_too = asyncio.Event(), asyncio.Event()  # for who leads, and for who reads
        self._evaluated: tuple[str, str] | None = None  # (release, what it came to)
        self.current: ReleaseRecord | None = None

    # what operators ask for

    async def start(self, version: int, text: str, by: By, approval: Approval | None = None) -> ReleaseRecord:
        """Begins a release by the policy in `text`; what waited for `approval` waits no more. Raises ConfigError, and
        as `check` (a conflict of the store when `approval` fell)."""
        stable = await self.check(version, parse(text))
        before, now, name = self.current, time.time(), uuid.uuid4().hex
        record = ReleaseRecord(name, version, stable, text, "evaluating", 0, now, now, by.who)
        await self._forget_evidence()
        begun = LedgerEntry("release", by.who, version=version, reason=by.reason, **self._about(record))
        if not await self._write(before, record, begun, approval=approval):
            raise HttpError(409, "Somebody else has begun a release in this moment.", code="release_under_way")
        return record

    async def check(self, version: int, policy: Policy) -> int:
        """Whether it could be released now by this policy; the version it would take over from. Raises HttpError
        (404, 409), SwapError, StoreError."""
        stable, shares = await self._control.serving()
        if stable is None or shares is None or shares:
            what = "a swap is under way" if shares is None else "versions share the traffic" if shares else "none is"
            message = f"A release begins where one version is active and serves all; {what}."
            raise HttpError(409, message, code="not_whole")
        if version == stable:
            raise HttpError(409, f"Version {version} is active already.", code="already_active")
        if not await self._control.ready(version):
            raise HttpError(404, f"There is no version {version} that is ready.", code="unknown_version")
        await self._refresh()
        if self.current is not None and not self.current.ended:
            under_way = f"The release of version {self.current.version} is under way ({self.current.state})"
            raise HttpError(409, f"{under_way}; cancel it first.", code="release_under_way")
        if (have := await self._control.instances()) < 2 * policy.minimum:
            raise not_enough_instances(2, policy.minimum, have)
        return stable

    async def cancel(self, by: By) -> ReleaseRecord:
        """Takes the candidate back. Raises HttpError (409) where no release is under way, StoreError."""
        while True:
            await self._refresh()
            record = self.current
            if record is None or record.ended:
                raise HttpError(409, "No release is under way.", code="no_release")
            why = f"cancelled by {by.who}" + (f": {by.reason}" if by.reason else "")
            after = turned(record, "rolling_back", time.time(), why)
            if record.state == "rolling_back" or await self._write(record, after):
                return self.current or record

    async def put_policy(self, name: str, text: str | None, by: By) -> None:
        """Stores a policy, or deletes it. Raises StoreError."""
        what = "was stored" if text is not None else "was deleted"
        about: dict[str, Any] = {"model": self._keys.model, "subject": f"policy {name}", "outcome": what}
        entry = LedgerEntry("release_policy", by.who, reason=by.reason, **about)
        await append(self._store, {}, {self._keys.policy(name): text.encode() if text is not None else None}, entry)

    async def findings(self) -> tuple[Finding, ...]:
        """The states of the conditions of the step that is judged now. Raises StoreError."""
        record = self.current
        if record is None or record.state not in WATCHED:
            return ()
        policy = parse(record.policy)
        evidence = await self._evidence(record, policy)
        return judged(policy, record.step, evidence)

    # what goes on by itself

    async def run(self) -> None:
        """Follows, counts and leads for ever."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow())
            tasks.create_task(self._flush())
            tasks.create_task(self._lead())
            tasks.create_task(self._read())

    async def _follow(self) -> None:
        while True:
            try:
                revision = await self._refresh()
                async with contextlib.aclosing(self._store.watch(self._keys.current, revision + 1)) as events:
                    async for event in events:
                        self._see(event.kv if event.kind == "put" else None)
            except StoreError as error:
                log.debug("no news of releases until the store answers: %s", error)
                await asyncio.sleep(RETRY_S)

    async def _refresh(self) -> int:
        found, revision = await self._store.list(self._keys.current)
        self._see(next((kv for kv in found if kv.key == self._keys.current), None))
        return revision

    def _see(self, found: KeyValue | None) -> None:
        if found is not None and found.key != self._keys.current:
            return
        if found is not None and found.mod_revision < self._revision:
            return  # what this gateway wrote since
        try:
            self.current = ReleaseRecord.from_json(found.value) if found is not None else None
            if self.current is not None:
                parse(self.current.policy)
        except (RecordError, ConfigError) as error:
            log.error("ignoring %s: %s", self._keys.current, error)
            self.current = None
        self._revision = found.mod_revision if found is not None else MISSING
        self._observer.watch(watched(self.current))
        self._tell(shown(self.current))
        self._changed.set()
        self._changed_too.set()

    async def _read(self) -> None:
        """Has the answers of each step read."""
        if self._reader is None:
            return
        read: Watched | None = None
        try:
            while True:
                self._changed_too.clear()
                record = self.current
                if record is not None and (now := watched(record)) is not None:
                    if now != read:
                        await self._reader.watch(parse(record.policy), record.step)
                    read = now
                elif read is not None:
                    read = None
                    await self._reader.stop()
                await self._changed_too.wait()
        finally:
            await self._reader.stop()

    async def _flush(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_S)
            taken = self._observer.taken()
            if taken is None:
                continue
            of, record = taken
            try:
                await self._store.put(self._keys.evidence_of(of.release, of.step) + self._me, record.to_json())
            except StoreError as error:
                self._observer.again()
                log.debug("evidence waits until the store answers: %s", error)

    async def _lead(self) -> None:
        while True:
            record = self.current
            if record is None or record.ended or not self._leads():
                await self._until_changed(RETRY_S)
                continue
            try:
                await self._advance(record)
            except StoreError as error:
                log.warning("the release of version %d waits until the store answers: %s", record.version, error)
                await asyncio.sleep(RETRY_S)

    async def _until_changed(self, seconds: float) -> None:
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):  # wait_for of Python 3.11 takes a cancellation that comes with news
                await self._changed.wait()

    async def _advance(self, record: ReleaseRecord) -> None:
        policy = parse(record.policy)
        world = await self._world(record, policy)
        await self._refresh()
        if self.current != record:  # a watch that was cut off tells of it later
            return
        action = advance(record, policy, world)
        if isinstance(action, Write):
            after = action.record
            about = self._about(after) | {"outcome": f"{after.state}: {after.reason}" if after.reason else after.state}
            entries = [LedgerEntry("release_end", "release", version=after.version, **about)] if after.ended else []
            if await self._write(record, after, *entries):
                _tell(record, after)
                if after.ended:
                    await self._forget_evidence()
        elif isinstance(action, Split):
            await self._split(record, policy, action.share)
        elif isinstance(action, Commit):
            await self._commit(record, action.version)
        elif isinstance(action, Evaluate):
            await self._evaluate(record, policy)
        else:
            assert isinstance(action, Wait)
            await self._until_changed(action.seconds)

    async def _world(self, record: ReleaseRecord, policy: Policy) -> World:
        active, shares = await self._control.serving()
        evidence = await self._evidence(record, policy) if record.state in WATCHED else {}
        done = self._evaluated[1] if self._evaluated is not None and self._evaluated[0] == record.id else None
        ready = await self._control.ready(record.version)
        return World(time.time(), active, shares, evidence, evaluated=done, ready=ready)

    async def _evaluate(self, record: ReleaseRecord, policy: Policy) -> None:
        """An evaluation that cannot be made holds the release; it says so, and is tried again."""
        try:
            self._evaluated = record.id, await self._control.evaluate(record, policy)
        except ServerError as error:
            held_s = time.time() - record.since
            if policy.on_hold == "rollback" and held_s >= seconds_of(policy.hold):
                why = f"held for {policy.hold} without an evaluation: {error}"
                await self._write(record, failed(record, time.time(), why))
            elif record.reason != str(error):
                after = replace(record, reason=str(error))
                if await self._write(record, after):
                    _tell(record, after)
            else:
                await asyncio.sleep(AGAIN_S)

    async def _split(self, record: ReleaseRecord, policy: Policy, share: Share) -> None:
        try:
            await self._control.split(record, share, policy)
        except (WeightSyncError, HttpError) as error:
            if isinstance(error, StoreError):
                raise
            await self._write(record, failed(record, time.time(), f"the fleet does not take it: {error}"))

    async def _commit(self, record: ReleaseRecord, version: int) -> None:
        try:
            await self._control.commit(record, version)
        except (WeightSyncError, HttpError) as error:
            if isinstance(error, StoreError):
                raise
            if record.state == "finishing":
                await self._write(record, failed(record, time.time(), f"the fleet does not take it: {error}"))
                return
            log.error("version %d is not back yet, which is tried again: %s", version, error)
            await asyncio.sleep(AGAIN_S)

    async def _evidence(self, record: ReleaseRecord, policy: Policy) -> Mapping[str, Evidence]:
        found, _ = await self._store.list(self._keys.evidence_of(record.id, record.step))
        records = [EvidenceRecord.from_json(kv.value) for kv in found]
        return summed(records, policy.of_step(record.step), record.version, record.stable)

    async def _forget_evidence(self) -> None:
        found, _ = await self._store.list(self._keys.evidence)
        for kv in found:
            await self._store.delete(kv.key)

    def _about(self, record: ReleaseRecord) -> dict[str, Any]:
        """For the ledger."""
        return {"model": self._keys.model, "subject": f"release {record.id}"}

    async def _write(
        self,
        before: ReleaseRecord | None,
        record: ReleaseRecord,
        *entries: LedgerEntry,
        approval: Approval | None = None,
    ) -> bool:
        """In place of `before`, for which `record` was chosen. False: that is no longer the record."""
        if self.current != before:  # news has come since, also of the revision
            return False
        raw = record.to_json()
        try:
            compares, puts = {self._keys.current: self._revision}, dict[str, bytes | None]({self._keys.current: raw})
            if approval is not None:
                compares[approval.key], puts[approval.key] = approval.revision, None
                consent = LedgerEntry("approve", approval.who, reason=approval.reason, **self._about(record))
                entries = (consent, *entries)
            revision = await append(self._store, compares, puts, *entries)
        except StoreConflict as conflict:
            if approval is not None and conflict.key == approval.key:
                raise
            await self._refresh()
            return False
        self._see(KeyValue(self._keys.current, raw, revision, revision))
        return True


def watched(record: ReleaseRecord | None) -> Watched | None:
    """The versions to count for the release; None if none is under way."""
    if record is None or record.state not in WATCHED:
        return None
    return Watched(record.id, record.step, frozenset({record.version, record.stable}))


def shown(record: ReleaseRecord | None) -> str:
    """Its state as metrics have it: an evaluation that cannot be made holds it, too."""
    if record is None:
        return "none"
    return "held" if record.state == "evaluating" and record.reason else record.state


def _tell(before: ReleaseRecord, after: ReleaseRecord) -> None:
    """Alerts hang on the metric of the state; this is for whoever reads the log."""
    level = logging.WARNING if after.reason else logging.INFO
    what = f"step {after.step + 1}" if after.state in ("applying", "judging", "held") else "all steps"
    why = f": {after.reason}" if after.reason else ""
    log.log(level, "release of version %d, %s: %s -> %s%s", after.version, what, before.state, after.state, why)


class FleetControl:
    """The fleet by way of its coordinator. It reads the store, as this gateway's view may be a moment behind."""

    def __init__(
        self,
        store: Store,
        model: str,
        coordinator: Coordinator,
        instances: Callable[[], Iterable[InstanceRecord]],
        deadline_s: float,
        named: NamedSettings,
        tls: ClusterTls | None = None,
    ) -> None:
        self._store, self._model, self._keys = store, model, Keys(model)
        self._coordinator, self._instances, self._deadline_s, self._tls = coordinator, instances, deadline_s, tls
        self._named = named

    async def serving(self) -> tuple[int | None, Mapping[int, Share] | None]:
        """The active version, and the shares of others; None while a swap is under way."""
        found = await self._store.get(self._keys.swap)
        swap = SwapRecord.from_json(found.value) if found is not None else None
        active = await self._active()
        if active is None:
            return None, {}
        if in_flight(swap):
            return active.version, None
        shares = active.split.shares if active.split is not None else ()
        return active.version, {share.version: Share(share.percent, share.shadow) for share in shares}

    async def instances(self) -> int:
        """How many there are that can take a version."""
        found, _ = await self._store.list(self._keys.instances)
        return sum(InstanceRecord.from_json(kv.value).state in PARTICIPATING for kv in found)

    async def ready(self, version: int) -> bool:
        """Whether it is published and was not retired."""
        found = await self._store.get(self._keys.version(version))
        return found is not None and VersionRecord.from_json(found.value).state == "ready"

    async def split(self, record: ReleaseRecord, share: Share, policy: Policy) -> None:
        """Returns when the fleet has it so. Raises WeightSyncError, HttpError."""
        percents = {record.stable: 100.0 - share.traffic, record.version: share.traffic}
        shadow = {record.version: share.shadow} if share.shadow else {}
        sticky = "" if policy.sticky == "none" else policy.sticky
        _, split = placement.split_of(percents, record.stable, sticky=sticky, minimum=policy.minimum, shadow=shadow)
        report = await self._coordinator.activate(
            record.stable,
            self._deadline_s,
            mode="rolling",  # nobody's answer is gone on with by weights that have not been judged
            split=split,
            requested_by=_who(record),
            reason=f"step {record.step + 1} of the release of version {record.version}",
            action="split",
        )
        if not report.ok:
            raise swap_aborted(record.version, report.reason or "no reason given", report.tensor)

    async def commit(self, record: ReleaseRecord, version: int) -> None:
        """The same for the whole fleet."""
        back = version == record.stable
        why = record.reason if back else f"the release of version {version} has passed all steps"
        report = await self._coordinator.activate(
            version,
            self._deadline_s,
            requested_by=_who(record),
            reason=why,
            action="rollback" if back else "activate",
        )
        if not report.ok:
            raise swap_aborted(version, report.reason or "no reason given", report.tensor)

    async def evaluate(self, record: ReleaseRecord, policy: Policy) -> str:
        """Why the candidate does not pass the evaluation sets; "" if it does. Raises ServerError if that is unknown."""
        import httpx

        candidate = self._instance_of(record.version)
        if candidate is None:
            raise ServerError(f"no instance runs version {record.version}")
        verify = self._tls.client_context() if self._tls is not None else True
        async with httpx.AsyncClient(verify=verify, trust_env=False) as client:
            evaluator = Evaluator(client, RewardClient(client, self._named), self._model, policy)
            return await evaluator.verdict(candidate, self._instance_of(record.stable))

    def _instance_of(self, version: int) -> InstanceRecord | None:
        able = (i for i in self._instances() if i.active_version == version and i.state in PARTICIPATING)
        return next(able, None)

    async def _active(self) -> ActiveRecord | None:
        found = await self._store.get(self._keys.active)
        return ActiveRecord.from_json(found.value) if found is not None else None


def _who(record: ReleaseRecord) -> str:
    return f"release of {record.requested_by}" if record.requested_by else "release"
