"""Clients that check every token: version v must answer token `first + v % checkpoints`, whatever it is asked.

`python -m loadtest.workload.checker URL MODEL CLIENTS FIRST CHECKPOINTS` asks until a line comes on standard input.
Then it prints `{"answers", "tokens", "crossed", "wrong", "mislabelled", "failed"}`: answers that crossed a swap are
counted, tokens of which the version did not fit, answers whose spans do not cover them exactly, and requests that
failed, with examples.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import sys
from dataclasses import asdict, dataclass, field
from typing import Any

import httpx
import orjson

EXAMPLES = 5


@dataclass
class Tally:
    """Counts of what all clients saw."""

    answers: int = 0
    tokens: int = 0
    crossed: int = 0
    wrong: int = 0
    mislabelled: int = 0
    failed: int = 0
    versions: int = 0
    examples: list[str] = field(default_factory=list)

    def note(self, kind: str, what: object) -> None:
        setattr(self, kind, getattr(self, kind) + 1)
        if len(self.examples) < EXAMPLES:
            self.examples.append(f"{kind}: {what}")


async def client(url: str, tally: Tally, seen: set[int], stop: asyncio.Event, first: int, checkpoints: int) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        while not stop.is_set():
            length = random.randint(8, 64)
            body = {"prompt_token_ids": [random.randint(3, 90) for _ in range(8)], "max_tokens": length}
            body |= {"temperature": 0, "ignore_eos": True, "stream": False}
            try:
                answer = await http.post("/generate", json=body)
                answer.raise_for_status()
                check(answer.json()["choices"][0], length, tally, seen, first, checkpoints)
            except Exception as error:
                tally.note("failed", repr(error))


def check(choice: dict[str, Any], length: int, tally: Tally, seen: set[int], first: int, checkpoints: int) -> None:
    """Count one answer."""
    tokens, spans = choice["token_ids"], choice["weight_versions"]
    tally.answers += 1
    tally.tokens += len(tokens)
    tally.crossed += len(spans) > 1
    seen.update(span["version"] for span in spans)
    edges = [0, *(span["end"] for span in spans)]
    contiguous = all(a == span["start"] for a, span in zip(edges, spans, strict=False))
    if len(tokens) != length or not contiguous or edges[-1] != length:
        tally.note("mislabelled", spans)
    for span in spans:
        expected = first + span["version"] % checkpoints
        for token in itertools.islice(tokens, span["start"], span["end"]):
            if token != expected:
                tally.note("wrong", f"token {token} under version {span['version']}")


async def main(url: str, clients: int, first: int, checkpoints: int) -> None:
    tally, seen, stop = Tally(), set[int](), asyncio.Event()
    tasks = [asyncio.create_task(client(url, tally, seen, stop, first, checkpoints)) for _ in range(clients)]
    await asyncio.to_thread(sys.stdin.readline)
    stop.set()
    await asyncio.gather(*tasks)
    tally.versions = len(seen)
    print(orjson.dumps(asdict(tally)).decode(), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5])))
