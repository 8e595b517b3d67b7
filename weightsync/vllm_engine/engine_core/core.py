"""Additions to vLLM's engine core and output processor, installed by the plug-in in every vLLM process.

* `EngineCore.hotswap_commit`: flip the workers and relabel, in one call that the core runs between two steps, so the
  first token of the new weights is the first one labelled so. Stock vLLM labels in a second call.
* Data-parallel ranks that share experts all flip at one step (steps.py).
* Batches already computed when a commit arrives (asynchronous scheduling) keep the label they were computed under.
* Prefix-cache keys carry the digest of the weights (requests.py). A request of which nothing is computed when a commit
  lands moves to the new weights; one that has begun goes on with the blocks it has, and shares none from then on. To a
  request whose weights stay the same, as when another one's adapter is published, nothing happens.
* A request that asked for it (`extra_args["hotswap"]["policy"] == "recompute"`) is preempted in the commit, and its KV
  rebuilt under the new weights. When a version is withdrawn (a commit serves an older one in its place), that is done
  with every request whose weights change: what a bad version computed does not live on under a good one's label. The
  same holds when the scales of a quantised KV cache change: what lies there was written with the old ones.
* Blocks of the KV cache that hold what other weights wrote are zeroed before the next request gets them (below).
* A request may find what other weights have computed for its session (sessions.py).
* An image that other weights have encoded is encoded anew, also when a prompt is in the middle of it.
* A request that must see no token of the new version is ended by the commit, or not let in (requests.py). So is one
  through an adapter that the new version does not have.
* Version spans are attached to every partial output, not to the last one only; those over a prompt that a commit fell
  into travel with the label of the first output.
* A request may go on with an answer that another engine began (requests.py).
* `EngineCore.hotswap_prefixes`: which prefixes of prompts the cache holds, by vLLM's KV events (prefixes.py).

Why blocks are zeroed: a block is given to the next request as the last one left it. Attention masks what lies behind
the end of a sequence by a weight of zero, and zero times NaN is NaN: one block that a version with overflowing
activations wrote spoils the answers of good weights, until it is overwritten. So a commit marks every block, and each
is zeroed once, when it is next allocated. vLLM zeroes new blocks itself for caches of mixed precision and for Mamba;
here the same switch is on for all, and the list of what is to be zeroed holds the marked blocks alone. A swap waits for
nothing of it.

Blocks that are found by their hash are not allocated: their keys carry the weights that wrote them (requests.py).
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import orjson

from weightsync.vllm_engine.engine_core import prefixes, requests, routing, sessions, steps
from weightsync.vllm_engine.engine_core.requests import Weights, enter, namespace, namespace_of

_MARK = "_hotswap_installed"


def install() -> None:
    """Patch the classes once per process."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import DPEngineCoreProc, EngineCore
    from vllm.v1.engine.output_processor import OutputProcessor, RequestState

    if getattr(EngineCore, _MARK, False):
        return
    EngineCore.hotswap_commit = commit
    EngineCore.hotswap_prefixes = prefixes.changes
    EngineCore._attach_weight_version = attach_weight_version
    EngineCore.preprocess_add_request = _salted(requests.extended(EngineCore.preprocess_add_request))
    EngineCore.add_request = _resalted(EngineCore.add_request)
    Scheduler.add_request = _watched(Scheduler.add_request)
    Scheduler._preempt_request = _started_over(Scheduler._preempt_request)
    KVCacheManager.get_computed_blocks = sessions.placed(KVCacheManager.get_computed_blocks)
    DPEngineCoreProc._has_global_unfinished_reqs = steps.meeting(DPEngineCoreProc._has_global_unfinished_reqs)
    _install_zeroing()
    routing.install()
    OutputProcessor.add_request = requests.registered(OutputProcessor.add_request)
    OutputProcessor.process_outputs = _unpacked(OutputProcessor.process_outputs)
    RequestState._new_completion_output = _with_spans(RequestState._new_completion_output)
    setattr(EngineCore, _MARK, True)


def commit(self: Any, version: int, withdrawn: bool = False) -> dict[str, Any] | Future[dict[str, Any]]:
    """Flip every worker to `version` and label what follows with it. `withdrawn`: nothing goes on that the version
    before has computed.

    Returns {"flip_ms", "commit_ms", "crossed": {request id: prompt tokens computed before, of those that are not
    through with their prompt}}, once all ranks flip where they share experts. Raises what a worker raised; with one
    worker the old version is then still live, with several the caller must treat the instance as torn.
    """
    flip = functools.partial(_commit, self, version, withdrawn)
    return steps.at_common_step(self, version, flip) if steps.are_common(self) else flip()


def _commit(self: Any, version: int, withdrawn: bool) -> dict[str, Any]:
    started = time.perf_counter()
    flips, rescaled, parts = zip(*self.collective_rpc("hotswap_commit", args=(version,)), strict=True)
    before, self._hotswap_weights = _weights(self), Weights(str(version), parts[0])
    computed = len(self.batch_queue or ())
    _labels(self).extend([self._weight_version] * (computed - len(_labels(self))))
    changed = before.version != str(version)
    if changed:
        requests.end_barred(self, str(version))
    self.set_weight_version(str(version))
    how = {"withdrawn": withdrawn, "rescaled": any(rescaled)}
    crossed = _move_requests(self.scheduler, before, self._hotswap_weights, **how) if changed else {}
    return {"flip_ms": max(flips), "commit_ms": (time.perf_counter() - started) * 1e3, "crossed": crossed}


def attach_weight_version(self: Any, outputs: dict[int, Any]) -> None:
    """Replaces vLLM's method: outputs of batches computed before a commit keep the older label."""
    labels = _labels(self)
    version = labels.popleft() if labels else self._weight_version
    for output in outputs.values():
        output.weight_version = _with_prompts(self.scheduler, output.outputs, version)


def _with_prompts(scheduler: Any, outputs: list[Any], version: str) -> str:
    """The label, and behind it {request id: [[end, version], ...]} of prompts that older weights computed in part."""
    crossed = {}
    for output in outputs:
        request = scheduler.requests.get(output.request_id)
        if output.new_token_ids and getattr(request, "_hotswap_prompt", None):
            crossed[output.request_id], request._hotswap_prompt = request._hotswap_prompt, []
    return f"{version}|{orjson.dumps(crossed).decode()}" if crossed else version


def _move_requests(scheduler: Any, before: Weights, now: Weights, *, withdrawn: bool, rescaled: bool) -> dict[str, int]:
    """Settle what every request's blocks belong to from this commit on; what is not through with its prompt.

    `withdrawn`: no request whose weights change goes on with the blocks that it has. `rescaled`: none at all does.
    """
    scheduler._hotswap_weights = now
    crossed: dict[str, int] = {}
    mark_stale(scheduler)
    forget_encoded(scheduler.encoder_cache_manager)
    prefixes.relabel(scheduler, now)
    known = sessions.of(scheduler, now)
    if rescaled:
        known.forget()
    elif withdrawn:
        known.withdraw(before.all() - now.all())
    for request in reversed(list(scheduler.running)):  # the last one first: each is put before those that wait
        same = before.of(request) == now.of(request)
        recomputes = withdrawn or requests.wish_of(request).get("policy") == "recompute"
        if rescaled or (recomputes and not same):
            _start_over(scheduler, request)
            continue
        if not same:
            known.cross(request)
        if 0 < request.num_computed_tokens < request.num_prompt_tokens:
            crossed[request.request_id] = request.num_computed_tokens
            parts = getattr(request, "_hotswap_prompt", [])
            request._hotswap_prompt = [*parts, (request.num_computed_tokens, before.version)]
    for request in _waiting(scheduler):
        if request.num_computed_tokens == 0:
            _enter(scheduler, request, now)
        elif before.of(request) != now.of(request):  # its blocks are on their way from elsewhere
            known.cross(request)
    return crossed


def _enter(scheduler: Any, request: Any, weights: Weights) -> None:
    """Nothing of the request is computed: it moves to the namespace of these weights, unless it is there."""
    followed = getattr(request, "_hotswap_course", None) is not None
    if namespace_of(request) != (own := weights.of(request)) or followed:
        enter(request, own)
        prefixes.watch(scheduler, request)


def _start_over(scheduler: Any, request: Any) -> None:
    """As `Scheduler.reset_prefix_cache(reset_running_requests=True)` does with every request. None of it is found in
    the cache of its session."""
    request._hotswap_afresh = True
    scheduler.running.remove(request)
    scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)
    scheduler.prev_step_scheduled_req_ids.discard(request.request_id)


def _labels(core: Any) -> deque[str]:
    """Labels of batches that were computed but not yet returned when the last commit came, oldest first."""
    if not hasattr(core, "_hotswap_labels"):
        core._hotswap_labels = deque()
    labels: deque[str] = core._hotswap_labels
    return labels


def _weights(core: Any) -> Weights:
    found: Weights | None = getattr(core, "_hotswap_weights", None)
    return found or Weights(str(core._weight_version))


def _waiting(scheduler: Any) -> list[Any]:
    return [*scheduler.waiting, *scheduler.kv_holding_waiting]


def _salted(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def preprocess_add_request(self: Any, request: Any) -> Any:
        # The length stands first: no salt of a client's own spells another scope.
        scope = requests.wish_of(request).get("scope", requests.PUBLIC)
        request.cache_salt = namespace(_weights(self).of(request), f"{len(scope)}:{scope}|{request.cache_salt or ''}")
        return original(self, request)

    return preprocess_add_request


def _resalted(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def add_request(self: Any, request: Any, request_wave: int = 0) -> None:
        runs = _weights(self)
        if not requests.allows(requests.wish_of(request), runs.version) or requests.is_withdrawn(request, runs.parts):
            self._send_abort_outputs_to_client([request.request_id], request.client_index)
            return
        # Salted on the input thread; a commit may have come between that and here.
        if namespace_of(request) != (own := runs.of(request)):
            enter(request, own)
        if sessions.kv_of(request):
            sessions.of(self.scheduler, runs)
        original(self, request, request_wave)

    return add_request


def _started_over(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def preempt_request(self: Any, request: Any, *args: Any, **kwargs: Any) -> None:
        original(self, request, *args, **kwargs)
        request._hotswap_prompt = []
        # All of its blocks will be computed again, by the weights that are live then.
        if (weights := getattr(self, "_hotswap_weights", None)) is not None:
            _enter(self, request, weights)

    return preempt_request


def _watched(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def add_request(self: Any, request: Any) -> None:
        original(self, request)
        prefixes.watch(self, request)

    return add_request


def _unpacked(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def process_outputs(self: Any, outputs: Any, *args: Any, weight_version: str | None = None, **kwargs: Any) -> Any:
        requests.empty_pools(self, outputs)
        if weight_version is not None and "|" in weight_version:
            weight_version, _, crossed = weight_version.partition("|")
            for request_id, parts in orjson.loads(crossed).items():
                if (state := self.request_states.get(request_id)) is not None:
                    state.__dict__.setdefault("hotswap_prompt", parts)  # a replayed one keeps what was told of it
        return original(self, outputs, *args, weight_version=weight_version, **kwargs)

    return process_outputs


def _with_spans(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def new_completion_output(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = original(self, *args, **kwargs)
        if output.weight_versions is None:
            output.weight_versions = self._weight_version_spans()
        output.hotswap_prompt = getattr(self, "hotswap_prompt", ())
        output.hotswap_replay = self.__dict__.pop("hotswap_replay", None)
        return output

    return new_completion_output


def _install_zeroing() -> None:
    """Patch the classes once per process; until a commit vLLM zeroes what it zeroes without this."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import KVCacheConfig

    own = KVCacheConfig.needs_kv_cache_zeroing.fget
    assert own is not None
    KVCacheConfig.needs_kv_cache_zeroing = property(lambda _: True)

    def blocks_to_zero(self: Any) -> list[int] | None:
        allocated: list[int] = self.kv_cache_manager.take_new_block_ids()
        marked: bytearray | None = getattr(self, "_hotswap_stale", None)
        if not allocated or (marked is None and not own(self.kv_cache_config)):
            return None
        if marked is None or own(self.kv_cache_config):
            return allocated
        found = [block for block in allocated if marked[block]]
        for block in found:
            marked[block] = 0
        return found or None

    Scheduler._get_new_block_ids_to_zero = blocks_to_zero


def zero_sliding_windows(runner: Any) -> None:
    """Give vLLM's runner on CPU a method for what its own leaves out: the layers with a sliding window."""
    if runner.device.type == "cpu":
        runner._zero_block_ids = functools.partial(_zero, runner)


def _zero(self: Any, block_ids: list[int]) -> None:
    import torch
    from vllm.v1.kv_cache_interface import MambaSpec

    blocks, seen = torch.tensor(block_ids), set[int]()
    for group in self.kv_cache_config.kv_cache_groups:
        for name in group.layer_names if not isinstance(group.kv_cache_spec, MambaSpec) else ():
            cache = getattr(self.compilation_config.static_forward_context.get(name), "kv_cache", None)
            if isinstance(cache, torch.Tensor) and cache.data_ptr() not in seen:
                seen.add(cache.data_ptr())
                cache.index_fill_(0, blocks, 0)


def mark_stale(scheduler: Any) -> None:
    """Other weights run from now on: every block is zeroed before it is written again."""
    scheduler._hotswap_stale = bytearray(b"\1") * scheduler.kv_cache_config.num_blocks


def forget_encoded(manager: Any) -> None:
    """Other weights run from now on: what requests share of encoded images goes, in the workers with the next batch.

    A manager of encoder-decoder models shares nothing between requests.
    """
    if known := list(getattr(manager, "cached", ())):
        manager.reset()
        manager.freed.extend(known)
