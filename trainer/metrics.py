"""What a run reports: one JSON object a line.

Every line has `event` and `time` (Unix seconds). Events and their keys:

    start    steps, algorithm, world_size, parameters, step (the one resumed from, 0 for a fresh run)
    step     step, loss, grad_norm, lr, tokens, tokens_per_s, version, rollout_ms, train_ms, publish_ms (of which
             write_ms until the version is complete, swap_ms until the fleet serves it);
             with rollouts: reward_mean, reward_std, full_reward, zero_std_groups, answer_tokens_mean, truncated,
             version_lag_mean, version_lag_max; and what the algorithm adds (GRPO: clip_ratio, entropy,
             logprob_gap_mean, logprob_gap_max, kl)
    eval     step, version, accuracy, reward_mean, prompts
    publish_failed  step, message
    checkpoint      step, path, ms
    done     step, version, seconds
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any, Protocol, TextIO

import orjson

from trainer.rollout import Group


class MetricsWriter(Protocol):
    """Receives every event of a run, in order, on rank 0. A live display implements this."""

    def write(self, event: str, values: dict[str, Any]) -> None: ...


class JsonLines:
    """Appends events to a file, or prints them for the path `-`. Each line is flushed."""

    def __init__(self, path: str) -> None:
        self._stream: TextIO = sys.stdout
        if path != "-":
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            self._stream = Path(path).open("a")  # noqa: SIM115 - closed in close()

    def write(self, event: str, values: dict[str, Any]) -> None:
        line = orjson.dumps(
            {"event": event, "time": round(time.time(), 3), **values}, option=orjson.OPT_SERIALIZE_NUMPY
        )
        self._stream.write(line.decode() + "\n")
        self._stream.flush()

    def close(self) -> None:
        if self._stream is not sys.stdout:
            self._stream.close()


class Stopwatch:
    """Milliseconds by phase: `with watch("train"): ...` adds to `watch.ms["train_ms"]`."""

    def __init__(self) -> None:
        self.ms: dict[str, float] = {}

    def __call__(self, phase: str) -> _Phase:
        return _Phase(self, f"{phase}_ms")


class _Phase:
    def __init__(self, watch: Stopwatch, key: str) -> None:
        self._watch, self._key = watch, key

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        spent = (time.perf_counter() - self._start) * 1e3
        self._watch.ms[self._key] = round(self._watch.ms.get(self._key, 0.0) + spent, 3)


def rollout_metrics(groups: list[Group], version: int) -> dict[str, float]:
    """Rewards, lengths, and how many versions behind `version` the tokens were sampled."""
    if not groups:
        return {}
    samples = [s for g in groups for s in g.samples]
    scores = [s for g in groups for s in g.scores]
    rewards = [s.total for s in scores]
    mean = sum(rewards) / len(rewards)
    lags = [version - span.version for s in samples for span in s.versions for _ in range(span.start, span.end)]
    result = {
        "reward_mean": mean,
        "reward_std": (sum((r - mean) ** 2 for r in rewards) / len(rewards)) ** 0.5,
        "full_reward": sum(s.full for s in scores) / len(scores),
        "zero_std_groups": sum(len(set(g.rewards)) == 1 for g in groups) / len(groups),
        "answer_tokens_mean": sum(len(s.token_ids) for s in samples) / len(samples),
        "truncated": sum(s.finish_reason == "length" for s in samples) / len(samples),
        "version_lag_mean": sum(lags) / max(len(lags), 1),
        "version_lag_max": float(max(lags, default=0)),
    }
    names = scores[0].parts
    return result | {f"reward/{name}": sum(s.parts[name] for s in scores) / len(scores) for name in names}
