"""The two streams the clients read, as the same few events: POST /generate, and OpenAI's POST /v1/completions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx
import orjson

from loadtest.demo.recipe import MODEL

SILENT = {"0": -100, "1": -100, "2": -100}  # logit bias against the special tokens, which have no text
Spans = list[dict[str, int]]


@dataclass(frozen=True)
class Delta:
    """Tokens that came in one event; `version` wrote the last of them."""

    text: str
    tokens: int
    version: int


@dataclass(frozen=True)
class End:
    """The stream's own account of itself: tokens in all, and which version wrote which of them."""

    tokens: int
    spans: Spans


class Refused(Exception):
    """The answer is not a stream, or the stream ends in an error."""


def generate_request(prompt: str, max_tokens: int) -> dict[str, Any]:
    """A greedy answer."""
    return {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0.0}


async def generate_events(response: httpx.Response) -> AsyncIterator[Delta | End]:
    """Of POST /generate. Raises Refused."""
    event = ""
    async for line in response.aiter_lines():
        if line.startswith("event: "):
            event = line.removeprefix("event: ")
        elif line.startswith("data: "):
            data = orjson.loads(line.removeprefix("data: "))
            if event == "token":
                yield Delta(data["text"], len(data["token_ids"]), data["weight_version"])
            elif event == "done":
                yield End(data["usage"]["completion_tokens"], data["choices"][0]["weight_versions"])
            else:
                raise Refused(str(data))


def completion_request(prompt: str, max_tokens: int) -> dict[str, Any]:
    """A sampled answer of exactly `max_tokens` tokens, all of which can be seen."""
    return {
        "model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "temperature": 1.0, "stream": True,
        "ignore_eos": True, "logit_bias": SILENT, "return_token_ids": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip


async def completion_events(response: httpx.Response) -> AsyncIterator[Delta | End]:
    """Of POST /v1/completions with usage. Raises Refused."""
    spans: Spans = []
    tokens = -1
    async for line in response.aiter_lines():
        if line == "data: [DONE]":
            yield End(tokens, spans)
        elif line.startswith("data: "):
            data = orjson.loads(line.removeprefix("data: "))
            if "error" in data:
                raise Refused(str(data["error"]))
            for choice in data["choices"]:
                if choice.get("token_ids"):
                    yield Delta(choice["text"], len(choice["token_ids"]), data["weight_version"])
                if choice["finish_reason"]:
                    spans = choice["weight_versions"]
            tokens = data["usage"]["completion_tokens"] if data.get("usage") else tokens
