"""Prompts that no engine gets: those that would take minutes and gigabytes, and ids that the model lacks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.inputs import PlaceholderRange

from server.instance.inflight import Inflight
from server.instance.provenance import Trace, current_trace, traced
from server.instance.requests import MOST_SEQUENCES, MOST_TEXT, bound_renderer, bound_scoring, check, known_ids


class Renderer:
    """As vLLM's: `render_cmpl_async` tokenizes its prompts by the other method."""

    def __init__(self) -> None:
        self.tokenized: list[Any] = []

    async def tokenize_prompt_async(self, prompt: Any, params: Any) -> Any:
        self.tokenized.append(prompt)
        return prompt

    async def render_cmpl_async(self, prompts: Any, params: Any = None) -> Any:
        return await asyncio.gather(*(self.tokenize_prompt_async(p, params) for p in prompts))


@pytest.mark.parametrize("length", [1000, 2**20])
async def test_a_prompt_is_bounded_as_text_and_as_ids(length: int) -> None:
    renderer = Renderer()
    bound_renderer(renderer, length)
    most = max(MOST_TEXT, 8 * length)
    for good in ({"prompt": "x" * most}, {"prompt_token_ids": [1] * 5}, {"prompt_embeds": None}):
        await renderer.render_cmpl_async([good])
    for bad in (
        {"prompt": "x" * (most + 1)},
        {"prompt_token_ids": [1] * (most + 1)},
        {"encoder_prompt": {"prompt": "x" * (most + 1)}, "decoder_prompt": None},
    ):
        with pytest.raises(VLLMValidationError, match=f"send {most} at most"):
            await renderer.render_cmpl_async([bad])
    assert len(renderer.tokenized) == 3


async def test_the_prompts_of_a_request_are_counted_before_any_is_tokenized() -> None:
    renderer = Renderer()
    bound_renderer(renderer, 1000)
    with pytest.raises(VLLMValidationError, match=f"{MOST_SEQUENCES + 1} prompts"):
        await renderer.render_cmpl_async([{"prompt": "a"}] * (MOST_SEQUENCES + 1))
    assert not renderer.tokenized


async def test_prompts_times_choices_are_counted_as_long_as_they_run() -> None:
    async def generate(*_: Any, **__: Any) -> AsyncIterator[Any]:
        yield SimpleNamespace(outputs=[], prompt_token_ids=[])

    wrapped = traced(generate, Inflight())
    current_trace.set(Trace())

    def ask(n: int) -> Any:
        return wrapped({}, SimpleNamespace(n=n, extra_args=None, prompt_logprobs=None), "id")

    for _ in range(3):  # one after the other, as beam search does
        assert len([o async for o in ask(MOST_SEQUENCES)]) == 1
    half = ask(MOST_SEQUENCES // 2)
    other = ask(MOST_SEQUENCES // 2)
    with pytest.raises(VLLMValidationError, match=f"{MOST_SEQUENCES + 1} prompts and choices"):
        ask(1)
    for running in (half, other):
        assert len([o async for o in running]) == 1
    ask(1)


@pytest.mark.parametrize(
    ("query", "items", "good"),
    [
        ("hi", ["a"] * 1000, True),
        ("hi", ["a"] * (MOST_SEQUENCES + 1), False),
        ("x" * (MOST_TEXT + 1), ["a"], False),
        ([1] * 1000, ["a"] * 2000, False),  # the query is copied for each item
        ("hi", ["x" * MOST_TEXT], False),
    ],
)
async def test_scoring_is_bounded_by_all_its_prompts(query: Any, items: list[str], good: bool) -> None:
    class Serving:
        async def create_generative_scoring(self, request: Any, raw: Any) -> str:
            return "scored"

    serving = Serving()
    bound_scoring(serving, 1000)
    score = serving.create_generative_scoring(SimpleNamespace(query=query, items=items), None)
    if good:
        assert await score == "scored"
    else:
        with pytest.raises(VLLMValidationError, match=r"send .* at most"):
            await score


# ids that the model lacks, however the route renders them


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
