"""Stages all parts of a version, one after the other on one background thread, into a `Bundle`.

The speculative draft model of a worker is a model beside the target's, with a stager of its own. EAGLE heads run the
target's embedding or head as the same modules: versions of the target carry those. An MTP head comes in the target's
checkpoint, and is staged with it. n-gram and suffix speculation have no weights.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from weightsync.control.parts import BASE, DRAFT, LORA
from weightsync.errors import EngineError, part_not_served
from weightsync.format.manifest import Schema
from weightsync.vllm_engine.model.placement import Served
from weightsync.vllm_engine.staging.bundle import Bundle, PartOrder, Piece, on_this_host
from weightsync.vllm_engine.staging.editions import Editions
from weightsync.vllm_engine.staging.lora import LoraHost
from weightsync.vllm_engine.staging.stager import (
    DEFAULT,
    Garbage,
    Rules,
    StageOrder,
    Stager,
    StageReport,
    describe,
    go_on,
    staging_device,
    use_one_core,
)


def drafter(runner: Any) -> tuple[str, Served] | None:
    """The way in which vLLM's model runner speculates, and its draft; None where none can be swapped."""
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
    from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

    proposer = getattr(runner, "drafter", None)
    speculator = getattr(runner, "speculator", None)  # of vLLM's second model runner, which GPUs take
    if isinstance(proposer, SpecDecodeBaseProposer):
        speculation, config = proposer.speculative_config, proposer._create_draft_vllm_config()
    elif isinstance(speculator, DraftModelSpeculator):
        speculation = speculator.speculative_config
        own = getattr(speculator, "_draft_vllm_config", None)  # where the draft is a model of its own
        config = own if own is not None else speculation.apply_draft_overrides(speculator.vllm_config)
    else:
        return None
    return speculation.method, Served(runner.get_draft_model(), config, speculation.draft_model_config)


def prediction_head(runner: Any) -> Served | None:
    """The MTP head that comes in the target's checkpoint, where the runner speculates with one."""
    found = drafter(runner)
    return found[1] if found is not None and found[0] == "mtp" else None


def draft_stager(runner: Any, device: torch.device, rules: Rules = DEFAULT) -> Stager:
    """A stager over the draft of vLLM's model runner. Raises EngineError where it has none of its own."""
    found = drafter(runner)
    if found is None:
        raise part_not_served(
            DRAFT, 'start the instance with --speculative-config \'{"method": "draft_model" or "eagle", ...}\''
        )
    method, draft = found
    if method == "mtp":
        raise part_not_served(DRAFT, "an MTP head comes with each version of its target: publish the target with it")
    share = draft.vllm_config.cache_config.gpu_memory_utilization
    place = staging_device(device, share, captured=True)  # the KV cache has its part when the draft is looked for
    place.reserve(draft.model)
    return Stager(
        draft.model,
        draft.vllm_config,
        draft.model_config,
        place,
        elsewhere={id(module) for module in runner.get_model().modules()},
        rules=rules,
    )


@dataclass(frozen=True)
class BundleReport:
    """The report of a staging: the base's report (StageReport's fields), with the times of all, and those of the
    parts."""

    version: int
    running: bool = False
    pieces: dict[str, dict[str, Any]] = field(default_factory=dict)
    fresh: frozenset[str] = frozenset()
    stage_ms: float = 0.0
    error: dict[str, str | None] | None = None

    def to_dict(self) -> dict[str, Any]:
        """`path` is "retained" when nothing had to be built; `parts`: {name: report} of draft and adapters."""
        base = self.pieces.get(BASE, StageReport(self.version).to_dict())
        built = [self.pieces[name] for name in self.fresh if self.pieces[name]["staging_gbps"]]
        losses = [p["step_loss"] for p in built if p["step_loss"] is not None]
        nbytes = sum(p["staging_gbps"] * p["stage_ms"] for p in built)
        done = {
            "version": self.version,
            "running": self.running,
            "error": self.error,
            "stage_ms": self.stage_ms,
            "staging_gbps": nbytes / self.stage_ms if self.stage_ms else 0.0,
            "step_loss": max(losses, default=None),
            "parts": {name: piece for name, piece in self.pieces.items() if name != BASE},
        }
        return {**base, **done, **({} if self.fresh else {"path": "retained"})}


class BundleStager:
    """One staging at a time; `wait` returns when it is over, `bundle` is then what was staged, if it went well."""

    def __init__(self, base: Stager, runner: Any, device: torch.device, rules: Rules = DEFAULT) -> None:
        self._stagers = {BASE: base}
        self._runner, self._device, self._rules = runner, device, rules
        self._missing: dict[str, EngineError] = {}
        self._host: LoraHost | None = None
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._at = ""  # the part whose stager is at work
        self.report = BundleReport(version=0)
        self.bundle: Bundle | None = None
        self._find_parts()
        self.editions = Editions(self._host)

    def _find_parts(self) -> None:
        """Find the parts that this worker has besides the base. A version with others is refused with the reason."""
        try:
            self._stagers[DRAFT] = draft_stager(self._runner, self._device, self._rules)
        except EngineError as error:
            if error.code == "unsupported_model":
                raise
            self._missing[DRAFT] = error
        try:
            self._host = LoraHost(self._runner, allow_non_finite=self._rules.allow_non_finite)
        except EngineError as error:
            self._missing[LORA] = error

    def start(
        self, version: int, orders: Iterable[PartOrder], schema: Schema | None, held: list[Bundle], garbage: Garbage
    ) -> None:
        """Begin staging; pieces in `held` that were built from the same bytes are taken as they are.

        `garbage` is freed first, on the same thread.
        """
        self.wait()
        self.bundle = None
        self.report = BundleReport(version, running=True)
        self._stop = threading.Event()
        args = (version, list(orders), schema, held, garbage)
        self._thread = threading.Thread(target=self._run, args=args, name="hotswap-bundle", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Have the staging that runs end soon, with SwapError; returns at once."""
        self._stop.set()

    def wait(self) -> None:
        """Block until no staging runs."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def vacate(self) -> None:
        """Give back the memory that a sleeping worker does not need."""
        self.wait()
        for stager in self._stagers.values():
            stager.place.vacate()

    def retain(self, bundle: Bundle) -> None:
        """Say that `bundle`, which is held already, is what was asked for."""
        self.report = BundleReport(bundle.version, pieces={n: p.report for n, p in bundle.pieces.items()})

    def take(self) -> Bundle:
        """Hand over what was staged, once."""
        assert self.bundle is not None
        bundle, self.bundle = self.bundle, None
        return bundle

    def _run(
        self, version: int, orders: list[PartOrder], schema: Schema | None, held: list[Bundle], garbage: Garbage
    ) -> None:
        use_one_core()
        started = time.perf_counter()
        bundle, fresh, self._at = Bundle(version), set[str](), ""
        try:
            garbage.free()
            for order in orders:
                piece = next((p for b in held if (p := b.find(order)) is not None), None)
                if piece is None:
                    piece = self._build(on_this_host(order), schema if order.name == BASE else None)
                    self._at = ""
                    fresh.add(order.name)
                bundle.pieces[order.name] = piece
                go_on(self._stop)
        except Exception as error:  # reported to the coordinator: the old version goes on serving
            for name in fresh:
                bundle.pieces[name].generation.release()
            failure = describe(error)
            failure["message"] = f"part {self._at!r}: {failure['message']}" if self._at else failure["message"]
            self.report = BundleReport(version, error=failure)
            return
        self.bundle = bundle
        reports = {name: piece.report for name, piece in bundle.pieces.items()}
        ms = (time.perf_counter() - started) * 1e3 if fresh else 0.0
        self.report = BundleReport(version, pieces=reports, fresh=frozenset(fresh), stage_ms=ms)

    def _build(self, order: PartOrder, schema: Schema | None) -> Piece:
        kind = LORA if order.name.startswith(LORA) else order.name
        if kind in self._missing:
            raise part_not_served(order.name, self._missing[kind].advice)
        if kind == LORA:
            return self._build_adapter(order)
        stager = self._stagers[order.name]
        wanted = StageOrder(order.version, order.slot, order.manifest_digest, schema, order.unread)
        self._at = order.name
        generation = stager.stage(wanted, self._stop)
        return Piece(generation, stager.report.to_dict())

    def _build_adapter(self, order: PartOrder) -> Piece:
        assert self._host is not None
        started = time.perf_counter()
        self._at = order.name
        generation, built = self._host.build(order)
        seconds = time.perf_counter() - started
        report = StageReport(
            order.version,
            digest=order.manifest_digest,
            path="lora",
            stage_ms=seconds * 1e3,
            staging_gbps=built["nbytes"] / 1e9 / seconds,
        )
        return Piece(generation, report.to_dict() | {"sums": built["sums"]}, generation.withdraw)
