"""Requests in flight: what a commit does to them, which cached blocks they share, and how they go on elsewhere.

Each asks in `sampling_params.extra_args["hotswap"]` what a commit does to it. Requests that pool (embeddings) ask in
`pooling_params.extra_kwargs["hotswap"]`, and give no tokens that could be mixed.

keep       goes on with the new weights and the KV it has
recompute  is preempted inside the commit (core.py); its KV is rebuilt by the new weights
finish     is waited for by the instance (server/instance/inflight.py); what is left at the flip is ended
abort      is ended at the flip
A request bound to versions (`version`, `min_version`) that the new one is not among is ended too, and is not let in.
The same holds for every request through an adapter that the new version does not have, whatever its policy.

A request may share the prefix-cache blocks that the very same weights have computed from end to end. The cache salt of
a request is `weights|scope|salt`: the bytes that it runs on (`Weights.of`), who may share with whom (the gateway says),
and what the client asked for. vLLM mixes it into the hash of a request's first block, and every later hash builds on
that, so blocks are found again when their weights return, and by no other request in between. A version that changes an
adapter alone leaves the requests without that adapter the blocks they have. A request that asks for it shares with its
session what other weights have computed too (sessions.py).

A request that lives through a change of its weights goes private: its full blocks stay what they are, and every later
one gets a hash that nobody can compute. When it is preempted nothing of it is left; it then starts over in the
namespace of the weights that run.

A request may go on with an answer that another engine began, `sampling_params.extra_args["hotswap"]["replay"]`:

    tokens   the ids it has so far
    spans    [version, first token] of each stretch of them
    prompt   [end, version] over the prompt, as core.py tells it
    ended    nothing follows: one token is generated for the sake of the form, and thrown away

The request is checked and registered as it came. Then the engine core is given the prompt with the tokens behind it,
and less to generate; the output processor's state is brought to where it was after these tokens, so that text withheld
for a stop string or an unfinished character, positions and spans go on as if they had been generated here. Its first
output carries what was replayed (`hotswap_replay`), for those that count or parse what an answer has said.
"""

from __future__ import annotations

import functools
import hashlib
import secrets
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from weightsync.control.parts import LORA, LORA_URL
from weightsync.vllm_engine.engine_core.routing import rekeyed

KEY = "hotswap"
PUBLIC = "public"


def wish_of(request: Any) -> Mapping[str, Any]:
    """The wish of the request; empty for one that came another way."""
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


def adapter_of(request: Any) -> str | None:
    """The part that the request's published adapter is; None without one."""
    path = request.lora_request.lora_path if request.lora_request is not None else ""
    return path.removeprefix(LORA_URL) if path.startswith(LORA_URL) else None


def is_withdrawn(request: Any, parts: Container[str]) -> bool:
    """Whether the request goes through a published adapter that is not among the parts that run."""
    adapter = adapter_of(request)
    return adapter is not None and adapter not in parts


@dataclass(frozen=True)
class Weights:
    """The weights of an engine: the label of the version, and the digest of each part, none before a commit."""

    version: str
    parts: Mapping[str, str] = field(default_factory=dict)

    def of(self, request: Any) -> str:
        """The weights that compute the request: those of the base, of a draft and of its own adapter."""
        return self._with(adapter_of(request))

    def all(self) -> set[str]:
        """The weights that any request may be computed by."""
        return {self._with(None), *(self._with(part) for part in self.parts if part.startswith(LORA))}

    def _with(self, adapter: str | None) -> str:
        read = sorted(part for part in self.parts.items() if part[0] == adapter or not part[0].startswith(LORA))
        return hashlib.blake2b(repr(read).encode(), digest_size=16).hexdigest() if read else self.version


def ends(request: Any, version: str, parts: Container[str] = ()) -> bool:
    """Whether the commit of `version`, with which `parts` run, ends this request."""
    wish = wish_of(request)
    begun = request.num_computed_tokens > 0 or request.num_output_tokens > 0
    barred = not allows(wish, version) or is_withdrawn(request, parts)
    return barred or (begun and wish.get("policy") in ("abort", "finish"))


def end_barred(core: Any, version: str) -> None:
    """End, in the engine and for their clients, the requests that must see no token of `version`."""
    from vllm.v1.request import RequestStatus

    left = [r for r in core.scheduler.requests.values() if not r.is_finished()]
    doomed = [r.request_id for r in left if ends(r, version, core._hotswap_weights.parts)]
    if doomed:
        ended = core.scheduler.finish_requests(doomed, RequestStatus.FINISHED_ABORTED)
        core._send_abort_outputs(ended)


def empty_pools(processor: Any, outputs: Iterable[Any]) -> None:
    """Give the requests that pool and that the engine ended an empty output, without which vLLM's processor dies."""
    from vllm.v1.engine import FinishReason
    from vllm.v1.engine.output_processor import EMPTY_CPU_TENSOR

    for output in outputs:
        if output.finish_reason == FinishReason.ABORT and output.pooling_output is None:
            state = processor.request_states.get(output.request_id)
            if state is not None and state.detokenizer is None:
                output.pooling_output = EMPTY_CPU_TENSOR


HASH_BYTES = 32
PRIVATE = ""  # in place of the weights


def namespace(weights: str, salt: str | None) -> str:
    """The cache salt under `weights` of a request that came with `salt` ("scope|client's own")."""
    return f"{weights}|{salt or ''}"


def namespace_of(request: Any) -> str:
    """The weights whose blocks the request shares; PRIVATE if it shares none."""
    return str(request.cache_salt or "").split("|", 1)[0]


def enter(request: Any, weights: str) -> None:
    """Hash all of the request's blocks under `weights`; nothing of it may be computed yet, or any more."""
    own = (request.cache_salt or "|").split("|", 1)[1]
    request.cache_salt = namespace(weights, own)
    request._block_hasher = getattr(request, "_hotswap_hasher", request._block_hasher)
    request._hotswap_course = None
    request.block_hashes.clear()
    request.update_block_hashes()


def go_private(request: Any, block_size: int) -> None:
    """Keep the hashes of the blocks that are full; give all later ones hashes of their own. `block_size` in tokens."""
    if namespace_of(request) == PRIVATE:
        return
    full = min(request.num_computed_tokens, request.num_tokens) // block_size
    request.cache_salt = namespace(PRIVATE, request.cache_salt.split("|", 1)[1])
    if request._block_hasher is None:  # prefix caching is off
        return
    request._hotswap_hasher = getattr(request, "_hotswap_hasher", request._block_hasher)
    request._block_hasher = functools.partial(_unguessable, block_size)
    del request.block_hashes[full:]
    request.update_block_hashes()
    rekeyed(request, full)


def _unguessable(block_size: int, request: Any) -> list[bytes]:
    """Hashes for the full blocks that have none yet."""
    missing = request.num_tokens // block_size - len(request.block_hashes)
    return [secrets.token_bytes(HASH_BYTES) for _ in range(missing)]


def replay_of(request: Any) -> Mapping[str, Any]:
    """The replay that goes with a request; empty for most."""
    replay: Mapping[str, Any] = wish_of(request).get("replay") or {}
    return replay


def extended(original: Callable[..., Any]) -> Callable[..., Any]:
    """`EngineCore.preprocess_add_request`, with the tokens of a replay behind the prompt."""

    @functools.wraps(original)
    def preprocess_add_request(self: Any, request: Any) -> Any:
        if replay := replay_of(request):
            extend(request, replay)
        return original(self, request)

    return preprocess_add_request


def extend(request: Any, replay: Mapping[str, Any]) -> None:
    """The request that is left of it. Its last token is left out where nothing follows: the context may be full."""
    written = replay["tokens"][:-1] if replay["ended"] else replay["tokens"]
    params = request.sampling_params.clone()
    params.max_tokens = 1 if replay["ended"] else max(1, params.max_tokens - len(written))
    params.min_tokens = max(0, params.min_tokens - len(written))
    if params.seed is not None:  # the same one would choose the next token with the noise of the first
        so_far = hashlib.blake2b(repr((params.seed, list(written))).encode(), digest_size=8).digest()
        params.seed = int.from_bytes(so_far) >> 1
    request.sampling_params = params
    request.prompt_token_ids = [*request.prompt_token_ids, *written]


def registered(original: Callable[..., Any]) -> Callable[..., Any]:
    """`OutputProcessor.add_request`, with the state of a replay brought to its last token."""

    @functools.wraps(original)
    def add_request(self: Any, request: Any, *args: Any, **kwargs: Any) -> None:
        original(self, request, *args, **kwargs)
        if replay := replay_of(request):
            advance(self.request_states[request.request_id], replay)

    return add_request


def advance(state: Any, replay: Mapping[str, Any]) -> None:
    """Bring a `RequestState` to where it was when the tokens of `replay` had been generated and told."""
    tokens = list(replay["tokens"])
    state.weight_version_starts = [(str(version), start) for version, start in replay["spans"]]
    state.hotswap_prompt = [(end, str(version)) for end, version in replay["prompt"]]
    state.detokenizer.update(list(tokens), False)
    _note_logprobs(state.logprobs_processor, tokens)
    state.sent_tokens_offset = len(tokens)
    state.hotswap_replay = state._new_completion_output(tokens, None, None)


def _note_logprobs(processor: Any, tokens: list[int]) -> None:
    """Positions without a value: later ones are decoded in their light, and nobody is told these again."""
    if processor.logprobs is None:
        return
    import numpy as np
    from vllm.v1.outputs import LogprobsLists

    ids = np.array(tokens, dtype=np.int64).reshape(-1, 1)
    processor._update_sample_logprobs(LogprobsLists(ids, np.zeros(ids.shape), np.ones(len(tokens), dtype=np.int64)))
