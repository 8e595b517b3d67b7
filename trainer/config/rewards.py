"""The configuration of rewards: one dataclass per kind; its first field, `kind`, chooses it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from trainer.config.strict import in_range, names_code, positive
from trainer.errors import ConfigError


@dataclass(frozen=True)
class RewardOptions:
    """The options of every reward.

    `weight` is its factor in the sum, `name` what metrics call it (default: its kind, numbered when used twice).
    A trajectory whose reward raises, hangs or dies is scored again (`rollout.attempts`) and then left out of the step:
    an outage teaches nothing. (An answer that makes a regex, the math reward or the tests of code run into `timeout_s`
    is worth 0: that is no outage.) With a number as `on_failure` the reward counts as that (before the weight) instead.
    `timeout_s` is how long one evaluation may run before it is killed; `deadline_s` how long a sample may wait for its
    value, queueing included. `workers` evaluations run at a time, each in its own process where the reward runs code.
    `where` says for which records the reward is meant: a column of the record's `extra` and its value, or a list of
    values; with several columns, each must fit. For other records the reward does not apply.
    """

    kind: str = ""
    weight: float = 1.0
    name: str = ""
    on_failure: float | None = None
    timeout_s: float = 10.0
    deadline_s: float = 120.0
    workers: int = 2
    where: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        positive(self, "timeout_s", "deadline_s", "workers")
        for key in ("weight", "on_failure"):
            if not math.isfinite(getattr(self, key) or 0.0):
                raise ConfigError(key, f"{getattr(self, key)} is no finite number", "Give a finite number")


@dataclass(frozen=True)
class ExactMatchReward(RewardOptions):
    """1 when the answer's text equals the target, surrounding white space aside."""

    kind: Literal["exact_match"] = "exact_match"


@dataclass(frozen=True)
class RegexReward(RewardOptions):
    """1 when `pattern` is found; with a group named `answer`, 1 when that group equals the target."""

    kind: Literal["regex"] = "regex"
    pattern: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.pattern:
            raise ConfigError("pattern", "missing", "Give a Python regular expression")


@dataclass(frozen=True)
class CallableReward(RewardOptions):
    """`target` is `package.module:function`, called with (prompt, answer, expected), all text, and with `extra` (the
    record's, a dict) if it has such a parameter; returns a number, or None where it does not apply. A function written
    for TRL (`completions`) or verl (`solution_str`) is called as it expects. It may be a coroutine function: then each
    worker runs up to `concurrency` calls at a time. An attribute `many` of it gets the list of (prompt, answer,
    expected, extra) that wait, up to its attribute `batch` (16), and returns as many numbers."""

    kind: Literal["callable"] = "callable"
    target: str = ""
    concurrency: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(self, "concurrency")
        names_code(self, "target", "function")


@dataclass(frozen=True)
class GroupReward(RewardOptions):
    """`target` is `package.module:function`, called with all samples of a prompt (a `SampleGroup`, trainer/rewards),
    once every other reward has valued them; returns a number for each, in their order. It may be a coroutine function,
    as in `callable`. If it fails, it fails for the whole group. It is not asked in evaluations, where a prompt has one
    answer."""

    kind: Literal["group"] = "group"
    target: str = ""
    concurrency: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(self, "concurrency")
        if self.target.count(":") != 1:
            raise ConfigError("target", f"{self.target!r} names no function", "Write package.module:function")


@dataclass(frozen=True)
class MathReward(RewardOptions):
    """1 when the answer means the same as the target (math-verify: LaTeX, fractions, sets, intervals, units aside).

    `boxed_only` reads nothing but the last `\\boxed{...}` of the answer; targets are read alike with it and without.
    `precision` is the number of decimals that
    floating-point values must share."""

    kind: Literal["math"] = "math"
    boxed_only: bool = False
    precision: int = 6

    def __post_init__(self) -> None:
        super().__post_init__()
        in_range(self, "precision", 0, 15)


@dataclass(frozen=True)
class GymReward(RewardOptions):
    """What the verifier of a reasoning-gym task gives, for records of the data set `reasoning_gym`. It reads what is
    between `<tag>` and `</tag>`, the last such place; with an empty `tag` the whole answer."""

    kind: Literal["reasoning_gym"] = "reasoning_gym"
    tag: str = "answer"


@dataclass(frozen=True)
class FormatReward(RewardOptions):
    """1 when the whole answer is the named tags in order, each once, with something in each and only white space
    between them: `tags: [think, answer]` wants `<think>...</think><answer>...</answer>`. The chat
    template may have opened the first."""

    kind: Literal["format"] = "format"
    tags: tuple[str, ...] = ("think", "answer")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.tags or not all(tag.isidentifier() for tag in self.tags) or len(set(self.tags)) < len(self.tags):
            raise ConfigError("tags", f"{list(self.tags)} are no distinct names", "List tag names, each once")


@dataclass(frozen=True)
class CodeReward(RewardOptions):
    """1 when the program in the answer passes the record's tests (`extra[tests_key]`), run in a sandbox; `partial`
    gives the fraction that passed instead. See docs/trainer/rewards.md for the forms of tests.

    `timeout_s` is for all tests of an answer, `case_timeout_s` for each. `memory_mb` bounds each process, and a test's
    processes together; `disk_mb` the whole sandbox, `output_kb` a test. `processes` counts threads too. `sandbox: none`
    runs model-written code with this process's rights and only the resource limits: for machines that hold nothing.
    """

    kind: Literal["code"] = "code"
    tests_key: str = "tests"
    partial: bool = False
    case_timeout_s: float = 4.0
    memory_mb: int = 256
    disk_mb: int = 16
    output_kb: int = 256
    processes: int = 16
    sandbox: Literal["bubblewrap", "none"] = "bubblewrap"

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(self, "case_timeout_s", "disk_mb", "output_kb", "processes")
        in_range(self, "memory_mb", 64, 2**20)


@dataclass(frozen=True)
class ClassifierReward(RewardOptions):
    """A Hugging Face sequence classifier's opinion of prompt and answer, in its own process. With one label its logit
    (or the sigmoid of it, `probability`), else the log-odds (or the probability) of `label`. Up to `batch` answers that
    wait are one forward pass; their values then depend in the last bits on what they were beside. It reads the first
    `max_tokens` of a text, or as many as its tokenizer says that it takes."""

    kind: Literal["classifier"] = "classifier"
    path: str = ""
    label: int = -1
    probability: bool = True
    max_tokens: int = 8192
    batch: int = 16
    workers: int = 1
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(self, "max_tokens", "batch")
        if not self.path:
            raise ConfigError("path", "missing", "Name a directory with a sequence classification checkpoint")


JUDGE_PROMPT = """Rate the answer to a task from 0 (wrong or useless) to 10 (perfect). Reply with the number only.

Task:
{prompt}

Reference answer:
{expected}

Answer to rate:
{answer}"""


@dataclass(frozen=True)
class JudgeReward(RewardOptions):
    """A chat model's rating, through `/v1/chat/completions`: the last one in its reply (`[[8]]`, `"score": 8`, `8/10`,
    `80%`, or a number alone), from `lowest` to `highest`, scaled to 0..1. A reply without one is a failure. `url` and
    `api_key_env` default to the run's gateway. `template` may use {prompt}, {answer} and {expected}."""

    kind: Literal["judge"] = "judge"
    model: str = ""
    url: str = ""
    api_key_env: str | None = None
    template: str = JUDGE_PROMPT
    lowest: float = 0.0
    highest: float = 10.0
    max_tokens: int = 16
    workers: int = 32
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(self, "max_tokens")
        if not self.model:
            raise ConfigError("model", "missing", "Name the model that judges, as the server calls it")
        if "{answer}" not in self.template:
            raise ConfigError("template", "does not show the answer", "Put {answer} into it")
        if not self.lowest < self.highest:
            raise ConfigError("highest", f"{self.highest} is not above lowest ({self.lowest})", "Give lowest < highest")


RewardConfig = (
    ExactMatchReward
    | RegexReward
    | CallableReward
    | GroupReward
    | MathReward
    | GymReward
    | FormatReward
    | CodeReward
    | ClassifierReward
    | JudgeReward
)
