"""The bounds of one request, before vLLM makes tokens and requests of it, and before the engine gets them.

Text and prompts: a body of 16 MiB may be one text, for which the tokenizer takes minutes and gigabytes where nothing
bounds it by the context (`/tokenize`, `truncate_prompt_tokens`), or millions of prompts, each of which takes kilobytes.

Token ids: an id beyond the embedding ends the engine's process. vLLM admits ids up to the larger of the tokenizer's and
the model's vocabulary, because placeholders of images and sound may lie beyond the model's; so it lets an id pass that
only a tokenizer knows. Here every call of the engine is checked, after rendering: text whose tokens the model lacks
too.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

MOST_TEXT = 1 << 20  # characters or ids of one prompt; or 8 per token of the context, if that is more
MOST_SEQUENCES = 16_384  # prompts times choices that one request has in the engine at one time; vLLM's most for `n`


def bound_renderer(renderer: Any, max_model_len: int) -> None:
    """Bounds the prompts that vLLM's renderer tokenizes, by any route. Larger ones raise VLLMValidationError."""
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
    score = serving.create_generative_scoring

    async def create_generative_scoring(request: Any, *args: Any, **kwargs: Any) -> Any:
        check_pairs(request.query, request.items, max_model_len)
        return await score(request, *args, **kwargs)

    serving.create_generative_scoring = create_generative_scoring


def bounded_scores(scores: Callable[..., Awaitable[Any]], max_model_len: int) -> Callable[..., Awaitable[Any]]:
    """vLLM's scores of pairs and its reranking, which copy the one text for each of many."""

    async def bounded(request: Any, *args: Any, **kwargs: Any) -> Any:
        pair = (request.query, request.documents) if hasattr(request, "query") else (request.data_1, request.data_2)
        check_pairs(*pair, max_model_len)
        return await scores(request, *args, **kwargs)

    return bounded


def check_pairs(one: Any, many: Any, max_model_len: int) -> None:
    """A text, ids, or texts of which each has a partner, and what they are paired with. Raises VLLMValidationError."""
    most = max(MOST_TEXT, 8 * max_model_len)
    firsts = one if isinstance(one, list) and one and isinstance(one[0], str | dict) else [one]
    seconds = many if isinstance(many, list) else [many]
    check_count(len(seconds))
    sizes = [len(text) if isinstance(text, str | list) else 0 for text in firsts]  # images have bounds of their own
    check_size(max(sizes), most, "a prompt")
    copies = len(seconds) if len(firsts) == 1 else 1
    rest = sum(len(text) for text in seconds if isinstance(text, str | list))
    check_size(copies * sum(sizes) + rest, most, "the prompts together")


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


def known_ids(call: Callable[..., AsyncIterator[Any]], vocabulary: int) -> Callable[..., AsyncIterator[Any]]:
    """`AsyncLLM.generate` or `encode`, which raises VLLMValidationError (a 400 on every route) before it begins."""

    def wrapper(prompt: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        if isinstance(prompt, AsyncGenerator):
            return call(_each_checked(prompt, vocabulary), *args, **kwargs)
        check(prompt, vocabulary)
        return call(prompt, *args, **kwargs)

    return wrapper


def check(prompt: Any, vocabulary: int) -> None:
    """Raises VLLMValidationError for a rendered prompt with an id that is not in 0 ... `vocabulary` - 1.

    Raises TypeError for a prompt that is still text: its ids are not known yet, so nobody has checked them.
    """
    if not isinstance(prompt, Mapping) or "type" not in prompt:
        raise TypeError("the engine takes rendered prompts only; render it first, so that its ids can be checked")
    for part in (prompt.get("encoder_prompt"), prompt.get("decoder_prompt")):
        if isinstance(part, Mapping):
            check(part, vocabulary)
    placeholders = [place for places in (prompt.get("mm_placeholders") or {}).values() for place in places]
    _check_ids(_without(prompt.get("prompt_token_ids") or (), placeholders), vocabulary)
    if prompt["type"] == "multimodal":
        _check_ids(prompt.get("encoder_prompt_token_ids") or (), vocabulary)


async def _each_checked(prompts: AsyncGenerator[Any, None], vocabulary: int) -> AsyncGenerator[Any, None]:
    async for part in prompts:
        check(part.prompt, vocabulary)
        yield part


def _without(ids: Any, placeholders: Iterable[Any]) -> Any:
    """The ids outside the places that embeddings of an image or a sound take."""
    if not placeholders:
        return ids
    taken = {at for place in placeholders for at in range(place.offset, place.offset + place.length)}
    return [token for at, token in enumerate(ids) if at not in taken]


def _check_ids(ids: Any, vocabulary: int) -> None:
    from vllm.exceptions import VLLMValidationError

    if ids and not 0 <= min(ids) <= max(ids) < vocabulary:
        bad = next(token for token in ids if not 0 <= token < vocabulary)
        raise VLLMValidationError(
            f"token id {bad} is outside the model's vocabulary of {vocabulary}; send ids from 0 to {vocabulary - 1}",
            parameter="prompt",
        )
