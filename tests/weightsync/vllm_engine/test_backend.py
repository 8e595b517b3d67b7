"""Stagings that a worker offers again when a version is asked for once more; they finish when the test says so."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from loadtest.models.mapped_memory import HostDriver
from tests.weightsync.codes import refused
from weightsync.vllm_engine.device.remap import Remap
from weightsync.vllm_engine.staging.bundle import Bundle, HeldBundles, PartOrder, Piece

pytestmark = pytest.mark.engine


class SlowStager:
    """`BundleStager` as the backend sees it: what `start` was given is built by `finish`, or by `wait`."""

    def __init__(self) -> None:
        self.bundle: Bundle | None = None
        self.report: Any = SimpleNamespace(version=0, running=False, error=None)
        self.built: list[int] = []
        self.stopped: list[int] = []

    def stop(self) -> None:
        self.stopped.append(self.report.version)

    def start(self, version: int, orders: list[PartOrder], *_rest: object) -> None:
        self.bundle = None
        self.report = SimpleNamespace(version=version, running=True, error=None)
        self._orders = orders

    def wait(self) -> None:
        if self.report.running:
            self.built.append(self.report.version)
            self.bundle = Bundle(self.report.version, {o.name: piece(o.manifest_digest) for o in self._orders})
            self.report.running = False

    def retain(self, bundle: Bundle) -> None:
        self.report = SimpleNamespace(version=bundle.version, running=False, error=None, parts=set(bundle.pieces))


def piece(digest: str) -> Piece:
    scales = {"layers.0.attn._k_scale_float": digest}
    generation: Any = SimpleNamespace(
        digest=digest, commit=list, kv_scales=scales, release=lambda: pytest.fail("this is done elsewhere")
    )
    return Piece(generation, {})


@pytest.fixture
def worker() -> Any:
    """A backend that runs version 1, and has just staged version 2."""
    from weightsync.vllm_engine.backend import HotswapWeightTransferEngine

    engine: Any = object.__new__(HotswapWeightTransferEngine)
    engine._schema, engine._held, engine._unwanted, engine._stager = None, HeldBundles(), None, SlowStager()
    build(engine, 1)
    engine.commit(1)
    build(engine, 2)
    return engine


def stage(engine: Any, version: int, base: str = "", **parts: str) -> None:
    """`base` and `parts`: what it has, by digest; a base of its own unless one is named."""
    from weightsync.vllm_engine.backend import UpdateInfo

    orders = [{"name": p, "version": version, "slot": "", "manifest_digest": d} for p, d in parts.items()]
    engine.stage(UpdateInfo(version, "slot", base or f"digest {version}", parts=orders))


def build(engine: Any, version: int, base: str = "", **parts: str) -> None:
    stage(engine, version, base, **parts)
    engine._stager.wait()


def test_what_is_staged_is_retained_unless_it_was_dropped(worker: Any) -> None:
    stage(worker, 2)
    assert worker._stager.built == [1, 2]
    worker.drop(2, previous=False)
    with pytest.raises(RuntimeError, match="not staged"):
        worker.commit(2)
    build(worker, 2)
    assert worker._stager.built == [1, 2, 2]


def test_what_was_flipped_to_and_back_is_dropped_only_if_that_is_asked(worker: Any) -> None:
    worker.commit(2)
    worker.commit(1)
    worker.drop(2, previous=False)
    stage(worker, 2)
    assert worker._stager.built == [1, 2]
    worker.drop(2, previous=True)
    build(worker, 2)
    assert worker._stager.built == [1, 2, 2]


def test_the_version_that_runs_is_never_dropped(worker: Any) -> None:
    worker.drop(1, previous=True)
    assert worker.commit(1) == (0.0, False, {"": "digest 1"})
    stage(worker, 1)
    assert worker._stager.built == [1, 2]


def test_a_version_has_the_parts_that_it_names_however_often_a_rollback_goes_there(worker: Any) -> None:
    """An adapter comes and is rolled back: the version before is asked for without it, and is what was published."""
    for version in (3, 4, 5):
        build(worker, version, "digest 1", **{"lora/x": f"adapter {version}"})
        worker.commit(version)
        stage(worker, 1)
        assert worker._stager.report.parts == {""}
        worker.commit(1)
    assert worker._stager.built == [1, 2, 3, 4, 5]


def test_what_is_cached_can_be_read_until_the_scales_of_a_part_change(worker: Any) -> None:
    """A draft model runs on beside a version without one, and its layers may be called as those of the base."""
    cases = [("a", {"draft": "d"}, True), ("a", {}, False), ("a", {"draft": "e"}, True), ("b", {"draft": "e"}, True)]
    for version, (base, parts, changes) in enumerate(cases, 3):
        build(worker, version, base, **parts)
        assert worker.commit(version)[1] == changes, (base, parts)


def test_a_staging_under_way_is_given_up_before_the_next_one(worker: Any) -> None:
    stage(worker, 3)
    worker.drop(3, previous=False)
    assert worker._stager.report.running, "the decode loop must not wait for it"
    assert worker._stager.stopped == [3]
    build(worker, 3)
    assert worker._stager.built == [1, 2, 3, 3]


def test_only_a_staging_of_the_dropped_version_is_stopped(worker: Any) -> None:
    stage(worker, 3)
    worker.drop(2, previous=True)
    assert worker._stager.stopped == []


def test_experts_that_move_are_refused_by_name() -> None:
    from weightsync.vllm_engine.backend import HotswapWeightTransferEngine

    config = SimpleNamespace(parallel_config=SimpleNamespace(enable_eplb=True), model_config=None)
    with refused("unsupported_model", "without --enable-eplb"):
        HotswapWeightTransferEngine(None, config, torch.device("cpu"), torch.nn.Linear(1, 1))


def test_an_allocator_that_keeps_what_the_weights_leave_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """They move to addresses of their own, and vLLM's sleep mode would not find them."""
    from weightsync.vllm_engine import backend

    place = Remap(torch.device("cpu"), copies=2, driver=HostDriver())
    monkeypatch.setattr(backend, "staging_device", lambda *_: place)
    parallel, model = SimpleNamespace(enable_eplb=False), SimpleNamespace(enable_cumem_allocator=True)
    cache = SimpleNamespace(gpu_memory_utilization=0.9, kv_cache_memory_bytes=None)
    config = SimpleNamespace(parallel_config=parallel, model_config=model, cache_config=cache)
    with refused("unsupported_model", "without --enable-sleep-mode"):
        backend.HotswapWeightTransferEngine(None, config, torch.device("cpu"), torch.nn.Linear(1, 1))
