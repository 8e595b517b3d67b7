"""A release's actions on the fleet: splits, commits, and questions to the candidate's instances."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from server.errors import ServerError
from server.gateway.config import NamedSettings
from server.gateway.release.policy import Policy
from server.gateway.release.progress import Share
from server.gateway.release.records import ReleaseRecord
from server.gateway.release.scoring import Evaluator, RewardClient
from weightsync.control import placement
from weightsync.control.coordinator import Coordinator
from weightsync.control.records import ActiveRecord, InstanceRecord, Keys, SwapRecord, VersionRecord
from weightsync.control.state import PARTICIPATING, in_flight
from weightsync.errors import swap_aborted
from weightsync.store import Store
from weightsync.tls import ClusterTls


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
