"""The configuration of data sets: one struct per kind; its tag, `kind`, chooses it (docs/trainer/data.md)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, field

from trainer.config.strict import Count, Fraction, Kind, Natural, Positive, Section, Text
from trainer.errors import ConfigError

PROMPT, TARGET, ANSWER = "prompt", "target", "answer"


class FileData(Kind, frozen=True, kw_only=True):
    """Records in files. `path` and `eval_path` (the held-out ones) are paths or any fsspec URL, with `*` or
    `{000..009}` for several files. `max_bad` counts records, `max_length` tokens. `cache_dir` null: $HOTSWAP_CACHE,
    else ~/.cache/hotswap. `workers` processes tokenise (0: one a core)."""

    path: Text
    eval_path: str | None = None
    prompt_key: str = PROMPT
    target_key: str = TARGET
    answer_key: str = ANSWER
    chosen_key: str = "chosen"
    rejected_key: str = "rejected"
    extra_keys: tuple[str, ...] = ()
    chat_template: bool = False
    max_bad: Natural = 0
    max_length: Count | None = None
    cache_dir: str | None = None
    workers: Natural = 0

    def pattern(self, path: str) -> str:
        """The files that `path` or `eval_path` names."""
        return path

    @property
    def parts(self) -> tuple[str, str | None]:
        """The names of what is trained on, and of what is held out."""
        return self.path, self.eval_path

    @property
    def records(self) -> str:
        """The name of what the files have, for messages."""
        return "records"


class JsonlData(FileData, frozen=True, tag="jsonl"):
    """One JSON object a line, or in files that are named .json an array of them; files may be compressed (.gz, .zst,
    .bz2, .xz)."""


class CsvData(FileData, frozen=True, tag="csv"):
    """CSV, or in files that are named .tsv values between tabs, below a line of keys; files may be compressed. Values
    are texts."""


class ParquetData(FileData, frozen=True, tag="parquet"):
    """One record a row, keys are columns. Only the columns that are named are read."""


class ArrowData(FileData, frozen=True, tag="arrow"):
    """Arrow's streams, which `datasets` writes, and files. One record a row, keys are columns."""


class WebDatasetData(FileData, frozen=True, tag="webdataset"):
    """Tar shards. The files of one record follow each other and share their name up to its first dot; what comes after
    is the key: `.json` holds an object whose keys are the record's, any other extension (`.prompt`, `.txt`) a text."""


class HubData(FileData, frozen=True, kw_only=True, tag="hub"):
    """A data set of the Hugging Face hub: `path` is its name, such as openai/gsm8k, or a directory of that layout.

    `config`, `split` and `revision` are as in `datasets.load_dataset`. `train[:5%]` and `train[100:200]` are parts of a
    split, counted in records that can be used. `eval_split` is held out.
    """

    config: str | None = None
    split: str = "train"
    eval_split: str | None = None
    revision: str | None = None

    def __post_init__(self) -> None:
        if self.eval_path is not None:
            raise ConfigError("eval_path", "is for data in files", "Set eval_split")

    @property
    def parts(self) -> tuple[str, str | None]:
        return self.split, self.eval_split


class AnswersData(FileData, frozen=True, tag="answers"):
    """The log of answers that a gateway keeps; `path` is its directory. docs/feedback.md says what is learned from it.
    `since` and `until` are Unix seconds."""

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


class ArithmeticData(Kind, frozen=True, tag="arithmetic"):
    """Addition problems, generated. See trainer/data/problems.py for what `mistake` and `noise` do to the targets."""

    operands: Literal[2, 3] = 2
    largest: Annotated[int, Meta(ge=1, le=9)] = 9
    noise: Fraction = 0.0
    mistake: Literal["random", "off_by_one", "carry"] = "random"
    held_out: Natural = 0

    def __post_init__(self) -> None:
        if self.held_out > (most := (self.largest + 1) ** self.operands // 2):
            raise ConfigError("held_out", f"{self.held_out} is more than half of the problems", f"Use at most {most}")


class CodeTasksData(Kind, frozen=True, tag="code_tasks"):
    """Small programs to write, generated. See trainer/data/problems.py for what `noise` does to the targets."""

    noise: Fraction = 0.0
    held_out: Annotated[int, Meta(ge=0, le=200)] = 0


class GymTask(Section, frozen=True):
    """A task of reasoning-gym, and its options (the package's gallery lists both). `weight` is its share of the
    problems, against the other tasks'."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    weight: Positive = 1.0


class ReasoningGymData(Kind, frozen=True, kw_only=True, tag="reasoning_gym"):
    """Problems of reasoning-gym, generated; their reward is `reasoning_gym`. `instructions` follow each question.
    `chat_template: false` leaves the prompt a plain text."""

    tasks: Annotated[tuple[GymTask, ...], Meta(min_length=1, description="Name one or more: - {name: chain_sum}")]
    records: Count = 100_000
    held_out: Natural = 128
    instructions: str = "Give the final answer between <answer> and </answer>."
    chat_template: bool = True


DataConfig = (
    ReasoningGymData | JsonlData | CsvData | ParquetData | ArrowData | WebDatasetData | HubData | AnswersData
    | ArithmeticData | CodeTasksData
)  # fmt: skip


def identity(config: DataConfig) -> dict[str, Any]:
    """The settings of the data that must stay the same for a run to be continued. Files are known by their contents,
    wherever they are (see Contents in trainer/data/records.py)."""
    return {"kind": "files"} if isinstance(config, FileData) else msgspec.to_builtins(config)
