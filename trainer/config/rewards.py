"""The configuration of rewards: one struct per kind; its tag, `kind`, chooses it (docs/trainer/rewards.md)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, field

from trainer.config.strict import Count, Finite, FunctionName, Kind, Positive, Text
from trainer.errors import ConfigError


class RewardOptions(Kind, frozen=True):
    """The options of every reward. `weight` is its factor in the sum, `name` what metrics call it (default: its kind,
    numbered when used twice). `timeout_s` is how long one evaluation may run, `deadline_s` how long a sample may wait
    for its value, queueing included. A number as `on_failure` counts, before the weight, for a value that could not be
    had. `where` maps columns of the record's `extra` to a value or a list of values."""

    weight: Finite = 1.0
    name: str = ""
    on_failure: Finite | None = None
    timeout_s: Positive = 10.0
    deadline_s: Positive = 120.0
    workers: Count = 2
    where: dict[str, Any] = field(default_factory=dict)


class ExactMatchReward(RewardOptions, frozen=True, tag="exact_match"):
    """1 when the answer's text equals the target, surrounding white space aside."""


class RegexReward(RewardOptions, frozen=True, kw_only=True, tag="regex"):
    """1 when `pattern` is found; with a group named `answer`, 1 when that group equals the target."""

    pattern: Text


class CallableReward(RewardOptions, frozen=True, kw_only=True, tag="callable"):
    """`target` is called with (prompt, answer, expected), all text, and with `extra` (the record's, a dict) if it has
    such a parameter; returns a number, or None where it does not apply. Functions written for TRL or verl are called as
    they expect. Of a coroutine function each worker runs up to `concurrency` calls at a time."""

    target: FunctionName
    concurrency: Count = 64


class GroupReward(RewardOptions, frozen=True, kw_only=True, tag="group"):
    """`target` is called with all samples of a prompt (a `SampleGroup`, trainer/rewards), once every other reward has
    valued them; returns a number for each, in their order. It is not asked in evaluations."""

    target: FunctionName
    concurrency: Count = 64


class MathReward(RewardOptions, frozen=True, tag="math"):
    """1 when the answer means the same as the target (math-verify). `precision` is the number of decimals that
    floating-point values must share."""

    boxed_only: bool = False
    precision: Annotated[int, Meta(ge=0, le=15)] = 6


class GymReward(RewardOptions, frozen=True, tag="reasoning_gym"):
    """The score of a reasoning-gym task's verifier, for records of the data set `reasoning_gym`. The verifier reads the
    text between `<tag>` and `</tag>`, the last such place; with an empty `tag` the whole answer."""

    tag: str = "answer"


class FormatReward(RewardOptions, frozen=True, tag="format"):
    """1 when the whole answer is the named tags in order, each once, with something in each and only white space
    between them: `tags: [think, answer]` wants `<think>...</think><answer>...</answer>`. The chat
    template may have opened the first."""

    tags: tuple[str, ...] = ("think", "answer")

    def __post_init__(self) -> None:
        if not self.tags or not all(tag.isidentifier() for tag in self.tags) or len(set(self.tags)) < len(self.tags):
            raise ConfigError("tags", f"{list(self.tags)} are no distinct names", "List tag names, each once")


class CodeReward(RewardOptions, frozen=True, tag="code"):
    """1 when the program in the answer passes the record's tests (`extra[tests_key]`), run in a sandbox. `timeout_s` is
    for all tests of an answer, `case_timeout_s` for each. `memory_mb` bounds each process, and a test's processes
    together; `disk_mb` the whole sandbox, `output_kb` a test; `processes` counts threads too."""

    tests_key: str = "tests"
    partial: bool = False
    case_timeout_s: Positive = 4.0
    memory_mb: Annotated[int, Meta(ge=64)] = 256
    disk_mb: Count = 16
    output_kb: Count = 256
    processes: Count = 16
    sandbox: Literal["bubblewrap", "none"] = "bubblewrap"


class ClassifierReward(RewardOptions, frozen=True, kw_only=True, tag="classifier"):
    """A Hugging Face sequence classifier's opinion of prompt and answer, in its own process. With one label its logit
    (or the sigmoid of it, `probability`), else the log-odds (or the probability) of `label`. Up to `batch` answers that
    wait are one forward pass. It reads the first `max_tokens` of a text, or as many as its tokenizer says that it
    takes."""

    path: Text
    label: int = -1
    probability: bool = True
    max_tokens: Count = 8192
    batch: Count = 16
    workers: Count = 1
    timeout_s: Positive = 60.0


JUDGE_PROMPT = """Rate the answer to a task from 0 (wrong or useless) to 10 (perfect). Reply with the number only.

Task:
{prompt}

Reference answer:
{expected}

Answer to rate:
{answer}"""


class JudgeReward(RewardOptions, frozen=True, kw_only=True, tag="judge"):
    """A chat model's rating, through `/v1/chat/completions`, from `lowest` to `highest`, scaled to 0..1. `url` and
    `api_key_env` default to the run's gateway."""

    model: Text
    url: str = ""
    api_key_env: str | None = None
    template: str = JUDGE_PROMPT
    lowest: Finite = 0.0
    highest: Finite = 10.0
    max_tokens: Count = 16
    workers: Count = 32
    timeout_s: Positive = 60.0

    def __post_init__(self) -> None:
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
