"""No prompt with an id that the model lacks reaches the engine, however the route renders it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.inputs import PlaceholderRange

from server.instance.requests import check, known_ids

SIZE = 512


def token(*ids: int) -> dict[str, Any]:
    return {"type": "token", "prompt_token_ids": list(ids)}


def image(*ids: int, offset: int, length: int) -> dict[str, Any]:
    places = {"image": [PlaceholderRange(offset=offset, length=length)]}
    return {"type": "multimodal", "prompt_token_ids": list(ids), "mm_placeholders": places}


@pytest.mark.parametrize(
    "prompt",
    [
        token(511, SIZE),
        token(-1, 5),
        token(5, 2**40),
        {"type": "enc_dec", "encoder_prompt": token(SIZE), "decoder_prompt": token(1)},
        {"type": "enc_dec", "encoder_prompt": token(1), "decoder_prompt": token(SIZE)},
        {"type": "embeds", "prompt_embeds": None, "prompt_token_ids": [SIZE]},
        image(600, 600, SIZE, offset=0, length=2),
        {"type": "multimodal", "prompt_token_ids": [1], "mm_placeholders": {}, "encoder_prompt_token_ids": [SIZE]},
    ],
)
def test_an_id_that_the_model_lacks_is_refused(prompt: dict[str, Any]) -> None:
    with pytest.raises(VLLMValidationError, match="outside the model's vocabulary of 512"):
        check(prompt, SIZE)


@pytest.mark.parametrize("prompt", [token(0, 511), token(), image(600, 600, 5, offset=0, length=2)])
def test_ids_of_the_model_and_placeholders_of_an_image_pass(prompt: dict[str, Any]) -> None:
    check(prompt, SIZE)


@pytest.mark.parametrize("prompt", ["text", {"prompt": "text"}, {"prompt_token_ids": [5]}])
def test_a_prompt_that_nobody_rendered_is_no_way_around(prompt: Any) -> None:
    with pytest.raises(TypeError, match="rendered"):
        check(prompt, SIZE)


async def test_it_raises_before_a_stream_begins_and_in_every_part_of_one_that_is_sent() -> None:
    def generate(prompt: Any, params: Any, request_id: str) -> AsyncIterator[Any]:
        async def parts() -> AsyncIterator[Any]:
            if isinstance(prompt, dict):
                yield prompt
                return
            async for part in prompt:
                yield part

        return parts()

    checked = known_ids(generate, SIZE)
    with pytest.raises(VLLMValidationError):
        checked(token(SIZE), None, "a")  # not first when it is awaited: the head of an answer is not out yet
    assert [part async for part in checked(prompt=token(5), params=None, request_id="b")] == [token(5)]

    async def spoken() -> AsyncIterator[Any]:
        yield SimpleNamespace(prompt=token(5))
        yield SimpleNamespace(prompt=token(SIZE))

    heard = checked(spoken(), None, "c")
    assert (await anext(heard)).prompt == token(5)
    with pytest.raises(VLLMValidationError):
        await anext(heard)
