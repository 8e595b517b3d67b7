"""The samples for a record: a group of trajectories, each made of turns, with their scores.

A trajectory begins with the record's prompt. After it the policy and its environment write by turns: the policy its
answers and tool calls, the environment what a tool or a user says. All tokens of the turns stand end to end in
`Trajectory.token_ids`, and every per-token property has as many entries: `mask` is 1 on the policy's tokens, which are
trained on, and 0 on the environment's, whose log-probs are 0. Nothing may assume that the policy's tokens follow each
other: an answer of one turn is the special case.

How old a token is counts in optimizer steps, whatever number of versions they made: versions that were never published,
because only every n-th is or because publishing failed, make what is sampled older, and counted in versions that would
not show.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from trainer.rewards.scorer import Score

LENGTH, REPEAT = "length", "repeat"  # the finish reasons of what was cut off, and of what went round in circles
UNFINISHED = "unfinished"  # and of what is to go on: its part of an iteration's tokens is used up
KEPT = 4096  # versions; what an older one wrote counts as the oldest of these


class StepsOfVersions:
    """The optimizer steps behind each published version. On rank 0; a part of the schedule's state."""

    def __init__(self) -> None:
        self._versions: list[int] = []
        self._steps: list[int] = []

    def published(self, version: int, step: int) -> None:
        """`version` has the weights after `step` optimizer steps. Versions come in rising order."""
        self._versions, self._steps = [*self._versions, version][-KEPT:], [*self._steps, step][-KEPT:]

    def __getitem__(self, version: int) -> int:
        """Steps in a version. One that this trainer did not publish, or went back from, counts as its last before: the
        initial weights, if there is none."""
        place = bisect.bisect_right(self._versions, version)
        return self._steps[place - 1] if place else (self._steps[0] if self._steps else 0)

    @property
    def served(self) -> int:
        """Steps in the version that was published last."""
        return self._steps[-1] if self._steps else 0

    def state_dict(self) -> list[list[int]]:
        return [list(pair) for pair in zip(self._versions, self._steps, strict=True)]

    def load_state_dict(self, state: Sequence[Sequence[int]]) -> None:
        self._versions, self._steps = [version for version, _ in state], [step for _, step in state]


@dataclass(frozen=True)
class VersionSpan:
    """Tokens [start, end) were written by weight version `version`, the weights after `step` optimizer steps (as far as
    the trainer knows: see `TrajectoryGroup.dated`)."""

    version: int
    start: int
    end: int
    step: int = 0

    def shifted(self, by: int) -> VersionSpan:
        return replace(self, start=self.start + by, end=self.end + by)


@dataclass(frozen=True)
class Turn:
    """Tokens that one side wrote. The policy's have a log-prob each, the engine's of the chosen tokens (the behaviour
    policy), and spans of versions, counted from the turn's first token. The environment's have none of both: `logprobs`
    is None. `reward` is what the environment gave for a turn of the policy, times `environment.weight`. `routing` are
    the experts that tokens went to (trainer/routing.py), if it was asked for: those of this turn but its last
    token, and before them of all tokens, the prompt's too, that no turn before has them of."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None = None
    versions: tuple[VersionSpan, ...] = ()
    reward: float = 0.0
    routing: str | None = None

    @property
    def of_policy(self) -> bool:
        return self.logprobs is not None


@dataclass(frozen=True)
class Trajectory:
    """The turns after the prompt. `finish_reason`: `stop` when it is complete, `length` when it was cut off, `repeat`
    when it was ended because it repeated itself, `unfinished` when it is to go on: then a last turn of the policy is
    one that is still being written. Tokens before number `trained_from` are read and not trained on. `teacher_logprobs`
    are another model's of all tokens after the prompt, 0 on the environment's, if one was asked."""

    turns: tuple[Turn, ...]
    finish_reason: str
    trained_from: int = 0
    teacher_logprobs: tuple[float, ...] | None = None

    @cached_property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens after the prompt."""
        return tuple(token for turn in self.turns for token in turn.token_ids)

    @cached_property
    def logprobs(self) -> tuple[float, ...]:
        """The behaviour policy's, 0 on the environment's tokens."""
        return tuple(p for turn in self.turns for p in turn.logprobs or (0.0,) * len(turn.token_ids))

    @cached_property
    def mask(self) -> tuple[float, ...]:
        """1 on the tokens that are trained on, 0 on the environment's and on those before `trained_from`."""
        by_policy = [turn.of_policy for turn in self.turns for _ in turn.token_ids]
        return tuple(float(mine and place >= self.trained_from) for place, mine in enumerate(by_policy))

    @cached_property
    def versions(self) -> tuple[VersionSpan, ...]:
        """The versions that wrote the policy's tokens, counted from the first token after the prompt."""
        return tuple(span.shifted(start) for start, turn in self._placed() for span in turn.versions)

    @cached_property
    def policy_tokens(self) -> int:
        """How many tokens the policy wrote."""
        return sum(len(turn.token_ids) for turn in self.turns if turn.of_policy)

    @property
    def truncated(self) -> bool:
        return self.finish_reason in (LENGTH, REPEAT)

    @property
    def oldest(self) -> int | None:
        """Optimizer steps in the oldest weights that wrote one of its tokens; None if it has none, or nobody said."""
        return min((span.step for span in self.versions if span.end > span.start), default=None)

    @property
    def newest(self) -> int | None:
        """Optimizer steps in the newest weights that wrote one of its tokens; None as for `oldest`."""
        return max((span.step for span in self.versions if span.end > span.start), default=None)

    def within(self, step: int, max_lag: int) -> Trajectory:
        """With none of its tokens trained on that is more than `max_lag` steps behind `step`, nor any before one."""
        return replace(self, trained_from=max((s.end for s in self.versions if step - s.step > max_lag), default=0))

    def lags(self, step: int) -> list[float]:
        """For each token, how many optimizer steps `step` is ahead of the weights that wrote it. Tokens that no span
        covers, and those of weights that are ahead themselves (training was rolled back), count as current."""
        lags = [0.0] * len(self.token_ids)
        for span in self.versions:
            lag = float(max(step - span.step, 0))
            lags[span.start : span.end] = [lag] * len(lags[span.start : span.end])
        return lags

    def rewards(self, total: float) -> list[float]:
        """`total` by token: each turn's own reward is on the last token of that turn, and what is left of `total` on
        the policy's last one."""
        by_token = [0.0] * len(self.token_ids)
        last = None
        for start, turn in self._placed():
            if turn.of_policy and turn.token_ids:
                last = start + len(turn.token_ids) - 1
                by_token[last] = turn.reward
        if last is not None:
            by_token[last] += total - sum(by_token)
        return by_token

    def dated(self, steps: StepsOfVersions) -> Trajectory:
        """With the optimizer steps in the versions that wrote it."""
        spans = [tuple(replace(span, step=steps[span.version]) for span in turn.versions) for turn in self.turns]
        turns = tuple(replace(turn, versions=found) for turn, found in zip(self.turns, spans, strict=True))
        return replace(self, turns=turns)

    def _placed(self) -> Iterator[tuple[int, Turn]]:
        """Each turn and the place of its first token."""
        start = 0
        for turn in self.turns:
            yield start, turn
            start += len(turn.token_ids)


@dataclass(frozen=True)
class TrajectoryGroup:
    """All trajectories of one prompt with their scores."""

    prompt_ids: tuple[int, ...]
    trajectories: tuple[Trajectory, ...]
    scores: tuple[Score, ...]

    @property
    def rewards(self) -> list[float]:
        return [score.total for score in self.scores]

    @property
    def oldest(self) -> int | None:
        """Optimizer steps in the oldest weights that wrote a token of the group."""
        known = [trajectory.oldest for trajectory in self.trajectories]
        return min((step for step in known if step is not None), default=None)

    @property
    def newest(self) -> int | None:
        """Optimizer steps in the newest weights that wrote a token of the group."""
        known = [trajectory.newest for trajectory in self.trajectories]
        return max((step for step in known if step is not None), default=None)

    def within(self, step: int, max_lag: int) -> TrajectoryGroup:
        """With none of its tokens trained on that is more than `max_lag` steps behind `step`. All rewards count."""
        return replace(self, trajectories=tuple(trajectory.within(step, max_lag) for trajectory in self.trajectories))

    def dated(self, steps: StepsOfVersions) -> TrajectoryGroup:
        """With the optimizer steps in the versions that wrote it."""
        return replace(self, trajectories=tuple(trajectory.dated(steps) for trajectory in self.trajectories))

    def to_json(self) -> dict[str, Any]:
        """Lists, dictionaries, numbers and text only; floats survive exactly."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> TrajectoryGroup:
        """The inverse of `to_json`, also after a round trip through a file."""
        trajectories = tuple(trajectory_from_json(t) for t in data["trajectories"])
        scores = tuple(Score(**{**score, "relative": tuple(score.get("relative", ()))}) for score in data["scores"])
        return TrajectoryGroup(tuple(data["prompt_ids"]), trajectories, scores)


@dataclass(frozen=True)
class PartialSample:
    """One trajectory of a group that is not finished, after the prompt that it began with. `score` is None until it is
    complete, and `said` empty: then it is all that was said after the prompt, as messages."""

    prompt_ids: tuple[int, ...]
    trajectory: Trajectory
    said: tuple[dict[str, Any], ...] = ()
    score: Score | None = None


@dataclass(frozen=True)
class Partial:
    """A group of which some trajectories are to go on, by the number of the sample; None is one that was left out."""

    samples: tuple[PartialSample | None, ...]

    @staticmethod
    def fresh(prompt_ids: tuple[int, ...], count: int) -> Partial:
        """Before the first token."""
        return Partial((PartialSample(prompt_ids, Trajectory((), UNFINISHED)),) * count)

    @property
    def unfinished(self) -> list[int]:
        """The numbers of the samples that go on."""
        return [i for i, sample in enumerate(self.samples) if sample is not None and sample.score is None]

    def to_json(self) -> dict[str, Any]:
        """As `TrajectoryGroup.to_json`."""
        return dataclasses.asdict(self)


Outcome = TrajectoryGroup | Partial


def outcome_from_json(data: dict[str, Any]) -> Outcome:
    """The inverse of both `to_json`."""
    if "samples" not in data:
        return TrajectoryGroup.from_json(data)
    return Partial(tuple(_sample(sample) if sample is not None else None for sample in data["samples"]))


def trajectory_from_json(data: dict[str, Any]) -> Trajectory:
    taught = data["teacher_logprobs"]
    turns = tuple(_turn(turn) for turn in data["turns"])
    teacher_logprobs = None if taught is None else tuple(taught)
    return Trajectory(turns, data["finish_reason"], data["trained_from"], teacher_logprobs)


def _sample(data: dict[str, Any]) -> PartialSample:
    score = None if data["score"] is None else Score(**data["score"])
    trajectory = trajectory_from_json(data["trajectory"])
    return PartialSample(tuple(data["prompt_ids"]), trajectory, tuple(data["said"]), score)


def _turn(data: dict[str, Any]) -> Turn:
    return Turn(
        token_ids=tuple(data["token_ids"]),
        logprobs=None if data["logprobs"] is None else tuple(data["logprobs"]),
        versions=tuple(VersionSpan(**span) for span in data["versions"]),
        reward=data["reward"],
        routing=data.get("routing"),
    )
