"""A metrics file read back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from trainer.errors import ReportError

Event = dict[str, Any]


@dataclass
class RunEvents:
    """A run's events in order. A step that was trained again, after a resume or a rollback, counts as it went the last
    time; a run that was done and then went on, to more steps, is not done."""

    name: str
    starts: list[Event] = field(default_factory=list)
    steps: dict[int, Event] = field(default_factory=dict)
    evals: dict[int, Event] = field(default_factory=dict)
    others: list[Event] = field(default_factory=list)
    repeated: int = 0
    done: bool = False

    def add(self, event: Event) -> None:
        """Take in the next event of the file."""
        kind, step = event["event"], int(event.get("step", 0))
        if kind == "start":
            self.starts.append(event)
            self.done = False
            self._forget_after(step)
        elif kind in ("step", "eval"):
            (self.steps if kind == "step" else self.evals)[step] = event
        else:
            self.others.append(event)
            self.done = self.done or kind == "done"
            if kind == "rollback":
                self._forget_after(int(event["to_step"]))

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """Steps and values of a number, of steps or else of evaluations (`eval/accuracy`)."""
        events, key = (self.evals, key[5:]) if key.startswith("eval/") else (self.steps, key)
        found = [(step, e[key]) for step, e in sorted(events.items()) if isinstance(e.get(key), int | float)]
        return [step for step, _ in found], [float(value) for _, value in found]

    def names(self, suffix: str = "", prefix: str = "") -> list[str]:
        """Names of the steps' numbers, in the order of their first appearance."""
        seen = {key: None for e in self.steps.values() for key, v in e.items() if isinstance(v, int | float)}
        return [key for key in seen if key.endswith(suffix) and key.startswith(prefix)]

    @property
    def seconds(self) -> float:
        """From the first event to the last, pauses between a fault and a resume included."""
        times = [e["time"] for e in (*self.starts, *self.steps.values(), *self.others) if "time" in e]
        return max(times) - min(times) if times else 0.0

    def _forget_after(self, step: int) -> None:
        """A run that goes on from `step` trains anew what came after."""
        again = [number for number in self.steps if number > step]
        self.repeated += len(again)
        for number in again:
            del self.steps[number]
        for number in [number for number in self.evals if number > step]:
            del self.evals[number]


def read_events(path: str | Path) -> RunEvents:
    """Raises ReportError for a file that is missing, has a line that is no event, or has no steps. A torn last line,
    which a killed run may leave, is left out."""
    path = Path(path)
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ReportError(f"cannot read {path} ({error.strerror}). Name the `metrics` file of a run.") from None
    run = RunEvents(path.stem)
    for event in _parsed(path, lines):
        run.add(event)
    if not run.steps:
        raise ReportError(f"{path} has no step yet. Report once the run has trained.")
    return run


def _parsed(path: Path, lines: list[bytes]) -> Iterable[Event]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            event = orjson.loads(line)
            if not isinstance(event, dict) or not isinstance(event.get("event"), str):
                raise ValueError("no `event`")
        except ValueError as error:
            if number == len(lines):  # the last line has no newline: the run was killed while it wrote
                return
            problem = f"{path}, line {number} is no event of a run ({error})"
            raise ReportError(f"{problem}. Name the `metrics` file of a run.") from None
        yield event
