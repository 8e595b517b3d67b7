"""Conversations whose weights are swapped after every turn: what it saves to keep their KV cache, and what it costs.

    hotswap bench sessions [--json FILE] [--small]

Conversations with SmolLM2-135M (`--small`: a few with a tiny random model) take their turns together. Before each turn
every weight moves by a normal step of DRIFT of its tensor's standard deviation, and the version is swapped in. Each
conversation runs once for each `kv`, over the same versions. The figures are of the turns after the first one: prompt
tokens that the engine computed, by vLLM's counters; the time to the first token; and the divergence of the tokens that
were sampled from the distribution of the weights that wrote them. For that the engine computes each prompt and answer
again, whole, with the same weights (`prompt_logprobs`, which reads no cache). The divergence of `version` is the noise
of the measurement: its cache is of the very weights.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import orjson
import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file
from tokenizers import Tokenizer

import loadtest
from loadtest.measure.run import up, with_machine
from loadtest.models.checkpoints import make_checkpoint
from loadtest.models.smollm import smollm
from server.cli.admin import AdminClient
from server.up.server import Server
from weightsync import Publisher

MODEL = "talk"
WAYS = ("version", "session", "any")
CONVERSATIONS, TURNS = 4, 6
FIRST_TOKENS, TURN_TOKENS, ANSWER_TOKENS = 1024, 256, 64  # blocks have 128 tokens on CPU
DRIFT = 0.003
ARGS = ("--max-num-seqs", "8", "--max-model-len")
Tensors = dict[str, torch.Tensor]


@dataclass
class Turns:
    """Of one way, over all conversations and the turns after the first one."""

    queried: float = 0.0  # prompt tokens that were looked up in the cache
    found: float = 0.0
    first_token_s: list[float] = field(default_factory=list)
    differences: list[float] = field(default_factory=list)  # of log-probabilities: computed anew less as sampled
    versions: int = 0  # most that computed a prompt

    def figures(self) -> dict[str, float]:
        """k1 and k3 estimate the divergence of what was sampled from the weights that wrote it, in nats a token."""
        k3 = [math.exp(d) - 1 - d for d in self.differences]
        return {
            "prompt_tokens": self.queried,
            "computed_tokens": self.queried - self.found,
            "first_token_median_s": round(statistics.median(self.first_token_s), 4),
            "first_token_longest_s": round(max(self.first_token_s), 4),
            "k1": round(-statistics.fmean(self.differences), 6),
            "k3": round(statistics.fmean(k3), 6),
            "largest_difference": round(max(map(abs, self.differences)), 4),
            "versions_of_a_prompt": self.versions,
        }


class Talks:
    """The conversations of one way. `texts`: the user's turns, as token ids."""

    def __init__(self, client: httpx.AsyncClient, instance: str, way: str, texts: list[list[list[int]]]) -> None:
        self._client, self._instance, self._way, self._texts = client, instance, way, texts
        self._said: list[list[int]] = [[] for _ in texts]
        self.turns = Turns()

    async def turn(self, number: int) -> None:
        before = await self._counters()
        answers = await asyncio.gather(*(self._ask(i, number) for i in range(len(self._texts))))
        after = await self._counters()
        scores = await asyncio.gather(*(self._score(i, len(answer)) for i, (answer, _, _) in enumerate(answers)))
        if number == 0:
            return
        self.turns.queried += after[0] - before[0]
        self.turns.found += after[1] - before[1]
        for (_, sampled, first_s), anew in zip(answers, scores, strict=True):
            self.turns.first_token_s.append(first_s)
            self.turns.differences += [a - s for a, s in zip(anew, sampled, strict=True)]

    async def _ask(self, talk: int, number: int) -> tuple[list[int], list[float], float]:
        """Token ids of the answer, their log-probabilities, and the seconds to the first one."""
        self._said[talk] += self._texts[talk][number]
        body = {
            "model": MODEL, "prompt": self._said[talk], "max_tokens": ANSWER_TOKENS, "ignore_eos": True, "stream": True,
            "temperature": 1.0, "seed": 1000 * talk + number, "logprobs": 0, "return_token_ids": True,
            "prompt_cache_key": f"{self._way}-{talk}", "hotswap": {"kv": self._way},
        }  # fmt: skip
        tokens, values, first_s, began = list[int](), list[float](), 0.0, time.perf_counter()
        async with self._client.stream("POST", "/v1/completions", json=body) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                first_s = first_s or time.perf_counter() - began
                for choice in orjson.loads(line.removeprefix("data: "))["choices"]:
                    tokens += choice.get("token_ids") or []
                    values += (choice.get("logprobs") or {}).get("token_logprobs") or []
                    read = choice.get("prompt_weight_versions") or []
                    self.turns.versions = max(self.turns.versions, len({part["version"] for part in read}))
        self._said[talk] += tokens
        return tokens, values, first_s

    async def _score(self, talk: int, count: int) -> list[float]:
        """The log-probabilities of the last tokens, computed by the active weights from the first token on."""
        body = {"model": MODEL, "prompt": self._said[talk], "max_tokens": 1, "prompt_logprobs": 0}
        answer = await self._client.post("/v1/completions", json=body)
        answer.raise_for_status()
        positions = answer.json()["choices"][0]["prompt_logprobs"]
        tokens = self._said[talk]
        return [positions[i][str(tokens[i])]["logprob"] for i in range(len(tokens) - count, len(tokens))]

    async def _counters(self) -> list[float]:
        text = (await self._client.get(f"{self._instance}/metrics")).text.splitlines()
        names = ("vllm:prefix_cache_queries_total{", "vllm:prefix_cache_hits_total{")
        return [sum(float(line.rsplit(" ", 1)[1]) for line in text if line.startswith(n)) for n in names]


def moved(tensors: Tensors, seed: int) -> Tensors:
    """The weights after a step."""
    made = torch.Generator().manual_seed(seed)
    return {
        name: (t.float() + DRIFT * t.float().std() * torch.randn(t.shape, generator=made)).to(t.dtype)
        for name, t in tensors.items()
    }


def text(model: Path, *, small: bool) -> Iterator[int]:
    """Token ids without end: of the sources of this package, which the tiny model has no words for."""
    if small:
        yield from ((7 * n) % 400 + 5 for n in itertools.count())
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    for source in itertools.cycle(sorted(Path(loadtest.__file__).parent.rglob("*.py"))):
        yield from tokenizer.encode(source.read_text()).ids


def run(json: Path | None, *, small: bool = False) -> Any:
    """Measure, print the table, and write the figures to `json`; returns them."""
    conversations, turns = (2, 3) if small else (CONVERSATIONS, TURNS)
    with tempfile.TemporaryDirectory(prefix="hotswap-sessions-") as work:
        model = make_checkpoint(Path(work) / "model", seed=1, scale=3.0) if small else smollm()
        with up(model, MODEL, Path(work) / "state", (*ARGS, "2048" if small else "4096"), kv_cache_gib=1.0) as server:
            found = asyncio.run(_measure(server, model, conversations, turns, text(model, small=small)))
    shape = {"conversations": conversations, "turns": turns, "first_tokens": FIRST_TOKENS}
    shape |= {"turn_tokens": TURN_TOKENS, "answer_tokens": ANSWER_TOKENS}
    figures = {"model": "tiny" if small else "SmolLM2-135M", "drift": DRIFT, "shape": shape}
    figures["kv"] = found
    _print(figures)
    return with_machine(figures, json)


async def _measure(server: Server, model: Path, conversations: int, turns: int, words: Iterator[int]) -> dict[str, Any]:
    texts = [
        [list(itertools.islice(words, TURN_TOKENS if n else FIRST_TOKENS)) for n in range(turns)]
        for _ in range(conversations)
    ]
    first = load_file(model / "model.safetensors")
    (record,) = AdminClient(server.state_dir).call("GET", "/admin/instances")["instances"]
    found = {}
    publisher = Publisher(server.store, model=MODEL, lineage="bench")
    try:
        for way in WAYS:
            weights = first
            async with httpx.AsyncClient(base_url=server.url, timeout=600) as client:
                talks = Talks(client, record["address"], way, texts)
                for number in range(turns):
                    await asyncio.to_thread(publisher.publish, weights.items())
                    await talks.turn(number)
                    weights = moved(weights, number)
            found[way] = talks.turns.figures()
    finally:
        publisher.close()
    return found


def _print(figures: dict[str, Any]) -> None:
    names = list(next(iter(figures["kv"].values())))
    table = Table("", *figures["kv"], title=f"a swap after every turn, {figures['model']}")
    for name, values in zip(names, itertools.zip_longest(*(w.values() for w in figures["kv"].values())), strict=True):
        table.add_row(name.replace("_", " "), *(f"{value:,}" for value in values))
    Console().print(table)
