"""The `hotswap` weight-transfer backend: what vLLM creates in each worker, and the worker methods the instance calls.

It speaks vLLM's four-phase protocol (`start_weight_update`, `update_weights`, `finish_weight_update`), and, for the
swap transaction, `hotswap_stage`, `hotswap_report` and `hotswap_commit` as worker RPCs. Staging returns at once;
a commit only changes references, so it fits between two batches.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from weightsync.manifest import schema_of

from .generation import Generation
from .stager import Garbage, StageOrder, Stager, StageReport


class NotStagedError(RuntimeError):
    """A commit named a version that this worker has not staged; nothing changed."""


@dataclass
class InitInfo(WeightTransferInitInfo):
    """`schema`: [name, dtype, shape] of every tensor a version must have; empty accepts what the model accepts."""

    schema: list[list[Any]] = field(default_factory=list)


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """One published version: its slot file and the digest of its manifest."""

    version: int = 0
    slot: str = ""
    manifest_digest: str = ""


class HotswapWeightTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Keeps three generations: live, previous (a rollback is one more commit) and the one being staged."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False
    defers_processing = True

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        self._schema = schema_of((n, d, s) for n, d, s in init_info.schema) if init_info.schema else None
        self._stager = Stager(self.model, self.vllm_config, self.model_config, self.device)
        self._live: Generation | None = None
        self._previous: Generation | None = None
        self._garbage: list[Generation] = []
        self._replaced: list[Any] = []

    # vLLM's four-phase protocol -------------------------------------------------------------------------------

    def start_weight_update(self) -> None:
        """Nothing to prepare: the live model is not touched before the commit."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        self.stage(update_info)

    def finish_weight_update(self) -> None:
        self._stager.wait()
        self.commit(self._stager.report.version)

    def drain_pending(self) -> None:
        self._stager.wait()

    def shutdown(self) -> None:
        if hasattr(self, "_stager"):
            self._stager.wait()

    # the swap transaction ---------------------------------------------------------------------------------------

    def stage(self, info: UpdateInfo) -> StageReport:
        """Begin staging; a version that is live, previous or already staged is ready at once."""
        held = [g for g in (self._live, self._previous, self._stager.generation) if g is not None]
        if any(g.version == info.version and g.digest == info.manifest_digest for g in held):
            self._stager.report = StageReport(info.version, digest=info.manifest_digest, path="retained")
        else:
            garbage = Garbage(self._garbage, self._replaced)
            self._garbage, self._replaced = [], []
            order = StageOrder(info.version, info.slot, info.manifest_digest, self._schema)
            self._stager.start(order, garbage)
        return self._stager.report

    def report(self) -> StageReport:
        return self._stager.report

    def commit(self, version: int) -> float:
        """Flip to `version`; returns the flip's time in ms. Raises NotStagedError, and then nothing has changed."""
        started = time.perf_counter()
        if self._live is not None and self._live.version == version:
            return 0.0
        target = self._take(version)
        self._replaced += target.commit()
        if self._previous is not None:
            self._garbage.append(self._previous)
        self._live, self._previous = target, target.displaced(self._live)
        return (time.perf_counter() - started) * 1e3

    def _take(self, version: int) -> Generation:
        report = self._stager.report
        if self._previous is not None and self._previous.version == version:
            generation, self._previous = self._previous, None
            return generation
        staged = self._stager.generation
        if report.running or staged is None or staged.version != version:
            reason = (report.error or {}).get("message") or f"version {report.version} is what was staged last"
            raise NotStagedError(f"version {version} is not staged: {reason}")
        return self._stager.take()


class WorkerMethods:
    """Worker RPCs, mixed into vLLM's worker by `worker_extension_cls`."""

    weight_transfer_engine: HotswapWeightTransferEngine

    def hotswap_stage(self, info: dict[str, Any]) -> dict[str, Any]:
        engine = self.weight_transfer_engine
        return engine.stage(engine.parse_update_info(info)).to_dict()

    def hotswap_report(self) -> dict[str, Any]:
        return self.weight_transfer_engine.report().to_dict()

    def hotswap_commit(self, version: int) -> float:
        return self.weight_transfer_engine.commit(version)
