"""Effects of swaps on requests in flight and the prefix cache: real vLLM, asked at the instance as the gateway asks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.live import LiveServer, events

pytestmark = pytest.mark.engine
PROMPT = [(11 * j) % 400 + 5 for j in range(200)]


def ask(tokens: int, prompt: list[int] | None = None, **more: Any) -> dict[str, Any]:
    body = {"prompt_token_ids": prompt or [7, 8, 9], "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return body | {"stream": False} | more


def hits(live: LiveServer, prompt: list[int]) -> float:
    before = live.engine_metric("vllm:prefix_cache_hits_total")
    with httpx.Client(**live.direct()[0]) as client:
        headers = {"x-hotswap-cache-scope": "public"}
        client.post("/generate", json=ask(2, prompt), headers=headers).raise_for_status()
    return live.engine_metric("vllm:prefix_cache_hits_total") - before


@pytest.mark.parametrize("interval", [1, 8, 100])
async def test_an_event_has_as_many_tokens_as_were_asked_for(live: LiveServer, interval: int) -> None:
    """The last one may have fewer; together they are the whole answer."""
    async with httpx.AsyncClient(**live.direct()[0], timeout=60) as client:
        whole = (await client.post("/generate", json=ask(20, logprobs=True))).json()["choices"][0]
    body = ask(20, logprobs=True, stream_interval=interval) | {"stream": True}
    *told, done = [event async for event in events(live.direct()[0], body)]
    assert all(len(event["token_ids"]) >= interval for event in told[:-1])
    assert len(told) <= -(-20 // interval)
    assert [token for event in told for token in event["token_ids"]] == whole["token_ids"]
    assert [p for event in told for p in event["logprobs"]] == pytest.approx(whole["logprobs"], abs=1e-3)
    assert "".join(event["text"] for event in told) == whole["text"]
    assert "prompt_weight_versions" in told[0]
    assert told[-1]["finish_reason"] == "length"
    assert done["choices"][0]["weight_versions"] == whole["weight_versions"]


async def back(live: LiveServer) -> int:
    """Roll back, which takes no time on a busy machine either, unlike a push; the version that is then active."""
    answer = await asyncio.to_thread(live.admin.post, "/admin/weights/rollback")
    assert answer.status_code == 200, answer.text
    return int(answer.json()["version"])


def push_both(live: LiveServer, checkpoints: dict[str, Path]) -> None:
    """Weights `a` are active, and `b` a rollback away."""
    for name in ("b", "a"):
        live.push(checkpoints[name])


async def crossing(
    live: LiveServer, policy: str, tokens: int, go: Callable[[LiveServer], Coroutine[Any, Any, int]] | None = None
) -> tuple[list[int], dict[str, Any], int]:
    """A stream that one swap crosses, a rollback unless `go` says otherwise: its tokens, its last event, the version
    that `go` returns."""
    go = go or back
    seen: list[int] = []
    last: dict[str, Any] = {}
    swap: asyncio.Task[int] | None = None
    body = ask(tokens, PROMPT, stream=True)
    async for event in events(live.direct()[0], body, headers={"x-hotswap-policy": policy}):
        last = event
        seen += last.get("token_ids", [])
        swap = swap or asyncio.create_task(go(live))
    assert swap is not None
    return seen, last, await swap


async def test_after_a_rollback_it_goes_on_as_an_engine_that_only_knew_the_old_weights(
    live: LiveServer, checkpoints: dict[str, Path]
) -> None:
    """Also with `keep`: the version is withdrawn, and nothing of what it computed stays."""
    for _ in range(8):  # on a busy machine the swap may come when everything is said
        push_both(live, checkpoints)
        seen, last, version = await crossing(live, "keep", 700)
        if len(last["choices"][0]["weight_versions"]) > 1:
            break
    old, new = last["choices"][0]["weight_versions"]
    assert new["version"] == version
    assert old["end"] == new["start"] > 0
    assert new["end"] == len(seen) == 700
    fresh = await asyncio.to_thread(live.generate, PROMPT + seen[: old["end"]], 700 - old["end"])
    assert fresh["choices"][0]["token_ids"] == seen[old["end"] :]


async def test_no_later_request_hits_blocks_of_one_that_kept_its_old_keys_and_values(
    live: LiveServer, checkpoints: dict[str, Path]
) -> None:
    newer = 0  # of the pair that was pushed last

    async def forward(live: LiveServer) -> int:
        assert (await asyncio.to_thread(live.activate, newer)).status_code == 200
        return newer

    for _ in range(8):  # on a busy machine the swap may come when everything is said
        push_both(live, checkpoints)
        newer = live.active()
        live.rollback()
        seen, last, _ = await crossing(live, "keep", 700, forward)
        if len(last["choices"][0]["weight_versions"]) > 1:
            break
    old, _new = last["choices"][0]["weight_versions"]
    assert hits(live, PROMPT + seen) == 0
    assert live.admin.post("/admin/weights/rollback").status_code == 200
    assert 0 < hits(live, PROMPT + seen) <= len(PROMPT) + old["end"]


@pytest.mark.parametrize("policy", ["keep", "abort"])
async def test_a_beam_search_is_of_one_version_or_ends(
    live: LiveServer, checkpoints: dict[str, Path], policy: str
) -> None:
    """vLLM asks the engine for each token of each beam, and a swap may come between any two."""
    token = {await asyncio.to_thread(live.push, checkpoints[f"say-{i}"]): 100 + i for i in (0, 1)}
    body = {"prompt": PROMPT, "max_tokens": 200, "use_beam_search": True, "n": 2, "ignore_eos": True}
    headers, crossed = {"x-hotswap-policy": policy}, 0
    async with httpx.AsyncClient(**live.direct()[0], timeout=60) as client:
        for _ in range(8):  # a swap before the search or behind it shows nothing
            asked = client.post("/v1/completions", json=body | {"return_token_ids": True}, headers=headers)
            search = asyncio.create_task(asked)
            active = await back(live)
            while not search.done():
                active = await back(live)
            answer = await search
            if answer.status_code != 200:
                assert (answer.status_code, answer.json()["error"]["code"]) == (409, "weights_changed")
                assert policy == "abort"
                return
            for choice in answer.json()["choices"]:
                [wrote], [read] = choice["weight_versions"], choice["prompt_weight_versions"]
                assert wrote == {"version": wrote["version"], "start": 0, "end": 200}
                assert read == {"version": wrote["version"], "start": 0, "end": len(PROMPT)}
            assert set(answer.json()["choices"][0]["token_ids"]) == {token[wrote["version"]]}
            crossed += wrote["version"] != active
    assert (policy, crossed > 0) == ("keep", True)
