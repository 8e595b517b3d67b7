"""Data sets by the kind of their config entry, the sampler and the tokenizer."""

from trainer.config import ArithmeticData, CodeTasksData, JsonlData
from trainer.data.arithmetic import Arithmetic
from trainer.data.code_tasks import CodeTasks
from trainer.data.jsonl import JsonlDataset
from trainer.data.records import Dataset, Record
from trainer.data.sampler import take
from trainer.data.tokenizer import Tokenizer

__all__ = ["Arithmetic", "CodeTasks", "Dataset", "JsonlDataset", "Record", "Tokenizer", "build_dataset", "take"]


def build_dataset(config: JsonlData | ArithmeticData | CodeTasksData, tokenizer: Tokenizer, seed: int) -> Dataset:
    """The data set a config entry names. Raises DataError for one that cannot be used."""
    if isinstance(config, CodeTasksData):
        return CodeTasks(config, tokenizer, seed)
    return JsonlDataset(config, tokenizer) if isinstance(config, JsonlData) else Arithmetic(config, tokenizer, seed)
