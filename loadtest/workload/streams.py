"""Streams that record when each token reached the client; a process of its own, so that nothing else delays it.

`python -m loadtest.workload.streams URL MODEL STREAMS SECONDS` prints one JSON line when all streams are running. At
the end it prints `{"arrivals": [[t, ...], ...], "first_seen": {version: t}, "failed": n, "truncated": n}`: arrivals per
stream, and the first token of each version anywhere, in seconds on the system's monotonic clock. SIGTERM ends the
streams before their time.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from dataclasses import dataclass, field

import orjson
from openai import AsyncOpenAI

TOKENS = 1500


@dataclass
class Until:
    """When the streams end."""

    at: float

    @property
    def over(self) -> bool:
        return time.monotonic() >= self.at

    def end(self) -> None:
        self.at = time.monotonic()


@dataclass
class Record:
    """Measurements of one stream. A NaN among the arrivals separates answers: the time between two is not a stall."""

    arrivals: list[float] = field(default_factory=list)
    first_seen: dict[int, float] = field(default_factory=dict)
    failed: int = 0
    truncated: int = 0


async def stream(client: AsyncOpenAI, model: str, number: int, until: Until, record: Record) -> None:
    """Ask again and again; each arrival of a chunk with text is a token. NaN marks where a new answer begins."""
    prompt = [(number * 7 + j) % 500 + 3 for j in range(16)]
    while not until.over:
        record.arrivals.append(float("nan"))
        try:
            tokens = await answer(client, model, prompt, until, record)
            record.truncated += tokens is not None and tokens != TOKENS
        except Exception:
            record.failed += 1
            return


async def answer(client: AsyncOpenAI, model: str, prompt: list[int], until: Until, record: Record) -> int | None:
    """One streamed answer; the tokens the server counted, or None when the time was up before its end."""
    chunks = await client.completions.create(
        model=model,
        prompt=prompt,
        max_tokens=TOKENS,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    tokens = 0
    async for chunk in chunks:
        if chunk.choices:
            record.arrivals.append(time.monotonic())
            if (version := (chunk.model_extra or {}).get("weight_version")) is not None:
                record.first_seen.setdefault(version, record.arrivals[-1])
        if chunk.usage:
            tokens = chunk.usage.completion_tokens
        if until.over:
            await chunks.close()
            return None
    return tokens


async def main(url: str, model: str, streams: int, seconds: float) -> None:
    client = AsyncOpenAI(base_url=url + "/v1", api_key="unused", max_retries=0, timeout=600)
    records = [Record() for _ in range(streams)]
    until = Until(time.monotonic() + seconds)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, until.end)
    tasks = [asyncio.create_task(stream(client, model, i, until, r)) for i, r in enumerate(records)]
    while any(len(r.arrivals) < 3 and not r.failed for r in records):  # noqa: ASYNC110 - a benchmark's start
        await asyncio.sleep(0.02)
    print("running", flush=True)
    await asyncio.gather(*tasks)
    arrivals = [[None if t != t else t for t in r.arrivals] for r in records]
    failed, truncated = sum(r.failed for r in records), sum(r.truncated for r in records)
    seen = [(version, at) for r in records for version, at in r.first_seen.items()]
    first_seen = {str(version): min(at for v, at in seen if v == version) for version, _ in seen}
    result = {"arrivals": arrivals, "first_seen": first_seen, "failed": failed, "truncated": truncated}
    print(orjson.dumps(result).decode(), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])))
