"""How much text and how many prompts one request may bring, before vLLM makes tokens and requests of them.

A body of 16 MiB may be one text, for which the tokenizer takes minutes and gigabytes where nothing bounds it by the
context (`/tokenize`, `truncate_prompt_tokens`), or millions of prompts, each of which takes kilobytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

MOST_TEXT = 1 << 20  # characters or ids of one prompt; or 8 per token of the context, if that is more
MOST_SEQUENCES = 16_384  # prompts times choices that one request has in the engine at one time; vLLM's most for `n`


def bound_renderer(renderer: Any, max_model_len: int) -> None:
    """What vLLM's renderer is asked to tokenize, by any route. Larger prompts raise VLLMValidationError."""
    most = max(MOST_TEXT, 8 * max_model_len)
    tokenize, render = renderer.tokenize_prompt_async, renderer.render_cmpl_async

    async def tokenize_prompt_async(prompt: Any, params: Any) -> Any:
        for part in (prompt, prompt.get("encoder_prompt"), prompt.get("decoder_prompt")):
            if isinstance(part, Mapping):
                check_text(part.get("prompt") or part.get("prompt_token_ids"), most)
        return await tokenize(prompt, params)

    async def render_cmpl_async(prompts: Any, *args: Any, **kwargs: Any) -> Any:
        check_count(len(prompts))
        return await render(prompts, *args, **kwargs)

    renderer.tokenize_prompt_async, renderer.render_cmpl_async = tokenize_prompt_async, render_cmpl_async


def bound_scoring(serving: Any, max_model_len: int) -> None:
    """vLLM's `/generative_scoring`, which tokenizes in the event loop, and copies the query for each item."""
    most = max(MOST_TEXT, 8 * max_model_len)
    score = serving.create_generative_scoring

    async def create_generative_scoring(request: Any, *args: Any, **kwargs: Any) -> Any:
        check_count(len(request.items))
        check_text(request.query, most)
        check_size(len(request.query) * len(request.items) + sum(map(len, request.items)), most, "the prompts together")
        return await score(request, *args, **kwargs)

    serving.create_generative_scoring = create_generative_scoring


def check_text(prompt: str | Sequence[int] | None, most: int) -> None:
    """A prompt as text or ids. Raises VLLMValidationError."""
    check_size(len(prompt) if isinstance(prompt, str | list) else 0, most, "a prompt")


def check_size(size: int, most: int, what: str) -> None:
    """Raises VLLMValidationError."""
    if size > most:
        _refuse(f"{what} of {size} characters or ids; send {most} at most, or split the text")


def check_count(sequences: int) -> None:
    """Raises VLLMValidationError."""
    if sequences > MOST_SEQUENCES:
        _refuse(f"{sequences} prompts and choices in one request; send {MOST_SEQUENCES} at most")


def _refuse(message: str) -> None:
    from vllm.exceptions import VLLMValidationError

    raise VLLMValidationError(message, parameter="prompt")
