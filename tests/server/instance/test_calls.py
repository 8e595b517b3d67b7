"""Answers that take several calls of the engine, and a swap at any moment between their first token and their end.

vLLM's own beam search and tool loop run on a model of the engine, in the middleware: it knows which version wrote each
token, and does at a commit what weightsync/vllm_engine/engine_core/requests.py says.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
import torch
from vllm import CompletionOutput, PoolingParams, RequestOutput, SamplingParams
from vllm.entrypoints.generate.beam_search.online import BeamSearchOnlineMixin
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.inputs import tokens_input
from vllm.logprobs import Logprob
from vllm.outputs import WeightVersionSpan
from vllm.sampling_params import BeamSearchParams

from server.instance.inflight import Inflight, Problem
from server.instance.middleware import ProvenanceMiddleware
from server.instance.provenance import beamed, pooled, traced
from tests.server.instance.asgi import head, part, sent_by
from weightsync.vllm_engine.engine_core import requests

pytestmark = pytest.mark.engine
TOKENS, PROMPT = 3, [1, 2, 3, 4]
ONE: dict[str, dict[str, str]] = {  # wishes for which one version writes all of an answer
    "abort": {"policy": "abort"},
    "finish": {"policy": "finish"},
    "pinned": {"policy": "abort", "version": "1"},
    "impatient": {"policy": "finish", "finish-s": "0"},
    "impatient, pinned": {"policy": "abort", "finish-s": "0", "version": "1"},
}
WISHES = ONE | {"keep": {}, "recompute": {"policy": "recompute"}}


class Model:
    """One engine, which a swap to version 2 reaches at its `at`th moment."""

    def __init__(self, at: int) -> None:
        self.at, self.moments, self.inflight = at, 0, Inflight()
        self.version = self.inflight.active = 1
        self.wrote: list[list[int]] = []  # by choice of each call: the version of each token
        self.begun: list[SimpleNamespace] = []  # running requests
        self.swap: asyncio.Task[None] | None = None
        self.reached, self.told = asyncio.Event(), False  # `told`: it has given some output
        self.generate = traced(self._generate, self.inflight)
        self.encode = pooled(self._encode, self.inflight)

    async def moment(self) -> None:
        self.moments += 1
        if self.moments == self.at:
            self.reached.set()
            self.swap = asyncio.create_task(self._commit())
        await asyncio.sleep(0)

    async def _commit(self) -> None:
        async with self.inflight.closing(2):
            for request in self.begun:
                request.ended = requests.ends(request, "2")
            self.version = self.inflight.active = 2

    async def _generate(self, prompt: Any, params: Any, request_id: str, **_: Any) -> AsyncIterator[RequestOutput]:
        """The choices one after the other: as where the batch has no place for all."""
        request = SimpleNamespace(
            sampling_params=params, lora_request=None, num_computed_tokens=4, num_output_tokens=0, ended=False
        )
        for index in range(params.n):
            self.wrote.append(wrote := [])
            await self.moment()
            request.ended = not requests.allows(requests.wish_of(request), str(self.version))
            self.begun.append(request)
            for _ in range(params.max_tokens):
                if not request.ended:
                    wrote.append(self.version)
                    await self.moment()
                last = request.ended or len(wrote) == params.max_tokens
                ids = prompt.get("prompt_token_ids", PROMPT)
                yield self._output(
                    request_id, ids, index, wrote, ("abort" if request.ended else "length") if last else None
                )
                if request.ended:
                    return
                self.told = True
            self.begun.remove(request)

    @staticmethod
    def _output(name: str, prompt: list[int], index: int, wrote: list[int], finish: str | None) -> RequestOutput:
        spans, end = [], 0
        for version, tokens in itertools.groupby(wrote):
            start, end = end, end + len(list(tokens))
            spans.append(WeightVersionSpan(str(version), start, end))
        scores = [{token: Logprob(-1.0 - token / 10) for token in range(4)}]
        choice = CompletionOutput(index, "", [0], None, scores, finish_reason=finish, weight_versions=spans)
        return RequestOutput(name, None, prompt, None, [choice], finish is not None)

    async def _encode(self, prompt: Any, params: Any, request_id: str, **_: Any) -> AsyncIterator[Any]:
        await self.moment()
        self.wrote.append([self.version])
        await self.moment()
        self.told = True
        yield SimpleNamespace(outputs=SimpleNamespace(data=torch.zeros(4)), error=None)


Kind = Callable[[Model], AsyncIterator[int]]  # gives the numbers of choices that are complete


async def several(model: Model) -> AsyncIterator[int]:
    async for _ in model.generate({}, SamplingParams(n=2, max_tokens=TOKENS), "n"):
        pass
    yield 2


async def prompts(model: Model) -> AsyncIterator[int]:
    for name in ("a", "b"):  # as vLLM does with the pieces of a long recording
        async for _ in model.generate({}, SamplingParams(max_tokens=TOKENS), name):
            pass
        await model.moment()
    yield 2


async def vectors(model: Model) -> AsyncIterator[int]:
    for name in ("a", "b"):
        async for _ in model.encode("", PoolingParams(), name):
            pass
        await model.moment()
    yield 0


async def beams(model: Model) -> AsyncIterator[int]:
    tokenizer = SimpleNamespace(eos_token_id=99, decode=lambda tokens, **_: "")
    client = SimpleNamespace(generate=model.generate, input_processor=SimpleNamespace(resolve_watermarking=id))
    serving = SimpleNamespace(renderer=SimpleNamespace(get_tokenizer=lambda: tokenizer), engine_client=client)
    search = beamed(BeamSearchOnlineMixin.beam_search, model.inflight)
    params = BeamSearchParams(beam_width=2, max_tokens=TOKENS)
    asked = [tokens_input(ids) for ids in (PROMPT, PROMPT[:2])]
    searches = [search(serving, prompt=prompt, request_id="b", params=params) for prompt in asked]
    for one in reversed(searches):  # the later prompt is answered first
        async for _ in one:
            pass
    yield 4


async def tools(model: Model) -> AsyncIterator[int]:
    """vLLM asks the engine three times, with a tool between two of them."""
    left = iter((True, True, False))

    async def call_tool() -> None:
        await model.moment()

    context = SimpleNamespace(
        append_output=id, append_tool_output=id, call_tool=call_tool, need_builtin_tool_call=lambda: next(left)
    )
    serving = SimpleNamespace(model_config=SimpleNamespace(max_model_len=64), engine_client=model, _log_inputs=dict)
    serving._log_inputs = lambda *_, **__: None
    loop = OpenAIServingResponses._generate_with_builtin_tools
    async for _ in loop(serving, "t", {}, SamplingParams(max_tokens=TOKENS), context):  # type: ignore[arg-type]
        pass
    yield 1


KINDS: dict[str, tuple[str, Kind]] = {
    "n": ("/v1/completions", several),
    "prompts": ("/v1/completions", prompts),
    "vectors": ("/v1/embeddings", vectors),
    "beams": ("/v1/completions", beams),
    "beams of a chat": ("/v1/chat/completions", beams),
    "tools": ("/v1/responses", tools),
}


async def asked(model: Model, path: str, kind: Kind, wish: dict[str, str]) -> tuple[int, dict[str, Any]]:
    """(status, body) of the answer, when the swap is over too."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body: dict[str, Any] = {"object": "response"}
        try:
            (choices,) = [found async for found in kind(model)]
        except Problem:  # as vLLM's handlers of errors
            await send(head(b"application/json", 500))
        else:
            await send(head(b"application/json"))
            if path != "/v1/responses":
                body = {"choices": [{"index": i, "finish_reason": "length"} for i in range(choices)]}
        await send(part(orjson.dumps(body), more=False))

    headers = [(f"x-hotswap-{name}".encode(), value.encode()) for name, value in wish.items()]
    start, answer = await sent_by(ProvenanceMiddleware(app, lambda: model.version), path, headers=headers)
    if model.swap is not None:
        await model.swap
    return start["status"], orjson.loads(answer["body"])


def versions(spans: list[dict[str, int]]) -> list[int]:
    """By token."""
    assert [span["start"] for span in spans] == [0, *(span["end"] for span in spans)][: len(spans)]
    return [span["version"] for span in spans for _ in range(span["start"], span["end"])]


@pytest.mark.parametrize("wish", WISHES)
@pytest.mark.parametrize("name", KINDS)
async def test_a_swap_at_any_moment_of_an_answer_meets_all_of_it(name: str, wish: str) -> None:
    path, kind = KINDS[name]
    at, ended, crossed = 0, 0, 0
    while True:
        model = Model(at := at + 1)
        status, body = await asked(model, path, kind, WISHES[wish])
        wrote = [version for tokens in model.wrote for version in tokens]
        assert not model.inflight._wishes
        if status != 200:
            code = "version_mismatch" if "pinned" in wish and not model.told else "weights_changed"
            assert (status, body["error"]["code"]) == (409, code)
            ended += 1
            continue
        crossed += set(wrote) == {1, 2}
        if name.startswith("beams"):
            assert [versions(choice["weight_versions"]) for choice in body["choices"]] == [wrote[:TOKENS]] * 4
            prompts = [{"version": wrote[0], "start": 0, "end": end} for end in (4, 4, 2, 2)]
            assert [choice["prompt_weight_versions"] for choice in body["choices"]] == [[prompt] for prompt in prompts]
        elif name == "tools":
            assert versions(body["weight_versions"]) == wrote
            assert body["hotswap_usage"] == {"prompt_tokens": 3 * len(PROMPT), "completion_tokens": 3 * TOKENS}
        else:
            told = [versions(choice["weight_versions"]) for choice in body["choices"]]
            assert told == (model.wrote if body["choices"] else [])
        if model.swap is None:
            break
    assert at > 5
    assert bool(ended) == (wish not in ("keep", "recompute", "finish", "pinned"))
    assert bool(crossed) == (wish not in ONE and not name.startswith("beams"))


@pytest.mark.parametrize("name", KINDS)
async def test_a_client_that_leaves_ends_all_calls(name: str) -> None:
    """The swap that waits for the answer goes on at once."""
    model = Model(at=4)
    task = asyncio.create_task(asked(model, *KINDS[name], WISHES["finish"]))
    await model.reached.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert model.swap is not None
    moments = model.moments
    await asyncio.wait_for(model.swap, 1)
    for _ in range(20):
        await asyncio.sleep(0)
    assert (model.inflight._wishes, model.moments) == ({}, moments)
