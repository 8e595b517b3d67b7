"""The stock openai SDK before the training API, files of examples in the tiny model's characters, and waiting."""

from __future__ import annotations

import io
import json
from typing import Any

import openai

from tests.trainer.api.server import ApiServer
from tests.waiting import wait_until


def sdk(api: ApiServer, key: str = "somebody") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{api.url}/v1", api_key=key, max_retries=0)


def sums(count: int = 12) -> list[dict[str, Any]]:
    """Conversations: 0+0= is answered 0, and so on."""
    asked = [(a, b) for a in range(5) for b in range(4)][:count]
    return [
        {"messages": [{"role": "user", "content": f"{a}+{b}="}, {"role": "assistant", "content": str(a + b)}]}
        for a, b in asked
    ]


def preferences(count: int = 8) -> list[dict[str, Any]]:
    """The right sum rather than one more."""
    return [
        {
            "input": {"messages": [{"role": "user", "content": f"{a}+1="}]},
            "preferred_output": [{"role": "assistant", "content": str(a + 1)}],
            "non_preferred_output": [{"role": "assistant", "content": str(a + 2)}],
        }
        for a in range(count)
    ]


def upload(client: openai.OpenAI, lines: list[Any] | bytes, name: str = "examples.jsonl") -> str:
    """The file's id."""
    content = lines if isinstance(lines, bytes) else "".join(json.dumps(line) + "\n" for line in lines).encode()
    return client.files.create(file=(name, io.BytesIO(content)), purpose="fine-tune").id


def ended(client: openai.OpenAI, job: str, timeout_s: float = 240) -> Any:
    """The job once it has ended."""

    def found() -> Any:
        now = client.fine_tuning.jobs.retrieve(job)
        return now if now.status in ("succeeded", "failed", "cancelled") else None

    return wait_until(found, timeout_s, what=lambda: str(client.fine_tuning.jobs.list_events(job).data))


def losses(client: openai.OpenAI, job: str) -> dict[int, float]:
    """The training loss by step, from the job's events."""
    events = list(client.fine_tuning.jobs.list_events(job, limit=3))
    found = [event.data for event in events if event.type == "metrics"]
    return {data["step"]: data["train_loss"] for data in reversed(found) if "train_loss" in data}
