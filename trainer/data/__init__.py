"""Data sets by the kind of their config entry, the sampler and the tokenizer."""

from trainer.config import ArithmeticData, CodeTasksData, DataConfig
from trainer.data.arithmetic import Arithmetic
from trainer.data.code_tasks import CodeTasks
from trainer.data.files import FileDataset
from trainer.data.records import Dataset, Record, summary
from trainer.data.sampler import Contents, take
from trainer.data.tokenizer import Tokenizer

__all__ = [
    "Arithmetic",
    "CodeTasks",
    "Contents",
    "Dataset",
    "FileDataset",
    "Record",
    "Tokenizer",
    "build_dataset",
    "summary",
    "take",
]


def build_dataset(config: DataConfig, tokenizer: Tokenizer, seed: int) -> Dataset:
    """The data set a config entry names. Raises DataError for one that cannot be used."""
    if isinstance(config, ArithmeticData):
        return Arithmetic(config, tokenizer, seed)
    if isinstance(config, CodeTasksData):
        return CodeTasks(config, tokenizer, seed)
    return FileDataset(config, tokenizer)
