"""Swaps under real traffic: real vLLM, the real OpenAI SDK, real processes."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import httpx
import pytest
import torch
from openai import AsyncOpenAI
from safetensors.torch import load_file, save_file

from tests.asking import Labelled
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


def test_tensors_that_no_engine_reads_change_no_answer(
    live: LiveServer, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    live.push(checkpoints["b"])
    expected = live.generate([3, 4, 5], 12)["choices"][0]["token_ids"]
    live.push(checkpoints["a"])
    old = tmp_path / "old"
    shutil.copytree(checkpoints["b"], old)
    tables = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.full((4,), 100.0) for i in range(2)}
    tensors = {name: tensor for file in old.glob("*.safetensors") for name, tensor in load_file(file).items()}
    save_file(tensors | tables, old / "model.safetensors")
    live.push(old)
    assert live.generate([3, 4, 5], 12)["choices"][0]["token_ids"] == expected


def test_a_checkpoint_in_float32_is_converted_to_what_is_served(
    live: LiveServer, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """As trainers save it that have float32 masters. Without `cast` the refusal names the way."""
    live.push(checkpoints["b"])
    expected = live.generate([3, 4, 5], 12)["choices"][0]["token_ids"]
    before = live.push(checkpoints["a"])
    masters = tmp_path / "masters"
    shutil.copytree(checkpoints["b"], masters)
    tensors = {name: tensor for file in masters.glob("*.safetensors") for name, tensor in load_file(file).items()}
    save_file({name: tensor.float() for name, tensor in tensors.items()}, masters / "model.safetensors")
    config = json.loads((masters / "config.json").read_text())
    (masters / "config.json").write_text(json.dumps(config | {"dtype": "float32", "torch_dtype": "float32"}))
    refused = live.admin.post("/admin/weights", json={"path": str(masters)})
    assert refused.status_code == 409, refused.text
    assert "hotswap weights push --cast" in refused.json()["error"]["message"]
    assert live.active() == before
    answer = live.admin.post("/admin/weights", json={"path": str(masters), "cast": True})
    assert answer.status_code == 200, answer.text
    assert live.generate([3, 4, 5], 12)["choices"][0]["token_ids"] == expected


@pytest.mark.broad
def test_two_hundred_swaps_under_load(live: LiveServer, checkpoints: dict[str, Path]) -> None:
    """No failed answer and, by the history, no truncated one; memory and descriptors grow by less than a slot."""
    published = [live.push(checkpoints[f"say-{i}"]) for i in (0, 1)]

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
                live.rollback()

    with Labelled(live.url, 4, tokens=64) as clients:
        swap(20)
        shm, fds, rss = usage()
        swap(200)
        shm_after, fds_after, rss_after = usage()
    slot = max(f.stat().st_size for f in live.processes.arena.iterdir())
    assert not clients.failures
    assert clients.answers.total() > 20
    assert shm_after - shm <= slot
    assert fds_after - fds <= 8
    assert rss_after - rss <= max(slot, 24 << 20)


@pytest.mark.parametrize("stream", [True, False])
async def test_client_that_leaves_frees_its_request(live: LiveServer, stream: bool) -> None:
    body = {"prompt_token_ids": [5] * 8, "max_tokens": 1000, "temperature": 0, "ignore_eos": True, "stream": stream}

    def metric(name: str) -> float:
        return live.engine_metric(f"vllm:{name}")

    before = metric("generation_tokens_total")
    async with httpx.AsyncClient(base_url=live.url, timeout=240) as client:
        asking = asyncio.create_task(client.post("/generate", json=body))
        await eventually(lambda: asyncio.to_thread(metric, "num_requests_running"))
        asking.cancel()
        await asyncio.wait([asking])

    def freed() -> bool:
        live.generate([5], 1)  # an engine that runs nothing tells nothing new
        return metric("num_requests_running") == 0

    await eventually(lambda: asyncio.to_thread(freed), 120)
    assert 0 < metric("generation_tokens_total") - before < 1000
