"""Swaps under real traffic: real vLLM, the real OpenAI SDK, real processes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest
from openai import AsyncOpenAI

from tests import stock
from tests.live import LiveServer
from tests.waiting import eventually

pytestmark = pytest.mark.engine


async def test_openai_sdk_streams_chat_through_swaps(live: LiveServer, checkpoints: dict[str, Path]) -> None:
    """The strict SDK keeps streaming; each chunk's extra field names the version whose token it carries."""
    says = {live.push(checkpoints["say-2"]): 102}

    async def swap() -> None:
        for i in range(5):
            says[await asyncio.to_thread(live.push, checkpoints[f"say-{i % 4}"])] = 100 + i % 4

    swapping = asyncio.create_task(swap())
    client = AsyncOpenAI(base_url=live.url + "/v1", api_key="unused")
    checked: list[tuple[str, int]] = []

    async def stream() -> None:
        while not swapping.done():
            chunks = await client.chat.completions.create(
                model=live.name,
                messages=[{"role": "user", "content": "hello"}],
                max_tokens=200,
                temperature=0,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            spans: list[dict[str, int]] = []
            async for chunk in chunks:
                if chunk.choices and (content := chunk.choices[0].delta.content):
                    spans = (chunk.choices[0].model_extra or {}).get("weight_versions", [])
                    if len(spans) <= 1:
                        checked.append((content, (chunk.model_extra or {})["weight_version"]))

    await asyncio.gather(*(stream() for _ in range(4)))
    await swapping
    words = {v: live.client.post("/detokenize", json={"tokens": [token]}) for v, token in says.items()}
    names = {v: answer.json()["prompt"] for v, answer in words.items()}
    # A chunk may carry several tokens when the reader lags; all of one version, or it would list `weight_versions`.
    wrong = [(content, v) for content, v in checked if content.replace(names[v], "")]
    assert not wrong
    assert len({v for _, v in checked}) >= 3


PROMPTS = [[(7 * i + 3 * j) % 500 + 3 for j in range(20 + 17 * i)] for i in range(6)]


def behind_stock_vllm(model: Path, answers: list[list[int]]) -> float:
    """By how much any token of the answers is less likely than what a fresh, stock engine of `model` prefers."""
    asked = [pair for n in range(0, len(answers), len(PROMPTS)) for pair in zip(PROMPTS, answers[n:], strict=False)]
    return max(stock.behind(model, asked))


@pytest.mark.broad
def test_after_swap_and_rollback_greedy_is_that_of_a_fresh_engine(
    live: LiveServer, checkpoints: dict[str, Path]
) -> None:
    """Prefix cache on, same prompts before and after: stale keys or values would show at once."""
    given: dict[str, list[list[int]]] = {"a": [], "b": []}

    def answer(name: str) -> None:
        given[name] += [live.generate(p, 40)["choices"][0]["token_ids"] for p in PROMPTS]

    live.push(checkpoints["a"])
    answer("a")
    answer("a")  # from the prefix cache
    live.push(checkpoints["b"])
    answer("b")
    for name in ("a", "b"):
        assert live.admin.post("/admin/weights/rollback").status_code == 200
        answer(name)
    for name, other in (("a", "b"), ("b", "a")):
        assert behind_stock_vllm(checkpoints[name], given[name]) < stock.ROUNDING
        assert behind_stock_vllm(checkpoints[name], given[other]) > 5 * stock.ROUNDING


@pytest.mark.broad
async def test_two_hundred_swaps_under_load(live: LiveServer, checkpoints: dict[str, Path]) -> None:
    """No failed or truncated answer; shared memory, descriptors and resident memory grow by less than a slot."""
    published = [live.push(checkpoints[f"say-{i}"]) for i in (0, 1)]
    finished, stop = 0, asyncio.Event()

    async def load() -> None:
        nonlocal finished
        async with httpx.AsyncClient(base_url=live.url, timeout=60) as client:
            while not stop.is_set():
                body = {"prompt_token_ids": [5, 6], "max_tokens": 64, "temperature": 0, "ignore_eos": True}
                answer = await client.post("/generate", json=body | {"stream": False})
                assert answer.status_code == 200, answer.text
                (choice,) = answer.json()["choices"]
                assert len(choice["token_ids"]) == 64
                finished += 1

    def usage() -> tuple[int, int, int]:
        processes = live.tree()
        shm = sum(f.stat().st_blocks * 512 for f in live.processes.arena.iterdir())
        return shm, sum(p.num_fds() for p in processes), sum(p.memory_info().rss for p in processes)

    def swap(count: int) -> None:
        for i in range(count):
            # Alternately a fresh version and a step back to the one before.
            if i % 4 == 0:
                published.append(live.push(checkpoints[f"say-{i // 4 % 4}"]))
            else:
                assert live.admin.post("/admin/weights/rollback").status_code == 200

    tasks = [asyncio.create_task(load()) for _ in range(4)]
    await asyncio.to_thread(swap, 20)
    shm, fds, rss = usage()
    await asyncio.to_thread(swap, 200)
    shm_after, fds_after, rss_after = usage()
    stop.set()
    await asyncio.gather(*tasks)
    slot = max(f.stat().st_size for f in live.processes.arena.iterdir())
    assert finished > 20
    assert shm_after - shm <= slot
    assert fds_after - fds <= 8
    assert rss_after - rss <= max(slot, 24 << 20)


@pytest.mark.parametrize("stream", [True, False])
async def test_client_that_leaves_frees_its_request(live: LiveServer, stream: bool) -> None:
    body = {"prompt_token_ids": [5] * 8, "max_tokens": 1000, "temperature": 0, "ignore_eos": True, "stream": stream}

    def metric(name: str) -> float:
        return live.engine_metric(f"vllm:{name}")

    before = metric("generation_tokens_total")
    async with httpx.AsyncClient(base_url=live.url, timeout=60) as client:
        asking = asyncio.create_task(client.post("/generate", json=body))
        await eventually(lambda: asyncio.to_thread(metric, "num_requests_running"))
        asking.cancel()
        await asyncio.wait([asking])

    def freed() -> bool:
        live.generate([5], 1)  # an engine that runs nothing tells nothing new
        return metric("num_requests_running") == 0

    await eventually(lambda: asyncio.to_thread(freed))
    assert 0 < metric("generation_tokens_total") - before < 1000
