"""Additions to vLLM's engine core and output processor, installed by the plug-in in every vLLM process.

* `EngineCore.hotswap_commit`: flip the workers and relabel, in one call that the core runs between two steps, so the
  first token of the new weights is the first one labelled so. Stock vLLM labels in a second call.
* Batches already computed when a commit arrives (asynchronous scheduling) keep the label they were computed under.
* Prefix-cache keys carry the commit epoch. A request that has not begun when a commit lands is moved to the new
  epoch; one that has begun stays in its own, so no later request ever hits blocks that other weights computed.
* Version spans are attached to every partial output, not to the last one only.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable
from typing import Any

_MARK = "_hotswap_installed"


def install() -> None:
    """Patch the classes once per process."""
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.engine.output_processor import RequestState

    if getattr(EngineCore, _MARK, False):
        return
    EngineCore.hotswap_commit = commit
    EngineCore._attach_weight_version = attach_weight_version
    EngineCore.preprocess_add_request = _salted(EngineCore.preprocess_add_request)
    EngineCore.add_request = _resalted(EngineCore.add_request)
    RequestState._new_completion_output = _with_spans(RequestState._new_completion_output)
    setattr(EngineCore, _MARK, True)


def commit(self: Any, version: int, epoch: int) -> dict[str, float]:
    """Flip every worker to `version` and label what follows with it. Returns {"flip_ms", "commit_ms"}.

    Raises what a worker raised; with one worker the old version is then still live, with several the caller must
    treat the instance as torn.
    """
    started = time.perf_counter()
    flips = self.collective_rpc("hotswap_commit", args=(version,))
    computed = len(self.batch_queue or ())
    _labels(self).extend([self._weight_version] * (computed - len(_labels(self))))
    self.set_weight_version(str(version))
    self._hotswap_epoch = epoch
    for request in _waiting(self.scheduler):
        if request.num_computed_tokens == 0 and not request.num_output_tokens:
            resalt(request, epoch)
    return {"flip_ms": max(flips), "commit_ms": (time.perf_counter() - started) * 1e3}


def attach_weight_version(self: Any, outputs: dict[int, Any]) -> None:
    """Replaces vLLM's method: outputs of batches computed before a commit keep the older label."""
    labels = _labels(self)
    version = labels.popleft() if labels else self._weight_version
    for output in outputs.values():
        output.weight_version = version


def epoch_salt(epoch: int, salt: str | None) -> str:
    """The cache namespace of a request that starts in `epoch` and asked for `salt` itself."""
    return f"{epoch}|{salt or ''}"


def resalt(request: Any, epoch: int) -> None:
    """Move a request that has computed nothing yet to the cache namespace of `epoch`."""
    own = (request.cache_salt or "|").split("|", 1)[1]
    request.cache_salt = epoch_salt(epoch, own)
    request.block_hashes.clear()
    request.update_block_hashes()


def _labels(core: Any) -> deque[str]:
    """Labels of batches that were computed but not yet returned when the last commit came, oldest first."""
    if not hasattr(core, "_hotswap_labels"):
        core._hotswap_labels = deque()
    labels: deque[str] = core._hotswap_labels
    return labels


def _epoch(core: Any) -> int:
    return int(getattr(core, "_hotswap_epoch", 0))


def _waiting(scheduler: Any) -> list[Any]:
    return [*scheduler.waiting, *getattr(scheduler, "skipped_waiting", ())]


def _salted(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def preprocess_add_request(self: Any, request: Any) -> Any:
        request.cache_salt = epoch_salt(_epoch(self), request.cache_salt)
        return original(self, request)

    return preprocess_add_request


def _resalted(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def add_request(self: Any, request: Any, request_wave: int = 0) -> None:
        # Salted on the input thread; a commit may have come between that and here.
        if not (request.cache_salt or "").startswith(f"{_epoch(self)}|"):
            resalt(request, _epoch(self))
        original(self, request, request_wave)

    return add_request


def _with_spans(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def new_completion_output(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = original(self, *args, **kwargs)
        if output.weight_versions is None:
            output.weight_versions = self._weight_version_spans()
        return output

    return new_completion_output
