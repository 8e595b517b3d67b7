"""A run on the terminal: a bar that stays at the bottom, or one line an event for logs."""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

# The numbers shown of a step, where the algorithm and the schedule have them: name, key, format.
SHOWN = (
    ("loss", "loss", "+.4f"),
    ("reward", "reward_mean", ".3f"),
    ("accuracy", "accuracy", ".1%"),
    ("entropy", "entropy", ".2f"),
    ("lag", "version_lag_mean", ".2f"),
    ("version", "version", ".0f"),
    ("tokens/s", "tokens_per_s", ".0f"),
    ("MFU", "mfu", ".1%"),
)


def summary(values: dict[str, Any]) -> str:
    """A step or an evaluation in a few words."""
    parts = [f"{name} {values[key]:{form}}" for name, key, form in SHOWN if isinstance(values.get(key), int | float)]
    return "  ".join(parts)


def phases(values: dict[str, Any]) -> str:
    """Where a step's time went, in milliseconds."""
    times = {name.removesuffix("_ms"): value for name, value in values.items() if name.endswith("_ms")}
    return "  ".join(f"{name} {value:.0f}" for name, value in times.items() if name in ("rollout", "train", "publish"))


def _sample(step: int, values: dict[str, Any]) -> str:
    """A completion behind its prompt, which ends at the mark, below its rewards and the versions that wrote it."""
    rewards = "  ".join(f"{name} {value:.3g}" for name, value in values["rewards"].items())
    versions = ", ".join(str(version) for version in values["versions"])
    head = f"sample at step {step}: reward {values['reward']:.3g} ({rewards})  versions {versions}"
    return f"{head}  {values['finish_reason']}\n{values['prompt']}>>>{values['completion']}"


class Lines:
    """One line an event, plain text; completions as they are."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(file=sys.stderr)
        self._steps = 0

    def write(self, event: str, values: dict[str, Any]) -> None:
        if line := self._line(event, values):
            self._console.print(escape(line), highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Nothing is held back."""

    def _line(self, event: str, values: dict[str, Any]) -> str:
        step = values.get("step", 0)
        if event == "start":
            self._steps = values["steps"]
            since = f" from step {step}" if step else ""
            on = ", ".join(sorted(set(values["devices"])))
            return f"{values['algorithm']}: {self._steps} steps{since}, {values['parameters']:,} parameters, on {on}"
        if event == "step":
            return f"step {step}/{self._steps}  {summary(values)}  ms: {phases(values)}"
        if event == "eval":
            return f"{values['set']} at step {step}: {summary(values)} on {values['prompts']} prompts"
        if event == "samples":
            return "\n".join(_sample(step, sample) for sample in values["samples"])
        rest = "  ".join(f"{name} {value}" for name, value in values.items() if name != "step")
        return f"{event.replace('_', ' ')} at step {step}: {rest}"


class Bar:
    """A progress bar with the newest numbers; evaluations, checkpoints and faults scroll above it."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(file=sys.stderr)
        self._lines = Lines(self._console)
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[numbers]}", markup=False),
            console=self._console,
        )
        self._task = self._bar.add_task("train", total=None, numbers="")

    def write(self, event: str, values: dict[str, Any]) -> None:
        if event == "start":
            self._bar.update(self._task, description=values["algorithm"], total=values["steps"])
            self._bar.update(self._task, completed=values["step"])
            self._bar.start()
        elif event == "step":
            self._bar.update(self._task, completed=values["step"], numbers=summary(values))
            return
        self._lines.write(event, values)

    def close(self) -> None:
        self._bar.stop()
