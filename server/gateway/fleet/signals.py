"""What a router needs of vLLM's own metrics, read from an instance's `/metrics` page."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, fields
from typing import Final


@dataclass(frozen=True)
class Signals:
    """One scrape. Sums over the engines of an instance, `kv_cache_usage` is the fullest one's (0..1)."""

    num_requests_running: float = 0.0
    num_requests_waiting: float = 0.0
    kv_cache_usage: float = 0.0
    prefix_cache_queries: float = 0.0
    prefix_cache_hits: float = 0.0
    num_preemptions: float = 0.0
    prompt_tokens: float = 0.0
    generation_tokens: float = 0.0
    read_at: float = field(default=0.0, compare=False)  # monotonic

    @property
    def load(self) -> float:
        """Requests the instance has, queued ones included."""
        return self.num_requests_running + self.num_requests_waiting


# Field of Signals by vLLM's metric name, which is followed by labels or a space.
_SOURCES: Final = {
    b"vllm:num_requests_running": "num_requests_running",
    b"vllm:num_requests_waiting": "num_requests_waiting",
    b"vllm:kv_cache_usage_perc": "kv_cache_usage",
    b"vllm:prefix_cache_queries_total": "prefix_cache_queries",
    b"vllm:prefix_cache_hits_total": "prefix_cache_hits",
    b"vllm:num_preemptions_total": "num_preemptions",
    b"vllm:prompt_tokens_total": "prompt_tokens",
    b"vllm:generation_tokens_total": "generation_tokens",
}
FIELDS: Final = tuple(f.name for f in fields(Signals) if f.name != "read_at")


def parse(page: bytes) -> Signals:
    """Signals from a page in Prometheus text format; what is missing or not a number counts as 0."""
    values = dict.fromkeys(FIELDS, 0.0)
    for line in page.splitlines():
        if not line.startswith(b"vllm:"):
            continue
        name = _SOURCES.get(line.partition(b"{")[0].partition(b" ")[0])
        if name is None:
            continue
        try:
            value = float(line.rpartition(b" ")[2])
        except ValueError:
            continue
        values[name] = max(values[name], value) if name == "kv_cache_usage" else values[name] + value
    return Signals(**values, read_at=time.monotonic())
