"""What is asked, by everybody alike."""

from __future__ import annotations

from dataclasses import dataclass

import orjson

MODEL = "mock"
KEY = "sk-bench-4c1f9a77e2d05b36"
PACE_MS = 20
CHUNKS = 50


def body(*, stream: bool = False, size: int = 1000, **parameters: object) -> bytes:
    """A chat completion with a prompt of about `size` bytes."""
    sentence = "Summarise the following passage in detail. "
    content = sentence * max(1, size // len(sentence))
    messages = [{"role": "system", "content": "You are helpful."}, {"role": "user", "content": content}]
    ask = {"model": MODEL, "messages": messages, "temperature": 0.7, "stream": stream}
    return orjson.dumps({"max_tokens": 200} | ask | parameters)


@dataclass(frozen=True)
class Load:
    """One way of asking. Times in seconds; `stagger_ms`: over which connections begin."""

    name: str
    body: bytes
    clients: int
    seconds: float
    warm_s: float = 0.3
    stagger_ms: float = 0.0


WHOLE = body()
MANY = Load("many", WHOLE, clients=32, seconds=1.5)
ONE = Load("one", WHOLE, clients=1, seconds=1.2)
# Streams of a second that begin spread over a second: at every moment as many end and begin.
PACED = Load(
    "paced",
    body(stream=True, max_tokens=CHUNKS, seed=PACE_MS),
    clients=256,
    seconds=2.0,
    warm_s=1.2,
    stagger_ms=CHUNKS * PACE_MS,
)
LARGE = Load("large", body(size=220_000), clients=32, seconds=1.2)
LOADS = (MANY, ONE, PACED, LARGE)
