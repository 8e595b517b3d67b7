"""Clients with different terms at once, through the gateway, while the weights change all the time.

Constant-answer weights: every token says which checkpoint wrote it. The server's history shows whether all labels are
true, and all terms kept (tests/live.py).

Only a real scheduler shows which requests of different terms meet in one batch when it is swapped.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from tests.live import LiveServer

pytestmark = pytest.mark.engine
PROMPT = [7, 8, 9]
TERMS = ("finish", "exact", "min", "abort", "recompute", "keep")


class Swaps:
    """The four checkpoints in turn, with rollbacks between, and which version is active."""

    def __init__(self, live: LiveServer, checkpoints: dict[str, Path]) -> None:
        self._live, self._checkpoints = live, checkpoints
        self.active = 0
        self.over = False

    def push(self, i: int) -> None:
        self.active = self._live.push(self._checkpoints[f"say-{i % 4}"])

    async def run(self, count: int, enough: Callable[[], bool]) -> None:
        """`count` swaps, and more until there are enough, ten times as many at most."""
        try:
            for i in range(10 * count):
                if i >= count and enough():
                    break
                if i % 25 == 0:  # a process of its own, and slow on a machine that is busy
                    await asyncio.to_thread(self.push, i // 25)
                else:  # back, and forth again
                    self.active = await asyncio.to_thread(self._live.rollback)
        finally:
            self.over = True


def headers_of(terms: str, active: int) -> dict[str, str]:
    bound = {"exact": {"x-hotswap-version": str(active)}, "min": {"x-hotswap-min-version": str(active)}}
    return bound.get(terms, {"x-hotswap-policy": terms})


async def ask(
    client: httpx.AsyncClient, model: str, route: str, stream: bool, headers: dict[str, str], tokens: int
) -> tuple[list[int], dict[str, Any], str]:
    """(tokens, last choice, error code): "" if there was no error."""
    body = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": stream}
    openai = {"model": model, "prompt": PROMPT, "return_token_ids": True}
    body |= openai if route == "/v1/completions" else {"prompt_token_ids": PROMPT}
    seen: list[int] = []
    last: dict[str, Any] = {}
    async with client.stream("POST", route, json=body, headers=headers) as answer:
        if answer.status_code != 200 or not stream:
            payload = orjson.loads(await answer.aread())
            if answer.status_code != 200:
                assert answer.status_code == 409, payload
                return [], {}, payload["error"]["code"]
            return payload["choices"][0]["token_ids"], payload["choices"][0], ""
        lines = answer.aiter_lines()
        async for line in lines:
            if not line.startswith("data: {"):
                continue
            event = orjson.loads(line.removeprefix("data: "))
            if event.get("error"):
                assert not [more async for more in lines if more], "an error is the last event"
                return seen, {}, event["error"]["code"]
            choice = event["choices"][0] if "choices" in event else event
            seen += choice.get("token_ids") or []
            last = choice if "weight_versions" in choice else last
    return seen, last, ""


@pytest.mark.parametrize("count", [50, pytest.param(150, marks=pytest.mark.broad)])
async def test_every_client_gets_its_terms_while_the_weights_change_all_the_time(
    live: LiveServer, checkpoints: dict[str, Path], count: int
) -> None:
    swaps = Swaps(live, checkpoints)
    for i in (2, 3):
        await asyncio.to_thread(swaps.push, i)
    whole, cut, mixed = Counter[str](), Counter[tuple[str, str]](), Counter[str]()

    async def client_of(terms: str, client: httpx.AsyncClient) -> None:
        kinds = itertools.cycle(itertools.product(("/generate", "/v1/completions"), (True, False)))
        while not swaps.over:
            route, stream = next(kinds)
            asked = swaps.active
            length = 25 if terms in ("finish", "exact", "min") else 120
            tokens, choice, code = await ask(client, live.name, route, stream, headers_of(terms, asked), length)
            if code:
                cut[terms, code] += 1
                # All it saw before the end is of one version; nothing at all if it was not let in.
                assert len(set(tokens)) <= 1 if code == "weights_changed" else not tokens
                continue
            spans = choice["weight_versions"]
            (prompt,) = choice["prompt_weight_versions"]
            assert prompt == {"version": spans[0]["version"], "start": 0, "end": len(PROMPT)}
            mixed[terms] += len(spans) > 1
            whole[terms] += 1

    def enough() -> bool:
        return (
            all(whole[t] for t in TERMS)
            and mixed["keep"] > 0 < mixed["recompute"]
            and cut["abort", "weights_changed"] > 0
        )

    async with httpx.AsyncClient(base_url=live.url, timeout=240) as client:
        await asyncio.gather(swaps.run(count, enough), *(client_of(terms, client) for terms in TERMS))
    print(dict(whole), dict(cut), dict(mixed))
    assert all(whole[terms] for terms in TERMS), whole
    assert set(cut) <= {("abort", "weights_changed"), ("exact", "version_unavailable"), ("min", "version_unavailable")}
    assert cut["abort", "weights_changed"] > 0
    assert mixed["keep"] > 0 < mixed["recompute"], "no answer crossed a swap"
