"""The events so far, as the demo shows them."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

PHASES = ("build", "serve", "fine-tune", "improve", "done")
HELD_OUT = "held_out"  # the evaluation set whose accuracy is shown
RATE_WINDOW_S = 2.0


@dataclass(frozen=True)
class Piece:
    """Text that one weight version wrote."""

    version: int
    text: str


@dataclass
class Answer:
    """One streamed answer; `right` is None where there is nothing to check."""

    prompt: str
    pieces: list[Piece] = field(default_factory=list)
    right: bool | None = None

    def add(self, version: int, text: str) -> None:
        if self.pieces and self.pieces[-1].version == version:
            text = self.pieces.pop().text + text
        self.pieces.append(Piece(version, text))

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)


class ClientStats:
    """Figures of the streaming clients. A gap is the time between two events that carried tokens of one answer."""

    def __init__(self) -> None:
        self.answers = self.tokens = self.failed = self.truncated = self.misattributed = 0
        self.crossed = self.most_versions = 0
        self.first_problem = ""
        self.gaps_ms: list[float] = []
        self.longest: tuple[float, float] = (0.0, 0.0)  # gap in ms, and when it ended (seconds since the clients began)
        self.versions: set[int] = set()
        self.live: Answer | None = None
        self.crossing: Answer | None = None  # the last one that more than one version wrote
        self.sums: dict[str, list[Answer]] = {}
        self._began = time.monotonic()
        self._recent: deque[tuple[float, int]] = deque()

    @property
    def lost(self) -> int:
        """Requests that did not end as they should; a swap must not cause any."""
        return self.failed + self.truncated + self.misattributed

    def gap_ms(self, quantile: float) -> float:
        """A quantile of all gaps so far, 0 before the first."""
        ordered = sorted(self.gaps_ms)
        return ordered[min(int(quantile * len(ordered)), len(ordered) - 1)] if ordered else 0.0

    def gap(self, seconds: float) -> None:
        ms = seconds * 1e3
        self.gaps_ms.append(ms)
        if ms > self.longest[0]:
            self.longest = (ms, time.monotonic() - self._began)

    def answered(self, answer: Answer) -> None:
        """Keep an answer to a sum unless it is what the same sum got last time."""
        history = self.sums.setdefault(answer.prompt, [])
        if not history or history[-1].text != answer.text:
            history.append(answer)

    def crossed_swap(self, answer: Answer) -> None:
        """Note a complete answer that more than one version wrote."""
        self.crossed += 1
        self.crossing = answer
        self.most_versions = max(self.most_versions, len(answer.pieces))

    def took(self, tokens: int, version: int) -> None:
        self.tokens += tokens
        self.versions.add(version)
        self._recent.append((time.monotonic(), tokens))

    def tokens_per_s(self) -> float:
        """Over the last two seconds."""
        start = time.monotonic() - RATE_WINDOW_S
        while self._recent and self._recent[0][0] < start:
            self._recent.popleft()
        return sum(tokens for _, tokens in list(self._recent)) / RATE_WINDOW_S

    def problem(self, kind: str, message: str) -> None:
        """Count a lost request: `failed`, `truncated` or `misattributed`."""
        setattr(self, kind, getattr(self, kind) + 1)
        self.first_problem = self.first_problem or f"{kind}: {message}"


@dataclass(frozen=True)
class Swap:
    """One committed swap, as the instance recorded it. Times in ms."""

    version: int
    epoch: int
    stage_ms: float
    commit_ms: float


class SwapStats:
    """Every swap of the run, in order. The first commit is the start of the server, which no client sees: its times
    are in no figure."""

    def __init__(self) -> None:
        self.done: list[Swap] = []
        self.aborted: list[str] = []

    @property
    def last(self) -> Swap | None:
        return self.done[-1] if self.done else None

    def median(self, name: str) -> float:
        """Median of `stage_ms` or `commit_ms`; NaN before the first swap."""
        values = sorted(self._times(name))
        return float(values[len(values) // 2]) if values else math.nan

    def longest(self, name: str) -> float:
        return max(self._times(name), default=math.nan)

    def _times(self, name: str) -> list[float]:
        return [float(getattr(swap, name)) for swap in self.done if swap.epoch > 1]


class Scene:
    """The whole picture. `accuracy` is on the held-out problems by moment: start, fine-tuned, improved. `evals` are all
    evaluations, each with the `seconds` when it came."""

    def __init__(self, phases: Sequence[str] = PHASES) -> None:
        self.phases = tuple(phases)
        self.phase = self.phases[0]
        self.began = time.monotonic()
        self.phase_began: dict[str, float] = {}
        self.ended: float | None = None
        self.step = self.steps = 0
        self.metrics: dict[str, Any] = {}
        self.rewards: list[float] = []
        self.accuracy: dict[str, float] = {}
        self.evals: list[dict[str, Any]] = []
        self.published: list[int] = []
        self.client = ClientStats()
        self.swaps = SwapStats()

    @property
    def seconds(self) -> float:
        return (self.ended or time.monotonic()) - self.began

    @property
    def gain(self) -> float:
        """The gain of GRPO alone, in points of held-out accuracy."""
        before = self.accuracy["fine-tuned" if "fine-tuned" in self.accuracy else "start"]
        return 100 * (self.accuracy["improved"] - before)

    def enter(self, phase: str) -> None:
        self.phase = phase
        self.phase_began[phase] = time.monotonic()
        if phase == self.phases[-1]:
            self.ended = time.monotonic()
        else:
            self.step = self.steps = 0

    def read(self, event: dict[str, Any]) -> None:
        """Take in one of the trainer's metrics."""
        kind = event["event"]
        if kind == "start":
            self.steps = event["steps"]
        elif kind == "step":
            self.step, self.metrics = event["step"], event
            self.rewards += [event["reward_mean"]] if "reward_mean" in event else []
            if not self.published or event["version"] != self.published[-1]:
                self.published.append(event["version"])
        elif kind == "eval":
            self.evals.append({**event, "phase": self.phase, "seconds": round(self.seconds, 1)})
            if event["set"] == HELD_OUT:
                self._read_eval(event)

    def _read_eval(self, event: dict[str, Any]) -> None:
        if not event["step"]:
            self.accuracy.setdefault("start", event["accuracy"])
        elif self.phase == "fine-tune":
            self.accuracy["fine-tuned"] = event["accuracy"]
        else:
            self.accuracy["improved"] = event["accuracy"]
