"""vLLM's recorder of routing, driven as its scheduler and model runner drive it, with commits in between.

A step's rows say which version computed it, so an answer's rows say which pass each of them is of.
"""

from __future__ import annotations

import functools
from threading import Lock
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.weightsync.vllm_engine.engine_core.test_requests import BLOCK, request
from weightsync import vllm_plugin
from weightsync.vllm_engine.engine_core import routing
from weightsync.vllm_engine.engine_core.requests import enter, go_private

pytestmark = pytest.mark.engine


class Engine:
    """Both sides of the recorder, without a model: one layer, one expert per token."""

    def __init__(self, blocks: int = 64) -> None:
        """`blocks`: what the store has room for."""
        vllm_plugin.register()
        from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector
        from vllm.distributed.aux_output_connector.routed_experts import RoutedExpertsBuffer
        from vllm.distributed.aux_output_connector.store import BackgroundBlockObjectStore, BlockObjectStore
        from vllm.distributed.aux_output_connector.worker import AuxOutputWorkerConnector

        self.scheduler = AuxOutputSchedulerConnector()
        worker: Any = AuxOutputWorkerConnector.__new__(AuxOutputWorkerConnector)
        worker._capturer = self
        worker._requests, worker._pending_outputs, worker._lock = {}, [], Lock()
        worker._generation, worker._step_metadata, worker._max_concurrent_batches = 0, None, 2
        store = BlockObjectStore(max_bytes=BLOCK * blocks, object_nbytes=BLOCK)
        routing.forgive(store)
        worker._store = BackgroundBlockObjectStore(store, max_pending_batches=8)
        worker._buffer = RoutedExpertsBuffer(np.dtype("uint8"), (1, 1), BLOCK, 4, 32, 2)
        worker.begin_step = functools.partial(routing._begin_step, worker, worker.begin_step)
        self.worker, self.requests, self.rows = worker, {}, torch.zeros(0)
        self.answers: dict[str, list[int]] = {}

    def snapshot_routing_data(self, count: int) -> torch.Tensor:
        assert len(self.rows) == count
        return self.rows

    def begin(self, version: int, **counts: int) -> Any:
        """Compute so many more tokens of each request under `version`; the step that is under way."""
        scheduled = SimpleNamespace(num_scheduled_tokens=counts, scheduled_spec_decode_tokens={})
        self.worker.begin_step(self.scheduler.build_connector_meta(scheduled, self.requests))
        self.rows = torch.full((sum(counts.values()), 1, 1), version, dtype=torch.uint8)
        before = np.array([self.requests[name].num_computed_tokens for name in counts])
        batch = SimpleNamespace(num_computed_tokens_cpu=before)
        step = self.worker.prepare_output(routing.rows_of(batch, list(counts), scheduled))
        for name, count in counts.items():
            self.requests[name].num_computed_tokens += count
        return scheduled, step

    def end(self, begun: Any) -> None:
        """Its outputs come in: a token for each request that is through with its tokens."""
        scheduled, step = begun
        names = list(scheduled.num_scheduled_tokens)
        live = {name: self.requests[name] for name in names if name in step.request_ids}
        through = [name in live and live[name].num_computed_tokens >= live[name].num_tokens for name in names]
        step.enqueue_cpu_copy(*routing.outcome([[7] if t else [] for t in through], names, scheduled))
        outputs = step.process_output()
        for name, told in zip(names, through, strict=True):
            if told:
                self.requests[name].append_output_token_ids(7)
                rows = self.scheduler.take_output(self.requests[name], outputs)
                self.answers.setdefault(name, []).extend([] if rows is None else rows[:, 0, 0].tolist())

    def step(self, version: int, **counts: int) -> None:
        self.end(self.begin(version, **counts))

    def add(self, name: str, tokens: int, version: str = "1", cached: int = 0) -> Any:
        made = request(version, tokens=tokens)
        made.request_id, made.num_computed_tokens = name, cached
        self.requests[name] = made
        return made

    def start_over(self, name: str, version: str) -> None:
        """As core.py does in a commit."""
        self.scheduler.request_finished(self.requests[name])
        self.requests[name].num_computed_tokens = 0
        enter(self.requests[name], version)


def test_an_answer_has_the_rows_of_its_passes() -> None:
    """A prompt in chunks, and decoding."""
    engine = Engine()
    engine.add("a", 10)
    engine.step(1, a=6)
    assert "a" not in engine.answers
    engine.step(1, a=4)
    for _ in range(5):
        engine.step(1, a=1)
    assert engine.answers["a"] == [1] * 15


def test_what_other_weights_compute_is_not_found_under_the_old_version() -> None:
    """A commit in the middle of a prompt: blocks that had a hash before they were computed get another one."""
    engine = Engine()
    crossing = engine.add("a", 12)
    engine.step(1, a=6)
    go_private(crossing, BLOCK)
    engine.step(2, a=6)
    engine.step(2, a=1)
    assert engine.answers["a"] == [1] * 6 + [2] * 7
    engine.add("b", 13, cached=BLOCK)
    engine.step(1, b=9)
    assert engine.answers["b"] == [1] * 13
    assert len(set(crossing.block_hashes) & set(engine.requests["b"].block_hashes)) == 1
    engine.add("c", 13, cached=3 * BLOCK, version="2")
    engine.step(2, c=1)
    assert engine.answers["c"] == [], "nothing is known of what the cache would say it has"


def test_an_answer_whose_prompt_the_store_has_lost_has_fewer_rows_and_a_pass_anew_brings_them_back() -> None:
    engine = Engine(blocks=2)
    engine.add("a", 10)
    engine.step(1, a=10)
    engine.scheduler.request_finished(engine.requests.pop("a"))
    engine.add("other", 10, version="2")
    engine.step(2, other=10)
    engine.scheduler.request_finished(engine.requests.pop("other"))
    engine.add("b", 10, cached=2 * BLOCK)
    engine.step(3, b=2)
    engine.step(4, b=1)
    assert engine.answers["b"] == [4], "of its prompt no row, rather than those that are left of it"
    engine.scheduler.request_finished(engine.requests.pop("b"))
    engine.add("anew", 10)
    engine.step(5, anew=10)
    engine.add("c", 10, cached=2 * BLOCK)
    engine.step(6, c=2)
    assert engine.answers["anew"] == [5] * 10
    assert engine.answers["c"] == [5] * 8 + [6] * 2


def test_requests_that_hold_more_blocks_than_the_store_has_room_for_are_answered() -> None:
    """Of those that were preempted nothing is in the engine's cache, but they hold what was recorded of them."""
    engine = Engine(blocks=2)
    for name, version in (("a", "1"), ("b", "2"), ("c", "3")):
        engine.add(name, 10, version=version)
        engine.step(int(version), **{name: 10})
    for _ in range(5):
        engine.step(4, a=1, b=1, c=1)
    assert engine.answers == {"a": [1] * 10 + [4] * 5, "b": [2] * 10 + [4] * 5, "c": [3] * 10 + [4] * 5}
    engine.add("d", 10, cached=2 * BLOCK)
    engine.step(5, d=2)
    assert engine.answers["d"] == []


@pytest.mark.parametrize("under_way", [False, True])
def test_an_answer_that_a_commit_begins_anew_keeps_what_was_told(under_way: bool) -> None:
    """The rows of tokens that were sampled stay; the request runs again in the very next step, and steps of before that
    are under way count for nothing."""
    engine = Engine()
    engine.add("a", 10)
    engine.step(1, a=10)
    engine.step(1, a=1)
    late = engine.begin(1, a=1) if under_way else None
    engine.start_over("a", "2")
    begun = engine.begin(2, a=12)
    if late is not None:
        engine.end(late)
    engine.end(begun)
    engine.step(2, a=1)
    assert engine.answers["a"] == [1] * 11 + [2] * 2
    assert list(engine.worker._requests) == ["a"], "nothing is left of its first life"
    engine.add("b", 10, cached=2 * BLOCK)
    engine.step(1, b=2)
    assert engine.answers["b"] == [1] * 10, "what the first version computed is in the cache"
    engine.add("c", 10, version="2", cached=2 * BLOCK)
    engine.step(2, c=2)
    assert engine.answers["c"] == [2] * 10


def test_rows_of_rejected_drafts_count_for_nothing() -> None:
    scheduled = SimpleNamespace(
        num_scheduled_tokens={"a": 4, "b": 1, "c": 8}, scheduled_spec_decode_tokens={"a": [1, 2, 3]}
    )
    sampled, rejected = routing.outcome([[5, 6], [5], []], ["a", "b", "c"], scheduled)
    assert sampled.tolist() == [2, 1, 0]
    assert rejected.tolist() == [2, 0, 0]
    batch = SimpleNamespace(num_computed_tokens_cpu=np.array([30, 7, 0, 99]))
    rows = routing.rows_of(batch, ["a", "b", "c"], scheduled)
    assert rows.query_start_loc_np.tolist() == [0, 4, 5, 13]
    assert rows.num_computed_tokens_np.tolist() == [30, 7, 0]


def test_the_first_runner_passes_vllm_s_check_on_a_cpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.platforms import current_platform

    seen = []
    check = routing._verified(lambda config: seen.append((config.use_v2_model_runner, config.other)))
    config = SimpleNamespace(use_v2_model_runner=False, other=1)
    for cpu in (True, False):
        monkeypatch.setattr(current_platform, "is_cpu", lambda cpu=cpu: cpu)
        check(config)
    assert seen == [(True, 1), (False, 1)]


def test_an_engine_that_records_nothing_is_left_alone() -> None:
    runner = SimpleNamespace(vllm_config=SimpleNamespace(aux_output_config=SimpleNamespace(enabled=False)))
    routing.attach(runner)
    assert list(vars(runner)) == ["vllm_config"]
