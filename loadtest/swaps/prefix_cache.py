"""How much of its prompts a server finds in its prefix cache before a swap, after it, and after a rollback.

    python -m loadtest.swaps.prefix_cache [--json FILE] [--rollbacks N]

Sessions share one long system prompt and ask again and again with it, through the gateway, while streams run that the
swaps cross. A round is one question of every session; its hit rate is the share of prompt tokens that vLLM took from
the cache, by its own counters. "first" is a round on weights that nobody has asked anything yet.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json as jsonlib
import tempfile
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from loadtest.measure.machine import machine
from loadtest.models.checkpoints import make_checkpoint
from server.cli.admin import AdminClient
from server.up.config import UpConfig
from server.up.server import Server

MODEL = "cache"
SYSTEM_TOKENS, OWN_TOKENS, SESSIONS = 256, 288, 16  # blocks have 128 tokens on CPU
STREAMS, STREAM_TOKENS = 4, 300
ARGS = ("--max-model-len", "1024", "--max-num-seqs", "32")


class Rounds:
    """Asks the server in rounds, and reads vLLM's counters around each."""

    def __init__(self, url: str, instance: str) -> None:
        self._url, self._instance = url, instance
        self.rates: dict[str, list[float]] = {}

    async def ask(self, name: str) -> None:
        """One question of every session; its hit rate is noted under `name`."""
        async with httpx.AsyncClient(base_url=self._url, timeout=120) as client:
            before = await self._counters(client)
            await asyncio.gather(*(generate(client, prompt(i), 2) for i in range(SESSIONS)))
            queries, hits = (b - a for a, b in zip(before, await self._counters(client), strict=True))
        self.rates.setdefault(name, []).append(round(hits / queries, 4))

    async def _counters(self, client: httpx.AsyncClient) -> list[float]:
        """Prompt tokens looked up, and found."""
        text = (await client.get(f"{self._instance}/metrics")).text.splitlines()
        names = ("vllm:prefix_cache_queries_total{", "vllm:prefix_cache_hits_total{")
        return [sum(float(line.rsplit(" ", 1)[1]) for line in text if line.startswith(n)) for n in names]


def prompt(session: int) -> list[int]:
    """The shared beginning, then the session's own."""
    own = [(13 * j + 7 * session) % 400 + 5 for j in range(OWN_TOKENS)]
    return [(11 * j) % 400 + 5 for j in range(SYSTEM_TOKENS)] + own


async def generate(client: httpx.AsyncClient, tokens: list[int], count: int) -> int:
    """Asks for `count` tokens; how many versions wrote them."""
    body = {"prompt_token_ids": tokens, "max_tokens": count, "temperature": 0, "ignore_eos": True, "stream": False}
    answer = await client.post("/generate", json=body)
    answer.raise_for_status()
    return len(answer.json()["choices"][0]["weight_versions"])


class Crossing:
    """Streams of the sessions' prompts that run while a swap is made; counts those it crossed."""

    def __init__(self, url: str) -> None:
        self._url, self.streams, self.crossed = url, 0, 0

    async def swap(self, admin: AdminClient, path: str, body: dict[str, Any]) -> None:
        """Make the swap with streams open, and wait for them."""
        async with httpx.AsyncClient(base_url=self._url, timeout=120) as client:
            asked = [asyncio.create_task(generate(client, prompt(i), STREAM_TOKENS)) for i in range(STREAMS)]
            await asyncio.sleep(0.05)
            await asyncio.to_thread(admin.call, "POST", path, body)
            versions = await asyncio.gather(*asked)
        self.streams += len(versions)
        self.crossed += sum(v > 1 for v in versions)


def run(json: Path | None, *, rollbacks: int = 4) -> dict[str, Any]:
    """Measure, print the table, and write the figures to `json`; returns them."""
    with tempfile.TemporaryDirectory(prefix="hotswap-cache-") as work:
        models = [make_checkpoint(Path(work) / f"model-{seed}", seed=seed, scale=3.0) for seed in range(2)]
        with _server(models[0], Path(work) / "state") as server:
            figures = asyncio.run(_measure(server, models[1], rollbacks)) | {"machine": machine()}
    _print(figures)
    if json is not None:
        json.parent.mkdir(parents=True, exist_ok=True)
        json.write_text(jsonlib.dumps(figures, indent=1))
    return figures


async def _measure(server: Server, other: Path, rollbacks: int) -> dict[str, Any]:
    admin = AdminClient(server.state_dir)
    (record,) = admin.call("GET", "/admin/instances")["instances"]
    rounds, crossing = Rounds(server.url, record["address"]), Crossing(server.url)
    await rounds.ask("first, version 1")
    for _ in range(3):
        await rounds.ask("again, version 1")
    await crossing.swap(admin, "/admin/weights", {"path": str(other), "activate": True})
    await rounds.ask("first after the swap, version 2")
    for _ in range(3):
        await rounds.ask("again, version 2")
    for version in itertools.islice(itertools.cycle((1, 2)), rollbacks):
        await crossing.swap(admin, "/admin/weights/rollback", {})
        await rounds.ask(f"first after a rollback to version {version}")
    shape = {"sessions": SESSIONS, "shared_tokens": SYSTEM_TOKENS, "own_tokens": OWN_TOKENS}
    streams = {"streams": crossing.streams, "streams_crossed": crossing.crossed}
    return {"hit_rate": rounds.rates, "prompts": shape, **streams}


def _server(model: Path, state: Path) -> Server:
    return Server(
        UpConfig(
            model=str(model), name=MODEL, port=0, throwaway=True, state_dir=state, kv_cache_gib=0.25, vllm_args=ARGS
        )
    )


def _print(figures: dict[str, Any]) -> None:
    table = Table("round", "prompt tokens found in the cache", title="prefix cache across swaps")
    for name, rates in figures["hit_rate"].items():
        table.add_row(name, ", ".join(f"{rate:.1%}" for rate in rates))
    console = Console()
    console.print(table)
    console.print(f"{figures['streams_crossed']} of {figures['streams']} streams crossed a swap")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file as well")
    parser.add_argument("--rollbacks", type=int, default=4)
    options = parser.parse_args()
    run(options.json, rollbacks=options.rollbacks)


if __name__ == "__main__":
    main()
