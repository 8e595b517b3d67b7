"""Recorded routing: the experts that each layer of a mixture sent each token to, as vLLM returns them with an answer
(`--enable-return-routed-experts`; `CompletionOutput.routed_experts`).

vLLM's own recorder does the work: its routers write into a buffer, a worker keeps what they wrote by block hash beside
the prefix cache, and the scheduler hands out the rows of each answer. It does not know three things.

* CPUs run vLLM's first model runner, which does not feed the recorder. `attach` does it: before a step it tells the
  recorder what the scheduler says, and after the step whose rows are which. vLLM's check of the configuration is told
  that this is so.
* A commit changes the hashes of blocks that have them already, and may run a request anew in the step after the one
  that gave up its blocks (requests.py, core.py). The scheduler's side tells of both in `metadata.hotswap`, and the
  worker's side forgets the old keys before vLLM adds the new ones: so what new weights chose is never found under an
  old version's hash, and a prompt that is in the cache gets the routing of the pass that computed its keys and values.
* Its store may have no room for a block that is in the prefix cache, or in use: each has an order of its own in which
  it gives blocks up, requests that were preempted hold theirs in the store alone, and `max_bytes` may be any number.
  vLLM's ends the engine. Here the store gives up the oldest blocks, and an answer that needs one lacks the rows before
  those of its own passes; what serves it counts them (server/instance/routed_experts.py).

A row is that of the pass that computed the token's keys and values and the logits of the token after it. Rows that were
handed out stay as they were, whatever a commit computes again.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

log = logging.getLogger(__name__)
CHANGED = "_hotswap_rekeyed"  # of a request: the first of its blocks whose hash is another one than vLLM was told


def install() -> None:
    """Patch the classes once per process (core.py)."""
    from vllm.config import VllmConfig
    from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector

    VllmConfig._verify_aux_output_compatibility = _verified(VllmConfig._verify_aux_output_compatibility)
    AuxOutputSchedulerConnector.build_connector_meta = _told(AuxOutputSchedulerConnector.build_connector_meta)
    AuxOutputSchedulerConnector.take_output = _as_many_as_there_are(AuxOutputSchedulerConnector.take_output)


def expect(config: Any, device: Any) -> None:
    """Have the model runner of this process, if it is one on a CPU, record from its first request on: vLLM's server
    sends one before anybody knows of the engine. Called when the model is loaded, before there is a KV cache."""
    if config.aux_output_config.enabled and device.type == "cpu":
        from vllm.v1.worker.cpu_model_runner import CPUModelRunner

        if not hasattr(CPUModelRunner.initialize_kv_cache, "__wrapped__"):
            CPUModelRunner.initialize_kv_cache = _attached(CPUModelRunner.initialize_kv_cache)


def _attached(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def initialize_kv_cache(self: Any, *args: Any, **more: Any) -> None:
        original(self, *args, **more)
        attach(self)

    return initialize_kv_cache


def rekeyed(request: Any, first: int) -> None:
    """The hashes of the request's blocks are other ones from number `first` on."""
    setattr(request, CHANGED, min(first, getattr(request, CHANGED, first)))


def attach(runner: Any) -> None:
    """Have a worker's model runner record, if its engine is to, over commits too. A second call does nothing."""
    if not runner.vllm_config.aux_output_config.enabled:
        return
    if not hasattr(runner, "aux_output_connector"):  # the first model runner
        from vllm.distributed.aux_output_connector.worker import get_aux_output_connector

        model, config = runner.get_model(), runner.vllm_config
        runner.aux_output_connector = get_aux_output_connector(model, config, runner.kv_cache_config)
        runner.execute_model = functools.partial(_execute_model, runner, runner.execute_model)
        runner.sample_tokens = functools.partial(_sample_tokens, runner, runner.sample_tokens)
    recorder = runner.aux_output_connector
    if not isinstance(recorder.begin_step, functools.partial):
        recorder.begin_step = functools.partial(_begin_step, recorder, recorder.begin_step)
        if recorder._store is not None:  # this worker hands out
            forgive(recorder._store._store)


# The configuration, and the runner on CPUs ----------------------------------------------------------------------


class _AsOfSecondRunner:
    """A configuration, for a check that asks for the second model runner."""

    use_v2_model_runner = True

    def __init__(self, config: Any) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


def _verified(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def verify(self: Any) -> None:
        from vllm.platforms import current_platform

        original(_AsOfSecondRunner(self) if current_platform.is_cpu() else self)

    return verify


def _execute_model(runner: Any, execute: Callable[..., Any], scheduled: Any, *args: Any, **more: Any) -> Any:
    runner.aux_output_connector.begin_step(scheduled.aux_output_connector_metadata)
    return execute(scheduled, *args, **more)


def _sample_tokens(runner: Any, sample: Callable[..., Any], grammar_output: Any) -> Any:
    if runner.execute_model_state is None:  # nothing was computed
        return sample(grammar_output)
    scheduled = runner.execute_model_state.scheduler_output
    ids = list(runner.input_batch.req_ids)
    pending = runner.aux_output_connector.prepare_output(rows_of(runner.input_batch, ids, scheduled))
    output = sample(grammar_output)
    if pending is not None:  # this worker hands out
        pending.enqueue_cpu_copy(*outcome(output.sampled_token_ids, ids, scheduled))
        output.aux_output_connector_output = pending.process_output()
    return output


def rows_of(batch: Any, ids: list[str], scheduled: Any) -> SimpleNamespace:
    """The rows a step computes: the requests in the batch's order, where each one's rows begin (and the end of all),
    and how many of its tokens were computed before."""
    ends = np.cumsum([0, *(scheduled.num_scheduled_tokens[request_id] for request_id in ids)])
    before = batch.num_computed_tokens_cpu[: len(ids)].copy()
    return SimpleNamespace(req_ids=ids, query_start_loc_np=ends, num_computed_tokens_np=before)


def outcome(sampled: list[list[int]], ids: list[str], scheduled: Any) -> tuple[np.ndarray, np.ndarray]:
    """For each request how many tokens it got, and how many of the draft's were rejected: their rows count for nothing.
    A prompt that is not through got none, and has nothing rejected."""
    got = np.array([len(tokens) for tokens in sampled], dtype=np.int64)
    drafted = np.array([len(scheduled.scheduled_spec_decode_tokens.get(i, ())) for i in ids], dtype=np.int64)
    return got, np.where(got > 0, drafted + 1 - got, 0)


# Changes by commits ---------------------------------------------------------------------------------------------


def _told(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def build_connector_meta(self: Any, scheduler_output: Any, requests: Any) -> Any:
        ended, sent = self._finished_requests, self._sent_hash_counts
        restarted = {i: ended.pop(i) for i in scheduler_output.num_scheduled_tokens if i in ended}
        known = {*sent, *scheduler_output.num_scheduled_tokens}
        changed = {i: requests[i].__dict__.pop(CHANGED) for i in known if hasattr(requests[i], CHANGED)}
        changed = {i: first for i, first in changed.items() if first < sent.get(i, 0)}
        sent.update(changed)
        metadata = original(self, scheduler_output, requests)
        if restarted or changed:
            metadata.hotswap = {"restarted": restarted, "rekeyed": changed}
        return metadata

    return build_connector_meta


def _begin_step(recorder: Any, begin: Callable[[Any], None], metadata: Any) -> None:
    told = getattr(metadata, "hotswap", None)
    if told is not None and recorder._buffer is not None and metadata.generation == recorder._generation:
        with recorder._lock:
            for request_id, last_hashes in told["restarted"].items():
                _restart(recorder, request_id, last_hashes)
            for request_id, first in told["rekeyed"].items():
                _forget_keys(recorder, request_id, first)
    begin(metadata)


def _restart(recorder: Any, request_id: str, last_hashes: Any) -> None:
    """End what is known of the request: it begins anew. Steps of before that are still under way end under another
    name. Blocks that only now have a hash are kept: they stay in the cache."""
    from vllm.distributed.aux_output_connector.routed_experts import routed_experts_keys

    state = recorder._requests.pop(request_id, None)
    if state is None:
        return
    keys = routed_experts_keys(last_hashes or (), str(recorder._generation))
    state.aux_output_keys.extend(keys)
    recorder._publish_blocks([(state, [])], keys)
    state.finished, before = True, object()
    recorder._requests[before] = state
    if (tail := recorder._buffer._requests.pop(request_id, None)) is not None:
        recorder._buffer._requests[before] = tail
    for pending in recorder._pending_outputs:
        pending.request_ids = [before if i == request_id else i for i in pending.request_ids]
    if state.pending_outputs == 0:
        recorder._publish_blocks([], release_keys=state.aux_output_keys[::-1])
        recorder._teardown([before])


def _forget_keys(recorder: Any, request_id: str, first: int) -> None:
    if (state := recorder._requests.get(request_id)) is not None:
        forgotten, state.aux_output_keys[first:] = state.aux_output_keys[first:], []
        recorder._publish_blocks([], release_keys=forgotten[::-1])


# Blocks without room in the store -------------------------------------------------------------------------------


def forgive(store: Any) -> None:
    """Have a `BlockObjectStore` give up blocks rather than fail."""
    store._evict_to_fit = functools.partial(_evict_to_fit, store, store._evict_to_fit)
    store.get_concatenated = functools.partial(_found, store.get_concatenated)


def _evict_to_fit(store: Any, evict: Callable[[set[str]], None], protected: set[str]) -> None:
    """As vLLM's; where it finds too few blocks that nobody holds, the oldest go, those of this step last of all."""
    from vllm.distributed.aux_output_connector.store import BlockObjectStoreError

    try:
        evict(protected)
    except BlockObjectStoreError:
        keys = sorted(store._lru, key=lambda key: (key in protected, key in store._references))
        for key in keys[: len(keys) - store.num_slots]:
            slot = store._lru.pop(key)
            if slot != store._UNALLOCATED_SLOT:
                store._free_slots.append(slot)


def _found(get: Callable[[list[str]], bytes], keys: list[str]) -> bytes:
    """No rows if a block is gone."""
    from vllm.distributed.aux_output_connector.store import BlockObjectStoreError

    try:
        return get(keys)
    except BlockObjectStoreError as error:
        log.warning("an answer goes without the routing of its prompt: %s", error)
        return b""


def _as_many_as_there_are(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def take_output(self: Any, request: Any, output: Any) -> Any:
        recorded = output.get(request.request_id) if output else None
        if recorded is not None and recorded.token_start + len(recorded.rows) < request.num_tokens - 1:
            return recorded.rows[:0]
        return original(self, request, output)

    return take_output
