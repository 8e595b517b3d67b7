"""An instance's side of a swap: registers it, watches the records, and calls back to stage and to commit.

    STARTING --active version loaded (or there is none)--> SERVING
    SERVING  --swap opens--> STAGING --staged--> STAGED --commit record--> SERVING (new version)
                                 |                  `--swap aborted--> SERVING (old version)
                                 `--failed--> SERVING (old version), with `error`: the coordinator aborts the swap
    any      --commit failed--> TORN: what it runs is unknown; it must not serve, and be restarted

The store may go away at any time: the instance serves on and takes part again when it is back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from weightsync.board import Board
from weightsync.errors import LeaseLost, StoreError, UnknownVersion, WeightSyncError
from weightsync.lease import LeaseKeeper
from weightsync.records import ActiveRecord, ErrorInfo, InstanceRecord, Keys, SwapRecord, VersionRecord
from weightsync.store.protocol import Store
from weightsync.swap_state import in_flight

log = logging.getLogger(__name__)
FIRST_RETRY_S, LAST_RETRY_S = 0.1, 2.0
CATCH_UP_RETRY_S = 1.0


@dataclass(frozen=True)
class StageResult:
    """What was built: its fingerprint, how fast (bytes of the version per second, in 1e9), and which way."""

    fingerprint: str | None = None
    staging_gbps: float | None = None
    path: str | None = None


@dataclass(frozen=True)
class CommitResult:
    """How long the flip itself took; None: as long as the callback did."""

    commit_ms: float | None = None


Stage = Callable[[VersionRecord], Awaitable[StageResult]]
Commit = Callable[[ActiveRecord, VersionRecord], Awaitable[CommitResult]]
Drop = Callable[[VersionRecord], Awaitable[None]]


class Participant:
    """One instance's part in the swaps of `model`.

    stage(version)           build it beside the running one; raise to refuse it (WeightSyncError for a typed reason).
                             Idempotent: at once when it is staged already, as the previous version is.
    commit(active, version)  flip to it. Raising means torn.
    drop(version)            it was staged for a swap that was aborted. Optional.
    """

    def __init__(
        self,
        store: Store,
        model: str,
        record: InstanceRecord,
        stage: Stage,
        commit: Commit,
        *,
        drop: Drop | None = None,
        lease_ttl_s: float = 5.0,
    ) -> None:
        """`record` says who this is and, in `active_version`, what it runs already, if that came from a version."""
        self._store, self._keys, self._record = store, Keys(model), record
        self._stage, self._commit, self._drop = stage, commit, drop
        self._lease_ttl_s = lease_ttl_s
        self._lease: LeaseKeeper | None = None
        self._task: asyncio.Task[None] | None = None
        self._serving = asyncio.Event()

    @property
    def record(self) -> InstanceRecord:
        """What this instance says, or will say, of itself."""
        return self._record

    def start(self) -> None:
        """Run in the background of this event loop until `stop`."""
        self._task = asyncio.create_task(self.run(), name=f"participant {self._record.id}")

    async def serving(self) -> None:
        """Return when the fleet has seen it SERVING once."""
        await self._serving.wait()

    async def stop(self) -> None:
        """Leave the fleet now. A callback that runs is cancelled."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        if self._lease is not None:
            await self._lease.end()

    async def drain(self) -> None:
        """Tell the fleet that it takes no new requests. Raises StoreUnavailable."""
        await self._say(state="DRAINING")

    async def run(self) -> None:
        """Take part for ever."""
        delay = FIRST_RETRY_S
        while True:
            started = time.monotonic()
            try:
                await self._session()
            except StoreError as error:
                log.warning("instance %s goes on serving without the store: %s", self._record.id, error)
            delay = FIRST_RETRY_S if time.monotonic() - started > LAST_RETRY_S else min(2 * delay, LAST_RETRY_S)
            await asyncio.sleep(delay)

    async def _session(self) -> None:
        """Register under a fresh lease and follow the records until the store or the lease is lost."""
        former, self._lease = self._lease, await LeaseKeeper.grant(self._store, self._lease_ttl_s)
        await self._say()
        if former is not None:
            await former.end()  # only now, or the record would be gone for a moment
        async with Board.follow(self._store, self._keys) as board:
            lost = asyncio.create_task(self._lease.lost.wait())
            try:
                while not lost.done():
                    await board.changed(await self._reconcile(board), lost)
            finally:
                lost.cancel()
        raise LeaseLost(self._lease.id)

    async def _reconcile(self, board: Board) -> float | None:
        """Do what the records ask for. Returns after how many seconds to try again, None if only on a change."""
        record, active, swap = self._record, board.active, board.swap
        if record.state in ("TORN", "DRAINING", "STOPPED"):
            return None
        if active is not None and active.epoch != record.active_epoch:
            return await self._follow_commit(active)
        if record.state == "STARTING":
            await self._say(state="SERVING", error=None)
        elif swap is not None and swap.phase == "prepare" and self._asked(swap):
            await self._prepare(swap)
        elif record.state in ("STAGING", "STAGED") and not (in_flight(swap) and swap and swap.id == record.swap_id):
            await self._stand_down()
        return None

    def _asked(self, swap: SwapRecord) -> bool:
        interrupted = self._record.state == "STAGING"  # the store went away before staging began
        return self._record.id in swap.participants and (self._record.swap_id != swap.id or interrupted)

    async def _prepare(self, swap: SwapRecord) -> None:
        await self._say(state="STAGING", swap_id=swap.id, staged_version=None, error=None)
        try:
            await self._build(swap.target)
        except Exception as error:
            log.warning("instance %s refuses version %d: %s", self._record.id, swap.target, error)
            await self._say(state="SERVING", error=_error_info(error))
        else:
            await self._say(state="STAGED", staged_version=swap.target)

    async def _follow_commit(self, active: ActiveRecord) -> float | None:
        """Flip to the committed version, staging it first if this instance was not part of the swap."""
        if active.version == self._record.active_version:
            # Loaded already (at start), or committed again: same weights, new epoch.
            await self._say(state="SERVING", active_epoch=active.epoch, staged_version=None)
            return None
        try:
            version = await self._build(active.version)
        except StoreError:
            raise
        except Exception as error:
            # It still runs a version that the fleet has left; STARTING keeps it out of routing until it has caught up.
            log.warning("instance %s cannot follow to version %d: %s", self._record.id, active.version, error)
            await self._say(state="STARTING", error=_error_info(error))
            return CATCH_UP_RETRY_S
        started = time.perf_counter()
        try:
            result = await self._commit(active, version)
        except Exception as error:
            log.exception("instance %s is torn", self._record.id)
            await self._say(state="TORN", error=_error_info(error))
            return None
        commit_ms = result.commit_ms if result.commit_ms is not None else (time.perf_counter() - started) * 1e3
        await self._say(
            state="SERVING",
            active_version=active.version,
            active_epoch=active.epoch,
            staged_version=None,
            error=None,
            commit_ms=commit_ms,
        )
        return None

    async def _build(self, number: int) -> VersionRecord:
        """Have the version staged. Raises UnknownVersion, and whatever the callback raises."""
        found = await self._store.get(self._keys.version(number))
        version = VersionRecord.from_json(found.value) if found else None
        if version is None or version.state != "ready":
            raise UnknownVersion(number, version.state if version else None)
        if self._record.state == "STAGED" and self._record.staged_version == number:
            return version
        started = time.perf_counter()
        result = await self._stage(version)
        seconds = time.perf_counter() - started
        gbps = result.staging_gbps if result.staging_gbps is not None else version.nbytes / max(seconds, 1e-9) / 1e9
        path = result.path if result.path is not None else self._record.path
        self._record = replace(
            self._record, stage_ms=seconds * 1e3, staging_gbps=gbps, fingerprint=result.fingerprint, path=path
        )
        return version

    async def _stand_down(self) -> None:
        """The swap was aborted: what was staged for it is of no use."""
        staged = self._record.staged_version
        found = await self._store.get(self._keys.version(staged)) if staged is not None else None
        if self._drop is not None and found is not None:
            await self._drop(VersionRecord.from_json(found.value))
        await self._say(state="SERVING", staged_version=None)

    async def _say(self, **changes: object) -> None:
        """Change the record here, then in the store; if that is away, the next session says it."""
        self._record = replace(self._record, **changes)  # type: ignore[arg-type]
        if self._lease is not None:
            await self._store.put(self._keys.instance(self._record.id), self._record.to_json(), self._lease.id)
        if self._record.state == "SERVING":
            self._serving.set()


def _error_info(error: Exception) -> ErrorInfo:
    if isinstance(error, WeightSyncError):
        return ErrorInfo(error.code, str(error), error.tensor)
    return ErrorInfo("internal_error", f"{type(error).__name__}: {error}")
