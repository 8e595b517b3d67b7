"""Data sets: records from files or made up, tokenised, in an order that the seed decides.

records.py    what a record and a data set are, and the order    problems.py   made up: additions, small programs
cache.py      data sets in files, tokenised once                 tokenise.py   the processes that tokenise, their files
formats.py    JSON, CSV, Parquet, Arrow, WebDataset              parse.py      a raw record to token ids
storage.py    files by path or URL                               tokenizer.py  the model's tokenizer and chat template
hub.py        data sets by their names on the hub                answers.py    the log of answers that a gateway keeps
gym.py        problems of reasoning-gym
conversation.py   conversations as the model's chat template writes them, and what of them is learned
layouts.py        records as data sets commonly have them
show.py           records as text, with what is learned of them marked
"""

import math

from trainer.config import ArithmeticData, CodeTasksData, DataConfig, ReasoningGymData, TrainerConfig
from trainer.data.cache import FileDataset
from trainer.data.gym import ReasoningGym
from trainer.data.parse import ANY, Needs
from trainer.data.problems import Arithmetic, CodeTasks
from trainer.data.records import Dataset, Learns
from trainer.data.tokenizer import Tokenizer


def build_dataset(config: DataConfig, tokenizer: Tokenizer, seed: int, needs: Needs = ANY) -> Dataset:
    """The data set a config entry names; of files the records that meet the `needs`, and the others are bad. Raises
    DataError for one that cannot be used."""
    if isinstance(config, ArithmeticData):
        return Arithmetic(config, tokenizer, seed)
    if isinstance(config, CodeTasksData):
        return CodeTasks(config, tokenizer, seed)
    if isinstance(config, ReasoningGymData):
        return ReasoningGym(config, tokenizer, seed)
    return FileDataset(config, tokenizer, needs)


def run_records(config: TrainerConfig, tokenizer: Tokenizer, learns: Learns, longest: int) -> Dataset:
    """The records that a run trains on. It `learns` so much of each, in sequences of at most `longest` tokens."""
    row = config.packing.max_tokens if config.packing is not None else None
    return build_dataset(config.data, tokenizer, config.seed, Needs(learns, longest, row))


def epoch_steps(config: TrainerConfig, tokenizer: Tokenizer, learns: Learns, longest: int) -> int:
    """How many steps take each record `config.epochs` times; what the last lacks is of the next epoch."""
    assert config.epochs is not None
    return math.ceil(config.epochs * len(run_records(config, tokenizer, learns, longest)) / config.batch)
