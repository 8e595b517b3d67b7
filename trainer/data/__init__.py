"""Data sets by the kind of their config entry, the sampler and the tokenizer."""

from trainer.config import ArithmeticData, JsonlData
from trainer.data.arithmetic import Arithmetic
from trainer.data.jsonl import JsonlDataset
from trainer.data.records import Dataset, Record
from trainer.data.sampler import take
from trainer.data.tokenizer import Tokenizer

__all__ = ["Arithmetic", "Dataset", "JsonlDataset", "Record", "Tokenizer", "build_dataset", "take"]


def build_dataset(config: JsonlData | ArithmeticData, tokenizer: Tokenizer, seed: int) -> Dataset:
    """The data set a config entry names. Raises DataError for one that cannot be used."""
    return JsonlDataset(config, tokenizer) if isinstance(config, JsonlData) else Arithmetic(config, tokenizer, seed)
