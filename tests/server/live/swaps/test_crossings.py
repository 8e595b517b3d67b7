"""Commits in the middle of prefills, samples, grammars and log-probabilities. Real vLLM, through the gateway.

Only real kernels show which weights computed a position: the simulator knows labels, not what they stand for.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import stock
from tests.live import LiveServer, events

pytestmark = pytest.mark.engine
Streamed = tuple[list[int], dict[str, Any]]


@asynccontextmanager
async def swapping(live: LiveServer, *directories: Path) -> AsyncIterator[dict[int, Path]]:
    """Publishes both, and goes from one to the other and back while the context is open; {version: directory}."""
    versions = {await asyncio.to_thread(live.push, directory): directory for directory in directories}
    over = asyncio.Event()

    async def swap() -> None:
        while not over.is_set():
            await asyncio.to_thread(live.rollback)

    task = asyncio.create_task(swap())
    try:
        yield versions
    finally:
        over.set()
        await task


def by_token(spans: list[dict[str, int]]) -> list[int]:
    """The version of every token."""
    return [span["version"] for span in spans for _ in range(span["start"], span["end"])]


# recompute, and what an engine says that has never seen the old weights -------------------------------------------


async def streamed(live: LiveServer, prompt: list[int], begun: asyncio.Event) -> Streamed:
    seen: list[int] = []
    last: dict[str, Any] = {}
    body = {"prompt_token_ids": prompt, "max_tokens": 600, "temperature": 0, "ignore_eos": True}
    async for event in events({"base_url": live.url}, body, headers={"x-hotswap-policy": "recompute"}):
        last = event
        seen += last.get("token_ids", [])
        if len(seen) >= 30:
            begun.set()
    return seen, last["choices"][0]


async def test_recompute_equals_a_fresh_stock_engine_of_the_new_weights(
    live: LiveServer, checkpoints: dict[str, Path]
) -> None:
    """Streams of several lengths cross one swap; what follows is what stock vLLM prefers after the tokens so far."""
    prompts = [[(13 * i + 5 * j) % 480 + 9 for j in range(15 + 40 * i)] for i in range(5)]
    for _ in range(8):  # on a busy machine the swap may come when everything is said
        for name in ("b", "a"):
            await asyncio.to_thread(live.push, checkpoints[name])
        begun = [asyncio.Event() for _ in prompts]
        streams = [asyncio.create_task(streamed(live, *each)) for each in zip(prompts, begun, strict=True)]
        await asyncio.gather(*(each.wait() for each in begun))
        await asyncio.to_thread(live.rollback)
        answers = await asyncio.gather(*streams)
        if all(choice["weight_versions"][0]["end"] < 500 for _, choice in answers):
            break
    crossed = []
    for prompt, (seen, choice) in zip(prompts, answers, strict=True):
        old, new = choice["weight_versions"]
        assert [old["start"], new["start"], new["end"]] == [0, old["end"], 600]
        assert old["end"] > 0
        crossed.append((prompt + seen[: old["end"]], seen[old["end"] :]))
    assert max(await asyncio.to_thread(stock.behind, checkpoints["b"], crossed)) < stock.ROUNDING
    assert min(await asyncio.to_thread(stock.behind, checkpoints["a"], crossed)) > 5 * stock.ROUNDING


# prefills in chunks --------------------------------------------------------------------------------------------------


async def test_a_prefill_that_a_swap_falls_into_says_which_weights_computed_which_part(
    live: LiveServer, checkpoints: dict[str, Path]
) -> None:
    """Constant-answer weights predict the same token everywhere: the prompt's own log-probabilities tell who ran."""
    split = 0
    async with (
        swapping(live, checkpoints["say-0"], checkpoints["say-1"]) as versions,
        httpx.AsyncClient(base_url=live.url, timeout=240) as client,
    ):
        says = {version: 100 + i for i, version in enumerate(versions)}

        async def ask(i: int) -> None:
            nonlocal split
            # New by its first two tokens: a block that is found in the cache is not computed again.
            prompt = [5 + i % 90, 5 + i // 90, *((i * 17 + 7 * j) % 90 + 5 for j in range(998))]
            body = {"model": live.name, "prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True}
            more = {"prompt_logprobs": 1, "return_token_ids": True}
            answer = await client.post("/v1/completions", json=body | more)
            assert answer.status_code == 200, answer.text
            (choice,) = answer.json()["choices"]
            ran = by_token(choice["prompt_weight_versions"])
            assert len(ran) == 1000
            assert choice["weight_versions"][0]["version"] == ran[-1]
            # Position j is predicted by what was computed at j - 1.
            firsts = [next(t for t, p in e.items() if p["rank"] == 1) for e in choice["prompt_logprobs"][1:]]
            assert [int(token) for token in firsts] == [says[version] for version in ran[:-1]]
            split += len(set(ran)) > 1

        for start in range(0, 600, 12):
            await asyncio.gather(*(ask(i) for i in range(start, start + 12)))
            if split:
                break
    assert split > 0, "no swap fell into a prefill"


def test_a_prompt_found_in_the_cache_names_the_one_version_that_computed_it(
    live: LiveServer, checkpoints: dict[str, Path]
) -> None:
    prompt = [(19 * j) % 430 + 5 for j in range(500)]
    versions = [live.push(checkpoints[name]) for name in ("a", "b")]
    for round_ in range(3):
        for version in reversed(versions):
            before = live.engine_metric("vllm:prefix_cache_hits_total")
            (choice,) = live.generate(prompt, 3)["choices"]
            assert choice["prompt_weight_versions"] == [{"version": version, "start": 0, "end": 500}]
            assert (live.engine_metric("vllm:prefix_cache_hits_total") > before) is (round_ > 0)
            live.rollback()


# samples, log-probabilities, grammars --------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("policy", ["keep", "recompute", "finish", "abort"])
async def test_several_samples_with_log_probabilities(
    live: LiveServer, checkpoints: dict[str, Path], policy: str
) -> None:
    await samples_keep_their_terms(live, checkpoints, policy)


async def samples_keep_their_terms(
    live: LiveServer, checkpoints: dict[str, Path], policy: str, samples: int = 3
) -> None:
    """Each sample has its own labels, true to the token, and one log-probability per token."""
    whole = crossed = ended = 0
    async with (
        swapping(live, checkpoints["say-0"], checkpoints["say-1"]) as versions,
        httpx.AsyncClient(base_url=live.url, timeout=240, headers={"x-hotswap-policy": policy}) as client,
    ):
        says = {version: 100 + i for i, version in enumerate(versions)}
        body = {"prompt_token_ids": [4, 5, 6], "n": samples, "max_tokens": 60, "ignore_eos": True, "logprobs": True}
        for i in range(200):
            if i >= 12 and (crossed or ended or policy == "finish"):  # on a busy machine swaps take longer than answers
                break
            answer = await client.post(
                "/generate", json=body | {"stream": False, "temperature": 0.01 if samples > 1 else 0, "seed": i}
            )
            if answer.status_code == 409:
                assert (policy, answer.json()["error"]["code"]) == ("abort", "weights_changed")
                ended += 1
                continue
            choices = answer.json()["choices"]
            assert [c["index"] for c in choices] == list(range(samples))
            for choice in choices:
                assert len(choice["logprobs"]) == len(choice["token_ids"]) == 60
                assert all(value <= 0 for value in choice["logprobs"])
                ran = by_token(choice["weight_versions"])
                assert choice["token_ids"] == [says[version] for version in ran]
                crossed += len(set(ran)) > 1
            whole += 1
    assert whole or policy == "abort"
    assert (crossed > 0) is (policy in ("keep", "recompute"))
    assert (ended > 0) is (policy == "abort")


SCHEMA = {"type": "string", "pattern": "[xyz]" * 200}  # leaves no room for blanks, which random weights like


@pytest.mark.sample(1)
@pytest.mark.parametrize("policy", ["recompute", "keep", "finish"])
async def test_an_answer_after_a_grammar_stays_in_it(
    live: LiveServer, checkpoints: dict[str, Path], policy: str
) -> None:
    crossed = 0
    async with (
        swapping(live, checkpoints["a"], checkpoints["b"]),
        httpx.AsyncClient(base_url=live.url, timeout=240, headers={"x-hotswap-policy": policy}) as client,
    ):
        for i in range(50):
            if i >= 5 and (crossed or policy == "finish"):
                break
            body = {
                "model": live.name,
                "messages": [{"role": "user", "content": "hi"}],
                "max_tokens": 400,
                "temperature": 0,
                "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}},
                "return_token_ids": True,
            }
            answer = await client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            (choice,) = answer.json()["choices"]
            assert choice["finish_reason"] == "stop", choice
            found = json.loads(choice["message"]["content"])
            assert len(found) == 200
            assert set(found) <= set("xyz")
            ran = by_token(choice["weight_versions"])
            assert len(ran) == len(choice["token_ids"])
            crossed += len(set(ran)) > 1
    assert (crossed > 0) is (policy != "finish")
