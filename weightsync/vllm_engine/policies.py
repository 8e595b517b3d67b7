"""What a commit does to requests in flight, as each asked in `sampling_params.extra_args["hotswap"]`.

Requests that pool (embeddings) ask in `pooling_params.extra_kwargs["hotswap"]`, and give no tokens that could be mixed.

keep       goes on with the new weights and the KV it has
recompute  is preempted inside the commit (core.py); its KV is rebuilt by the new weights
finish     is waited for by the instance (server/instance/inflight.py); what is left at the flip is ended
abort      is ended at the flip
A request bound to versions (`version`, `min_version`) that the new one is not among is ended too, and is not let in.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

KEY = "hotswap"
PUBLIC = "public"


def wish_of(request: Any) -> Mapping[str, Any]:
    """What the request asked for; empty for one that came another way."""
    if (sampling := request.sampling_params) is not None:
        return (sampling.extra_args or {}).get(KEY, {})
    pooling = request.pooling_params
    return (pooling.extra_kwargs or {}).get(KEY, {}) if pooling is not None else {}


def allows(wish: Mapping[str, Any], version: str) -> bool:
    """Whether tokens of `version` may be in the answer. The weights before the first commit are no version."""
    exact, least = wish.get("version"), wish.get("min_version")
    if exact is None and least is None:
        return True
    number = int(version) if version.isdecimal() else 0
    return (exact is None or number == exact) and (least is None or number >= least)


def ends(request: Any, version: str) -> bool:
    """Whether the commit of `version` ends this request."""
    wish = wish_of(request)
    begun = request.num_computed_tokens > 0 or request.num_output_tokens > 0
    return not allows(wish, version) or (begun and wish.get("policy") in ("abort", "finish"))


def end(core: Any, version: str) -> None:
    """End, in the engine and for their clients, the requests that must see no token of `version`."""
    from vllm.v1.request import RequestStatus

    doomed = [r.request_id for r in core.scheduler.requests.values() if not r.is_finished() and ends(r, version)]
    if doomed:
        ended = core.scheduler.finish_requests(doomed, RequestStatus.FINISHED_ABORTED)
        core._send_abort_outputs(ended)
