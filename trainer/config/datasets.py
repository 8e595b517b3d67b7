"""The configuration of data sets: one dataclass per kind; its first field, `kind`, chooses it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from trainer.config.strict import in_range, positive
from trainer.errors import ConfigError


@dataclass(frozen=True)
class FileData:
    """Records in files. `path` (and `eval_path`, for the held-out ones) is a path or any fsspec URL, with `*` or
    `{000..009}` for several files.

    Keys are looked up in each record; `a.b` looks into an object. A prompt is a text, or a list of chat messages, which
    the model's chat template renders (`chat_template: true` makes a text the user's message). The answer that rewards
    compare with is the target unless `answer_key` is there. `chosen` and `rejected` make a preference. What else
    rewards need is the object `extra`, and what `extra_keys` name.

    Up to `max_bad` records that cannot be used are left out, counted and named; one more ends the run. Records of more
    than `max_length` tokens are left out and counted. Tokenised records are kept in `cache_dir` (default:
    $HOTSWAP_CACHE, else ~/.cache/hotswap). `workers` processes tokenise (0: one a core).
    """

    kind: str = ""
    path: str = ""
    eval_path: str | None = None
    prompt_key: str = "prompt"
    target_key: str = "target"
    answer_key: str = "answer"
    chosen_key: str = "chosen"
    rejected_key: str = "rejected"
    extra_keys: tuple[str, ...] = ()
    chat_template: bool = False
    max_bad: int = 0
    max_length: int | None = None
    cache_dir: str | None = None
    workers: int = 0

    def __post_init__(self) -> None:
        if not self.path:
            advice = f"Name {self.kind.upper()} files: a path or URL, with * or {{000..009}} for several"
            raise ConfigError("path", "missing", advice)
        in_range(self, "max_bad", 0, 10**9)
        in_range(self, "workers", 0, 1024)
        positive(self, "max_length")

    def pattern(self, path: str) -> str:
        """The files that `path` or `eval_path` names."""
        return path

    @property
    def records(self) -> str:
        """The name of what the files have, for messages."""
        return "records"


@dataclass(frozen=True)
class JsonlData(FileData):
    """One JSON object a line; files may be compressed (.gz, .zst, .bz2, .xz)."""

    kind: Literal["jsonl"] = "jsonl"


@dataclass(frozen=True)
class ParquetData(FileData):
    """One record a row, keys are columns. Only the columns that are named are read."""

    kind: Literal["parquet"] = "parquet"


@dataclass(frozen=True)
class WebDatasetData(FileData):
    """Tar shards. The files of one record follow each other and share their name up to its first dot; what comes after
    is the key: `.json` holds an object whose keys are the record's, any other extension (`.prompt`, `.txt`) a text."""

    kind: Literal["webdataset"] = "webdataset"


@dataclass(frozen=True)
class AnswersData(FileData):
    """The log of answers that a gateway keeps (docs/feedback.md); `path` is its directory.

    `learn`: `corrections` gives what users wrote instead of an answer, for SFT; `preferences` a correction over the
    answer, or an answer that was rated up over one to the same prompt that was rated down, for DPO; `prompts` each
    prompt once, for GRPO and the like. Only answers count to the keys named in `keys` (all, if none is), of which a
    version from `min_version` to `max_version` wrote some, from `since` to before `until` (unix seconds), and with that
    `rating`. What was asked with an answer (`metadata`) is part of the record: `answer_key: metadata.solution`.
    """

    kind: Literal["answers"] = "answers"
    learn: Literal["corrections", "preferences", "prompts"] = "corrections"
    keys: tuple[str, ...] = ()
    min_version: int | None = None
    max_version: int | None = None
    rating: Literal["up", "down"] | None = None
    since: float | None = None
    until: float | None = None

    def pattern(self, path: str) -> str:
        return f"{path.rstrip('/')}/*.jsonl"

    @property
    def records(self) -> str:
        return f"{self.learn} that the filters let through"


@dataclass(frozen=True)
class ArithmeticData:
    """Addition problems, generated. See trainer/data/problems.py for what `mistake` and `noise` do to the targets."""

    kind: Literal["arithmetic"] = "arithmetic"
    operands: int = 2
    largest: int = 9
    noise: float = 0.0
    mistake: Literal["random", "off_by_one", "carry"] = "random"
    held_out: int = 0

    def __post_init__(self) -> None:
        if self.operands not in (2, 3):
            raise ConfigError("operands", f"{self.operands} is not supported", "Use 2 or 3 one-digit operands")
        in_range(self, "largest", 1, 9)
        in_range(self, "noise", 0.0, 1.0)
        in_range(self, "held_out", 0, (self.largest + 1) ** self.operands // 2)


@dataclass(frozen=True)
class CodeTasksData:
    """Small programs to write, generated. See trainer/data/problems.py for what `noise` does to the targets."""

    kind: Literal["code_tasks"] = "code_tasks"
    noise: float = 0.0
    held_out: int = 0

    def __post_init__(self) -> None:
        in_range(self, "noise", 0.0, 1.0)
        in_range(self, "held_out", 0, 200)


@dataclass(frozen=True)
class GymTask:
    """A task of reasoning-gym, and its options (the package's gallery lists both). `weight` is its share of the
    problems, against the other tasks'."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    weight: float = 1.0

    def __post_init__(self) -> None:
        positive(self, "weight")


@dataclass(frozen=True)
class ReasoningGymData:
    """Problems of reasoning-gym, generated; their reward is `reasoning_gym`. `instructions` follow each question.
    `chat_template: false` leaves the prompt a plain text."""

    kind: Literal["reasoning_gym"] = "reasoning_gym"
    tasks: tuple[GymTask, ...] = ()
    records: int = 100_000
    held_out: int = 128
    instructions: str = "Give the final answer between <answer> and </answer>."
    chat_template: bool = True

    def __post_init__(self) -> None:
        if not self.tasks:
            raise ConfigError("tasks", "empty", "Name at least one: - {name: chain_sum}")
        positive(self, "records")
        in_range(self, "held_out", 0, 100_000)


DataConfig = ReasoningGymData | JsonlData | ParquetData | WebDatasetData | AnswersData | ArithmeticData | CodeTasksData


def identity(config: DataConfig) -> dict[str, Any]:
    """What must stay the same for a run to be continued, as far as the configuration tells. Files are known by what is
    in them, wherever they are (see Contents in trainer/data/records.py)."""
    return {"kind": "files"} if isinstance(config, FileData) else dataclasses.asdict(config)
