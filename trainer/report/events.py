"""A metrics file read back, and what in a run's numbers deserves a look.

Each finding comes with the setting that usually helps. They are rules of thumb, each with its bound.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from trainer.errors import DataError

Event = dict[str, Any]
SHARES = ("accuracy", "pass_at_")
LAST = 0.25  # of the run is what "at the end" means
IDLE_GROUPS, CUT_OFF, CLIPPED = 0.6, 0.2, 0.3
GAP, LOW_ENTROPY, SPIKE, DROP = 0.1, 0.05, 10.0, 0.1


@dataclass
class RunEvents:
    """A run's events in order. A step that was trained again, after a resume or a rollback, counts as it went the last
    time; a run that was done and then went on, to more steps, is not done."""

    name: str
    starts: list[Event] = field(default_factory=list)
    steps: dict[int, Event] = field(default_factory=dict)
    evals: dict[tuple[str, int], Event] = field(default_factory=dict)
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
        elif kind == "step":
            self.steps[step] = event
        elif kind == "eval":
            self.evals[event["set"], step] = event
        else:
            self.others.append(event)
            self.done = self.done or kind == "done"
            if kind == "rollback":
                self._forget_after(int(event["to_step"]))

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """Steps and values of a number, of steps or else of evaluations (`eval/held_out/accuracy`)."""
        events = self.steps
        if key.startswith("eval/"):
            _, wanted, key = key.split("/", 2)
            events = {step: event for (name, step), event in self.evals.items() if name == wanted}
        found = [(step, e[key]) for step, e in sorted(events.items()) if isinstance(e.get(key), int | float)]
        return [step for step, _ in found], [float(value) for _, value in found]

    def names(self, suffix: str = "", prefix: str = "") -> list[str]:
        """Names of the steps' numbers, in the order of their first appearance."""
        seen = {key: None for e in self.steps.values() for key, v in e.items() if isinstance(v, int | float)}
        return [key for key in seen if key.endswith(suffix) and key.startswith(prefix)]

    @property
    def sets(self) -> list[str]:
        """Names of the evaluation sets, in the order of their first appearance."""
        return list(dict.fromkeys(name for name, _ in self.evals))

    def shares(self) -> list[tuple[str, str]]:
        """(set, number) of every accuracy and pass@k."""
        found = {(name, key): None for (name, _), e in self.evals.items() for key in e if key.startswith(SHARES)}
        return list(found)

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
        for key in [key for key in self.evals if key[1] > step]:
            del self.evals[key]


def read_events(path: str | Path) -> RunEvents:
    """Raises DataError for a file that is missing, has a line that is no event, or has no steps. A torn last line,
    which a killed run may leave, is left out."""
    path = Path(path)
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise DataError(f"cannot read {path} ({error.strerror}). Name the `metrics` file of a run.") from None
    run = RunEvents(path.stem)
    for event in _parsed(path, lines):
        run.add(event)
    if not run.steps:
        raise DataError(f"{path} has no step yet. Report once the run has trained.")
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
            raise DataError(f"{problem}. Name the `metrics` file of a run.") from None
        yield event


def findings(run: RunEvents) -> list[str]:
    """One sentence each; none for a run that looks healthy."""
    return [text for rule in _RULES for text in rule(run)]


def at_end(run: RunEvents, key: str) -> float | None:
    """The mean of a number over the last quarter of the run."""
    values = run.series(key)[1]
    return statistics.fmean(values[-max(1, round(len(values) * LAST)) :]) if values else None


def _idle_groups(run: RunEvents) -> Iterator[str]:
    if (share := at_end(run, "zero_std_groups") or 0.0) > IDLE_GROUPS:
        reward = at_end(run, "reward_mean")
        yield (
            f"{share:.0%} of the groups had equal rewards at the end (mean reward {reward:.2f}): they teach nothing. "
            "The task may be solved, or be too hard; choose other prompts, or raise algorithm.samples_per_prompt."
        )


def _cut_off(run: RunEvents) -> Iterator[str]:
    if (share := at_end(run, "truncated") or 0.0) > CUT_OFF:
        yield f"{share:.0%} of the samples ran into rollout.max_tokens at the end. Raise it, or reward short answers."


def _clipped(run: RunEvents) -> Iterator[str]:
    if (share := at_end(run, "clip_ratio") or 0.0) > CLIPPED:
        yield f"{share:.0%} of the tokens were clipped at the end. Lower optimizer.lr, or use fewer minibatches."


def _gap(run: RunEvents) -> Iterator[str]:
    if (gap := at_end(run, "logprob_gap_mean") or 0.0) > GAP:
        yield (
            f"Engine and trainer disagree by {gap:.3f} in a token's log-prob at the end. Serve the trainer's dtype, or "
            "correct for it with importance weights."
        )


def _entropy(run: RunEvents) -> Iterator[str]:
    entropy = at_end(run, "entropy")
    if entropy is not None and entropy < LOW_ENTROPY:
        advice = "Raise algorithm.clip_high or algorithm.entropy_coef"
        yield f"The policy's entropy fell to {entropy:.3f}: it explores little. {advice}."


def _spikes(run: RunEvents) -> Iterator[str]:
    steps, norms = run.series("grad_norm")
    usual = statistics.median(norms) if norms else 0.0
    high = [step for step, norm in zip(steps, norms, strict=True) if usual and norm > SPIKE * usual]
    if high:
        shown = ", ".join(map(str, high[:5])) + (", ..." if len(high) > 5 else "")
        yield f"The gradient norm was above {SPIKE:g} times its median ({usual:.3g}) at {len(high)} steps: {shown}."


def _worse(run: RunEvents) -> Iterator[str]:
    for name in run.sets:
        steps, values = run.series(f"eval/{name}/accuracy")
        if values and max(values) - values[-1] > DROP:
            best = steps[values.index(max(values))]
            yield (
                f"Accuracy on {name} was {max(values):.1%} at step {best} and is {values[-1]:.1%} now. Keep the best "
                "checkpoint, and lower or decay the learning rate."
            )


def _rewards(run: RunEvents) -> Iterator[str]:
    for key in run.names(prefix="reward_failures/"):
        if count := sum(run.series(key)[1]):
            name = key.removeprefix("reward_failures/")
            yield (
                f"Reward {name} gave no value for {count:.0f} samples, which got its on_failure instead. The log has "
                "the first reason; raise its timeout_s or deadline_s if it is too slow."
            )


def _faults(run: RunEvents) -> Iterator[str]:
    """The faults that the run survived, each kind with its last reason."""
    for kind, said in (
        ("publish_failed", "publishes failed"),
        ("checkpoint_failed", "checkpoints failed"),
        ("rollback", "rollbacks to an earlier step"),
        ("restart", "restarts"),
    ):
        if found := [event for event in run.others if event["event"] == kind]:
            last = found[-1].get("reason") or found[-1].get("message")
            yield f"{len(found)} {said}; the last: {last}"


_RULES: tuple[Callable[[RunEvents], Iterator[str]], ...] = (
    _worse, _idle_groups, _cut_off, _clipped, _gap, _entropy, _spikes, _rewards, _faults
)  # fmt: skip
