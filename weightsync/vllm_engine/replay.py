"""Going on with an answer that another engine began: `sampling_params.extra_args["hotswap"]["replay"]`.

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
from collections.abc import Callable, Mapping
from typing import Any

from . import policies


def of(request: Any) -> Mapping[str, Any]:
    """The replay that goes with a request; empty for most."""
    replay: Mapping[str, Any] = policies.wish_of(request).get("replay") or {}
    return replay


def extended(original: Callable[..., Any]) -> Callable[..., Any]:
    """`EngineCore.preprocess_add_request`, with the tokens of a replay behind the prompt."""

    @functools.wraps(original)
    def preprocess_add_request(self: Any, request: Any) -> Any:
        if replay := of(request):
            extend(request, replay)
        return original(self, request)

    return preprocess_add_request


def extend(request: Any, replay: Mapping[str, Any]) -> None:
    """The request that is left of it. Its last token is left out where nothing follows: the context may be full."""
    written = replay["tokens"][:-1] if replay["ended"] else replay["tokens"]
    params = request.sampling_params.clone()
    params.max_tokens = 1 if replay["ended"] else max(1, params.max_tokens - len(written))
    params.min_tokens = max(0, params.min_tokens - len(written))
    request.sampling_params = params
    request.prompt_token_ids = [*request.prompt_token_ids, *written]


def registered(original: Callable[..., Any]) -> Callable[..., Any]:
    """`OutputProcessor.add_request`, with the state of a replay brought to its last token."""

    @functools.wraps(original)
    def add_request(self: Any, request: Any, *args: Any, **kwargs: Any) -> None:
        original(self, request, *args, **kwargs)
        if replay := of(request):
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
