"""In the engine: the library that vLLM chose for a request compiles its grammar.

vLLM chooses for each request (`SamplingParams._validate_structured_outputs`), yet its engine compiles every grammar
with the library of the first request that had one (`StructuredOutputManager.grammar_init`). So who asked first would
decide whether a schema is obeyed whole or in part, or fails. vLLM takes this from the entry point
`vllm.general_plugins`, in every process it starts.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

from weightsync.vllm_engine.releases import known


def register() -> None:
    """Patch vLLM's classes; safe to call more than once in a process."""
    if not known():
        return
    from vllm.v1.structured_output import StructuredOutputManager
    from vllm.v1.structured_output.backend_guidance import GuidanceGrammar

    if not hasattr(StructuredOutputManager.grammar_init, "__wrapped__"):
        StructuredOutputManager.grammar_init = _by_library(StructuredOutputManager.grammar_init)
        GuidanceGrammar.fill_bitmask = _cropped(GuidanceGrammar.fill_bitmask)


def _by_library(grammar_init: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    @functools.wraps(grammar_init)
    def by_library(manager: Any, request: Any) -> None:
        if request.structured_output_request is None:
            return
        views: dict[str, Any] = manager.__dict__.setdefault("_hotswap_views", {})
        library = request.sampling_params.structured_outputs._backend
        view = views.get(library)
        if view is None:
            # The grammar is compiled in another thread, with the backend of the manager that began: a copy for each.
            view = copy.copy(manager)
            view.backend = None
        grammar_init(view, request)
        views[library] = view
        if manager.backend is None:
            manager.backend = view.backend
            manager._grammar_bitmask = _bitmask(manager.vllm_config)

    return by_library


def _bitmask(vllm_config: Any) -> Any:
    """[requests x positions, ids of the model / 32] int32, for all libraries: only llguidance's own may be wider."""
    import xgrammar

    rows = vllm_config.scheduler_config.max_num_seqs * (1 + vllm_config.num_speculative_tokens)
    return xgrammar.allocate_token_bitmask(rows, vllm_config.model_config.get_vocab_size())


def _cropped(fill_bitmask: Callable[[Any, Any, int], None]) -> Callable[[Any, Any, int], None]:
    """llguidance fills rows as long as the tokenizer, which may know ids that the model has not."""

    @functools.wraps(fill_bitmask)
    def cropped(grammar: Any, bitmask: Any, index: int) -> None:
        words = grammar.ll_tokenizer.vocab_size + 31 >> 5
        if words == bitmask.shape[1]:
            fill_bitmask(grammar, bitmask, index)
            return
        row = bitmask.new_empty((1, words))
        fill_bitmask(grammar, row, 0)
        bitmask[index] = row[0, : bitmask.shape[1]]

    return cropped
