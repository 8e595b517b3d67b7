"""File formats by the kind of the data set's config entry."""

from trainer.data.formats.base import Bad, Format, Raw, Unit

__all__ = ["Bad", "Format", "Raw", "Unit", "format_of"]


def format_of(kind: str) -> Format:
    """The format of `jsonl`, `parquet` or `webdataset`. Only what is needed is imported."""
    if kind == "parquet":
        from trainer.data.formats.parquet import Parquet

        return Parquet()
    if kind == "webdataset":
        from trainer.data.formats.webdataset import WebDataset

        return WebDataset()
    from trainer.data.formats.jsonl import Jsonl

    return Jsonl()
