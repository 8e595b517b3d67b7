"""A release policy: the steps by which a version takes over, and what must hold meanwhile.

YAML, or the same as JSON by the admin route:

    false_alarms: 0.05            # of a whole release of a version that does no harm
    conditions:                   # of every step
      - {metric: errors, max_increase: 0.01}
      - {metric: first_token_s, max_increase: 20%}
      - {metric: repetition, max: 0.2}
    steps:
      - {traffic: 0, shadow: 10, for: 1m}
      - {traffic: 5, for: 5m, conditions: [{metric: reward, max_decrease: 0.02, prove: true}]}
      - {traffic: 50, for: 10m}

After the last step the version has all of the traffic.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Final, Literal

import msgspec
import re2
from msgspec import Meta

from server.answers.measures import Pattern
from server.errors import ConfigError
from server.gateway.release.statistics import LEAST

# The metrics of each answer by itself: whether the values lie between 0 and 1, and what they are.
METRICS: Final[dict[str, tuple[bool, str]]] = {
    "errors": (True, "1 for a request that the server failed, or under which an instance was lost"),
    "left": (True, "1 for a request whose client left before the end of its answer"),
    "arrived": (True, "1 for a request that ended with the version drawn for it, 0 for one that was passed on"),
    "first_token_s": (False, "seconds from the whole request to the first byte of its answer"),
    "duration_s": (False, "seconds from the whole request to the end of its answer"),
    "token_s": (False, "seconds for each token after the first"),
    "tokens": (False, "tokens of the answer"),
    "cut": (True, "1 for an answer that ended at its limit of tokens"),
    "repetition": (True, "share of the answer's 4-word sequences that it has had before"),
    "refusals": (True, "1 for an answer that declines: one of `refusal_patterns` is found in its first 200 characters"),
    "logprob": (False, "mean log-probability of the answer's tokens, where the request asked for them"),
    "feedback": (True, "what users said of the answer: thumbs as 0 and 1, a number as they gave it"),
}
TIMES: Final = ("first_token_s", "duration_s", "token_s")
LIVE: Final = ("feedback", "left", "arrived", *TIMES)  # what only answers to clients can show
SCORED: Final = "reward/"  # begins the metrics that the policy names itself
MAX_STEPS: Final = 32
PATTERN_BYTES: Final = 2**20  # of memory that RE2 may use for the patterns of a policy: milliseconds for each answer
REFUSALS: Final = (
    r"\bI(?:'m| am) (?:sorry|unable)\b", r"\bI (?:cannot|can't|won't|will not)\b", r"\bas an AI\b",
)  # fmt: skip

_SECONDS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([smh])")
_PERCENT: Final = re.compile(r"(\d+(?:\.\d+)?)\s*%")
Percent = Annotated[float, Meta(ge=0, le=100)]

# By name; a stored policy of the same name goes before. It bounds no times: where the loads of both versions differ,
# times cannot be compared, and would hold the last step.
BUILT_IN: Final = {
    "default": """\
conditions:
  - {metric: errors, max_increase: 0.01}
  - {metric: repetition, max_increase: 0.1}
  - {metric: refusals, max_increase: 0.1}
hold: 1h
on_hold: rollback
steps:
  - {traffic: 10, for: 5m}
  - {traffic: 50, for: 10m}
"""
}


class Condition(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A condition on one metric: exactly one of the five bounds.

    Those with `increase`, `decrease` and `change` compare with the stable version: a number in the metric's unit, or a
    percentage of the stable version's mean ("20%"). `answers`: those that count. `prove`: a step does not end before
    the evidence shows that the bound is kept; without it, it ends when there is no evidence of the contrary.
    `least`: answers of each version that it takes to judge at all.
    """

    metric: str
    max: float | None = None
    min: float | None = None
    max_increase: float | str | None = None
    max_decrease: float | str | None = None
    max_change: float | str | None = None
    answers: Literal["live", "shadow", "both"] = "both"
    prove: bool = False
    least: Annotated[int, Meta(ge=1)] = LEAST

    @property
    def bound(self) -> tuple[str, float, bool]:
        """The bound's name, its value, and whether that is a share of the stable version's mean."""
        ((name, value),) = [(name, value) for name in _BOUNDS if (value := getattr(self, name)) is not None]
        if isinstance(value, str):
            return name, float(value.rstrip("% ")) / 100, True
        return name, float(value), False

    @property
    def compares(self) -> bool:
        """Whether it needs the stable version's answers too."""
        return self.bound[0] not in ("max", "min")

    @property
    def is_bounded(self) -> bool:
        """Whether the metric's values lie between 0 and 1."""
        return METRICS[self.metric][0] if self.metric in METRICS else True

    def __str__(self) -> str:
        name, value, share = self.bound
        return f"{self.metric} {name.replace('_', ' ')} {f'{value:.4g}' if not share else f'{value * 100:.4g}%'}"


# Those of each step with traffic, unless the policy has conditions of its own on these metrics. They hold nothing up.
GUARDS: Final = (Condition("left", max_increase=0.05, least=0), Condition("arrived", max_change=0.02, least=0))
_BOUNDS: Final = ("max", "min", "max_increase", "max_decrease", "max_change")


class Reward(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The scorer of the metric reward/NAME: the reward of that name of `hotswap reward-server`, or of another
    server that answers as it does (docs/trainer/rewards.md), where the gateway's `--reward NAME=URL` says. A chat model
    that judges answers is one of its rewards.

    `expected` and `extra` are fields of the request's `metadata`: the right answer, and what else the reward needs. An
    answer whose request lacks one of them is not scored.
    """

    expected: str | None = None
    extra: tuple[str, ...] = ()
    timeout_s: Annotated[float, Meta(gt=0)] = 60.0


class Evaluation(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A set of questions that the candidate answers before it gets any traffic, of the gateway's `--evaluation
    NAME=FILE`: JSON lines with `prompt` or `messages`, and the fields that the reward named `by` needs. The mean of its
    rewards must reach `min`; `max_decrease` compares with what the stable version gets for the same set."""

    name: str
    by: str
    min: float | None = None
    max_decrease: float | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=32768)] = 256
    samples: Annotated[int, Meta(ge=1, le=64)] = 1
    temperature: Annotated[float, Meta(ge=0, le=2)] = 0.0


class Step(msgspec.Struct, forbid_unknown_fields=True, frozen=True, rename={"for_": "for"}):
    """`traffic` and `shadow` are percent of the requests: answered by the candidate, and repeated on it. `for`: how
    long the step lasts at least ("90s", "5m", "2h", or seconds). Its `conditions` hold beside those of the policy."""

    traffic: Percent
    for_: float | str
    shadow: Percent = 0.0
    conditions: tuple[Condition, ...] = ()

    @property
    def seconds(self) -> float:
        return seconds_of(self.for_)


class Policy(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """How a version is released.

    `false_alarms`: the probability that a version within all bounds is rolled back, over all conditions, steps and
    looks. `hold`: how long a step may wait for evidence before `on_hold` happens; holding raises an alert at once.
    `sticky` (key, session, header:NAME or none) and `minimum` are those of the split (docs/weights.md). Requests
    that stick together are one observation: few large keys are little evidence, so each request is drawn by itself by
    default.
    """

    steps: tuple[Step, ...]
    conditions: tuple[Condition, ...] = ()
    name: str = "default"
    false_alarms: Annotated[float, Meta(gt=0, lt=0.5)] = 0.05
    hold: float | str = "1h"
    on_hold: Literal["hold", "rollback"] = "hold"
    sticky: str = "none"
    minimum: Annotated[int, Meta(ge=1)] = 1
    refusal_patterns: tuple[str, ...] = REFUSALS
    rewards: dict[str, Reward] = {}
    evaluation: tuple[Evaluation, ...] = ()

    def of_step(self, number: int) -> tuple[Condition, ...]:
        """The conditions of a step, which are counted from 0: its own, of the policy's those that its answers can show
        something of, and the guards."""
        step = self.steps[number]
        given = tuple(c for c in self.conditions if not _unseen(c, step)) + step.conditions
        named = {c.metric for c in given}
        return given + tuple(c for c in GUARDS if c.metric not in named and not _unseen(c, step))

    @property
    def alpha(self) -> float:
        """The part of `false_alarms` that one condition in one step may use."""
        tests = sum(len(self.of_step(number)) for number in range(len(self.steps)))
        return self.false_alarms / max(1, tests)


def parse(raw: bytes | str, *, where: str = "the policy") -> Policy:
    """A policy from YAML, which JSON is too. Raises ConfigError, which says what is wrong where."""
    try:
        policy = msgspec.yaml.decode(raw, type=Policy)
    except msgspec.DecodeError as error:  # ValidationError is one
        places = "URLs and files are settings of the gateway (--reward, --reward-key, --evaluation)"
        raise ConfigError(f"{where}: {error}; docs/releases.md lists the fields. {places}.") from error
    for problem in _problems(policy):
        raise ConfigError(f"{where}: {problem}")
    return policy


def seconds_of(duration: float | str) -> float:
    """Raises ValueError for what is no duration."""
    if not isinstance(duration, str):
        return float(duration)
    found = _DURATION.fullmatch(duration.strip())
    if found is None:
        raise ValueError(f"{duration!r} is no duration; write seconds, or 90s, 5m, 2h.")
    return float(found[1]) * _SECONDS[found[2]]


def searched(patterns: Sequence[str]) -> tuple[Pattern, ...]:
    """All `patterns` as one, without case. RE2 searches in a time that grows with the text and with what the patterns
    take, which has a bound; Python's `re` takes exponential time for some. Raises ConfigError."""
    options = re2.Options()
    options.case_sensitive, options.log_errors, options.max_mem = False, False, PATTERN_BYTES
    try:
        for pattern in patterns:
            re2.compile(pattern, options)
        return (re2.compile("|".join(f"(?:{pattern})" for pattern in patterns), options),) if patterns else ()
    except (re2.error, UnicodeEncodeError) as error:
        why = error.args[0].decode() if isinstance(error, re2.error) else str(error)
        raise ConfigError(f"{pattern!r}: {why}; write the syntax of RE2, and less if it is too large.") from error


def _problems(policy: Policy) -> Iterator[str]:
    """The faults that the types do not show."""
    if not 0 < len(policy.steps) <= MAX_STEPS:
        yield f"it needs 1 to {MAX_STEPS} steps, and has {len(policy.steps)}."
    for what, duration in [("hold", policy.hold), *((f"step {n + 1}", s.for_) for n, s in enumerate(policy.steps))]:
        try:
            if seconds_of(duration) < 0:
                yield f"{what}: a duration cannot be negative."
        except ValueError as error:
            yield f"{what}: {error}"
    shares = [step.traffic for step in policy.steps]
    if shares != sorted(shares):
        yield "the traffic of a step is less than that of the step before; a version is rolled back, not shrunk."
    for number, step in enumerate(policy.steps):
        if step.traffic == 0 and step.shadow == 0 and not policy.evaluation:
            yield f"step {number + 1} has neither traffic nor shadow: nothing could be judged in it."
        for condition in (*policy.conditions, *step.conditions):
            yield from (f"step {number + 1}: {problem}" for problem in _of_condition(condition, policy))
        yield from (f"step {number + 1}: {unseen}" for c in step.conditions if (unseen := _unseen(c, step)))
    if policy.sticky not in ("none", "key", "session") and not policy.sticky.startswith("header:"):
        yield f"sticky: {policy.sticky!r} is none of key, session, header:NAME and none."
    try:
        searched(policy.refusal_patterns)
    except ConfigError as error:
        yield f"refusal_patterns: {error}"
    for each in policy.evaluation:
        if each.by not in policy.rewards:
            yield f"evaluation: there is no reward named {each.by!r} under `rewards`."
        if each.min is None and each.max_decrease is None:
            yield f"evaluation {each.name}: give `min`, `max_decrease` or both."


def _of_condition(condition: Condition, policy: Policy) -> Iterator[str]:
    name = condition.metric
    given = [bound for bound in _BOUNDS if getattr(condition, bound) is not None]
    if len(given) != 1:
        yield f"metric {name}: give one of {', '.join(_BOUNDS)}."
        return
    if name.startswith(SCORED) and name.removeprefix(SCORED) not in policy.rewards:
        yield f"metric {name}: there is nothing named {name.removeprefix(SCORED)!r} under `rewards`."
    elif not name.startswith(SCORED) and name not in METRICS:
        yield f"there is no metric {name!r}; choose one of {', '.join(METRICS)}, reward/NAME."
    value = getattr(condition, given[0])
    if isinstance(value, str) and not _PERCENT.fullmatch(value.strip()):
        yield f"metric {name}: {value!r} is neither a number nor a percentage."
    elif isinstance(value, (int, float)) and given[0].startswith("max_") and value < 0:
        yield f"metric {name}: {given[0]} cannot be negative."
    if condition.answers == "shadow" and name in LIVE and name not in TIMES:
        yield f"metric {name}: no client sees shadow answers, so they show nothing of it."
    if condition.answers == "shadow" and name in TIMES:
        yield f"metric {name}: a repetition waits for other requests, so its times show nothing."


def _unseen(condition: Condition, step: Step) -> str:
    """Why the answers of this step show nothing of it; "" if they do."""
    of_live = condition.answers == "live" or condition.metric in LIVE
    if of_live and not step.traffic:
        return f"metric {condition.metric} counts live answers, and the step has no `traffic`."
    if condition.answers == "shadow" and not step.shadow:
        return f"metric {condition.metric} counts shadow answers, and the step has no `shadow`."
    return "" if step.traffic or step.shadow else f"metric {condition.metric}: the step has no answers."
