"""Token ids that the model has no embedding for never reach the engine, whichever route brings them.

An id beyond the embedding ends the engine's process. vLLM admits ids up to the larger of the tokenizer's and the
model's vocabulary, because placeholders of images and sound may lie beyond the model's; so it lets an id pass that only
a tokenizer knows. Here every call of the engine is checked, after rendering: text whose tokens the model lacks too.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping
from typing import Any


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
