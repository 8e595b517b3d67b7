"""The `hotswap` weight-transfer backend: what vLLM creates in each worker, and the worker methods the instance calls.

It speaks vLLM's four-phase protocol (`start_weight_update`, `update_weights`, `finish_weight_update`), and, for the
swap transaction, `hotswap_attach`, `hotswap_device` and `hotswap_reads` (once), `hotswap_stage`, `hotswap_report`,
`hotswap_commit` and `hotswap_drop` as worker RPCs. Staging returns at once; a commit only changes references (and
copies adapters), so it fits between two batches.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from weightsync.control.hosts import this_host
from weightsync.errors import unsupported_model
from weightsync.format.manifest import schema_of
from weightsync.vllm_engine import gpus, kernels
from weightsync.vllm_engine.device.mapping import remap_unavailable
from weightsync.vllm_engine.device.pacing import Staging
from weightsync.vllm_engine.device.remap import Remap
from weightsync.vllm_engine.engine_core import core, routing
from weightsync.vllm_engine.engine_core.seeds import rewind_by_state
from weightsync.vllm_engine.staging.build import Reads
from weightsync.vllm_engine.staging.bundle import BASE, Bundle, HeldBundles, PartOrder
from weightsync.vllm_engine.staging.bundle_stager import BundleReport, BundleStager, prediction_head
from weightsync.vllm_engine.staging.editions import Editions
from weightsync.vllm_engine.staging.lora import mend_kernels
from weightsync.vllm_engine.staging.stager import Garbage, Rules, Stager, staging_device
from weightsync.vllm_engine.tether import Tether, hold

log = logging.getLogger("hotswap.instance")


@dataclass
class InitInfo(WeightTransferInitInfo):
    """`schema`: [name, dtype, shape] of every tensor a version must have; empty accepts what the model accepts.

    `allow_non_finite`: weights with NaN or infinities are staged, which are refused otherwise. `staging`: whether
    a staging is to be fast or smooth (device/pacing.py).
    """

    schema: list[list[Any]] = field(default_factory=list)
    allow_non_finite: bool = False
    staging: Staging = "smooth"


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """One published version: the slot file of its base model and the digest of its manifest; the same of its parts.

    `base_version` published the base (0: `version` did). `places`: {host: path of the base's slot there}, empty on one
    host. `unread`: the tensors of the base that no worker reads. `parts`: {"name", "version", "slot",
    "manifest_digest", "lora_id", "places"} each.
    """

    version: int = 0
    slot: str = ""
    manifest_digest: str = ""
    base_version: int = 0
    places: dict[str, str] = field(default_factory=dict)
    unread: list[str] = field(default_factory=list)
    parts: list[dict[str, Any]] = field(default_factory=list)

    def orders(self) -> list[PartOrder]:
        """The base first."""
        version = self.base_version or self.version
        base = PartOrder(BASE, version, self.slot, self.manifest_digest, places=self.places, unread=tuple(self.unread))
        return [base, *(PartOrder(**part) for part in self.parts)]


class HotswapWeightTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Keeps three bundles: live, previous (a rollback is one more commit) and the one being staged."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False
    defers_processing = True

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        """vLLM calls this when the model is loaded, before it measures how much memory is left for the KV cache.

        Raises EngineError, ValueError.
        """
        super().__init__(config, vllm_config, device, model)
        if vllm_config.parallel_config.enable_eplb:
            raise unsupported_model(
                "EPLB moves experts between ranks while versions are staged for the ranks that they were on; start "
                "the instance without --enable-eplb"
            )
        given = vllm_config.cache_config
        self._place = staging_device(device, given.gpu_memory_utilization, given.kv_cache_memory_bytes)
        if isinstance(self._place, Remap) and vllm_config.model_config.enable_cumem_allocator:
            raise remap_unavailable(
                "vLLM's own allocator keeps the memory that the weights move out of; start the instance without "
                "--enable-sleep-mode and --enable-cumem-allocator"
            )
        self._place.reserve(model)
        if device.type == "cpu":
            kernels.report()
        routing.expect(vllm_config, device)

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        self._schema = schema_of((n, d, s) for n, d, s in init_info.schema) if init_info.schema else None
        self._rules = Rules(init_info.allow_non_finite, init_info.staging)
        self.attach(None)
        self._held = HeldBundles()
        self._unwanted: int | None = None

    def attach(self, runner: Any) -> None:
        """`runner`: vLLM's model runner, which holds what else can be swapped here: a draft model, LoRA adapters."""
        head = prediction_head(runner)
        if head is not None or not hasattr(self, "_base"):
            model = self.model, self.vllm_config, self.model_config, self._place
            self._base = Stager(*model, head=head, rules=self._rules)
        self._stager = BundleStager(self._base, runner, self.device, self._rules)

    def reads(self, schema: list[list[Any]]) -> Reads:
        """This worker's reads of versions with this schema. Raises TensorError, EngineError."""
        self._stager.wait()
        return self._base.reads(schema_of((n, d, s) for n, d, s in schema))

    @property
    def editions(self) -> Editions:
        """Of adapters."""
        return self._stager.editions

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

    def stage(self, info: UpdateInfo) -> BundleReport:
        """Begin staging; a version that is live, previous or already staged is ready at once."""
        self._stager.wait()
        if self._unwanted is not None:
            self._give_up(self._unwanted)
        orders = info.orders()
        held = self._held.held(self._stager.bundle)
        for bundle in held:
            if bundle.version == info.version and all(bundle.find(order) for order in orders):
                self._stager.retain(bundle)
                return self._stager.report
        self._held.give_up(self._stager.bundle, orders)
        self._stager.start(info.version, orders, self._schema, held, Garbage(*self._held.sweep()))  # type: ignore[arg-type]
        return self._stager.report

    def drop(self, version: int, *, previous: bool) -> None:
        """The bundle staged as `version` is not offered again; with `previous`, nor the one a rollback would flip to.

        The live one stays. A staging of `version` that is under way is told to stop, and not waited for: `report` says
        when it has, and should it have been through, the next one begins by giving it up.
        """
        report = self._stager.report
        if report.running:
            self._unwanted = version
            if report.version == version:
                self._stager.stop()
        else:
            self._give_up(version)
        if previous:
            self._held.forget(version, self._stager.bundle)

    def _give_up(self, version: int) -> None:
        self._unwanted = None
        staged = self._stager.bundle
        if staged is not None and staged.version == version:
            self._stager.bundle = None
            self._held.give_up(staged, ())

    def vacate(self) -> None:
        """Before the worker sleeps: device memory of versions goes back. Bundles that are held stay, in host memory."""
        self._stager.vacate()

    def report(self) -> BundleReport:
        return self._stager.report

    def commit(self, version: int) -> tuple[float, bool, dict[str, str]]:
        """Flip to `version`. Raises RuntimeError for one that is not staged, and then nothing has changed.

        Returns (the flip's time in ms, whether the scales of the KV cache changed, the digest of each part that runs).
        A quantised cache can only be read with the scales that it was written with.
        """
        started = time.perf_counter()
        if self._held.live is not None and self._held.live.version == version:
            return 0.0, False, self._held.digests
        target = self._find(version)
        before, ran = self._kv_scales(), self._held.running
        staged, self._stager.bundle = self._stager.bundle, None
        self._held.commit(target, staged)
        flipped = [piece.generation for name, piece in target.pieces.items() if ran.get(name) is not piece]
        waited = sum(getattr(generation, "waited_ms", 0.0) for generation in flipped)
        rescaled = before != self._kv_scales()
        return (time.perf_counter() - started) * 1e3 - waited, rescaled, self._held.digests

    def _kv_scales(self) -> dict[tuple[str, str], Any]:
        """By part and path: the layers of a draft model may be called as those of the base."""
        scales = {name: getattr(piece.generation, "kv_scales", {}) for name, piece in self._held.running.items()}
        return {(name, path): value for name, of_part in scales.items() for path, value in of_part.items()}

    def _find(self, version: int) -> Bundle:
        for bundle in (self._held.previous, self._stager.bundle):
            if bundle is not None and bundle.version == version:
                return bundle
        report = self._stager.report
        reason = (report.error or {}).get("message") or f"version {report.version} is what was staged last"
        raise RuntimeError(f"version {version} is not staged: {reason}")


class WorkerMethods:
    """Worker RPCs, mixed into vLLM's worker by `worker_extension_cls`."""

    weight_transfer_engine: HotswapWeightTransferEngine
    model_runner: Any
    rank: int

    def hotswap_attach(self, tether: dict[str, Any]) -> str:
        """`tether`: the leader's end of it, {} on one host. Returns the name of this worker's host, "" for the one."""
        self.weight_transfer_engine.attach(self.model_runner)
        core.zero_sliding_windows(self.model_runner)
        rewind_by_state(self.model_runner)
        routing.attach(self.model_runner)
        mend_kernels(self.model_runner)
        host = this_host()
        if tether and host != tether["host"]:
            hold(Tether(**tether), self.rank, host)
        return host

    def hotswap_device(self) -> tuple[str, int | None] | None:
        """The GPU of this worker: its UUID and its index on this host; None on a CPU."""
        device = self.weight_transfer_engine.device
        return gpus.of_device(str(torch.cuda.get_device_properties(device).uuid)) if device.type == "cuda" else None

    def hotswap_reads(self, schema: list[list[Any]]) -> tuple[str, str] | None:
        """This worker's reads of versions of the base with this schema: (slices as text; the tensors that nothing is
        filled from, a bit for each name in order, in hex). None: the worker cannot say."""
        try:
            reads = self.weight_transfer_engine.reads(schema)
        except Exception:  # of a loader: what is wrong with the model, if anything is, a staging says
            log.warning("this worker cannot say what it reads of versions: its peer fetches all", exc_info=True)
            return None
        unread = set(reads.unread)
        names = sorted(name for name, _, _ in schema)
        return reads.slices.to_text(), f"{sum(1 << n for n, name in enumerate(names) if name in unread):x}"

    def hotswap_stage(self, info: dict[str, Any]) -> dict[str, Any]:
        engine = self.weight_transfer_engine
        return engine.stage(engine.parse_update_info(info)).to_dict()

    def hotswap_load_edition(self, order: dict[str, Any]) -> dict[str, Any]:
        editions = self.weight_transfer_engine.editions
        editions.load(PartOrder(**order))
        return editions.report(order["name"]).to_dict()

    def hotswap_edition(self, name: str) -> dict[str, Any]:
        return self.weight_transfer_engine.editions.report(name).to_dict()

    def hotswap_drop_edition(self, name: str) -> None:
        self.weight_transfer_engine.editions.drop(name)

    def hotswap_report(self) -> dict[str, Any]:
        return self.weight_transfer_engine.report().to_dict()

    def hotswap_drop(self, version: int, previous: bool) -> None:
        self.weight_transfer_engine.drop(version, previous=previous)

    def hotswap_vacate(self) -> None:
        self.weight_transfer_engine.vacate()

    def hotswap_commit(self, version: int) -> tuple[float, bool, dict[str, str]]:
        return self.weight_transfer_engine.commit(version)
