"""Parquet. A unit is a range of row groups; only the columns that the configuration names are read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from trainer.config import FileData
from trainer.data.formats.base import UNIT_BYTES, Bad, Raw, Unit
from trainer.data.storage import File, opened
from trainer.errors import DataError

BATCH_ROWS = 256


class Parquet:
    """Places are `row N`, from 1 at the start of the file."""

    def units(self, file: File, config: FileData) -> list[Unit]:
        if not file.seekable:
            raise DataError(f"{file.url} is on a server without range requests, which Parquet needs. Copy it first.")
        with _parquet(file.url) as parquet:
            groups, units, start, size = parquet.metadata, [], 0, 0
            for number in range(groups.num_row_groups):
                size += groups.row_group(number).total_byte_size
                if size >= UNIT_BYTES:
                    units.append(Unit(file.url, start, number + 1))
                    start, size = number + 1, 0
            if start < groups.num_row_groups:
                units.append(Unit(file.url, start, groups.num_row_groups))
        return units

    def read(self, unit: Unit, config: FileData) -> Iterator[Raw]:
        with _parquet(unit.url) as parquet:
            columns = _columns(parquet.schema_arrow.names, config)
            row = sum(parquet.metadata.row_group(g).num_rows for g in range(unit.start))
            for group in range(unit.start, unit.end):
                rows = parquet.metadata.row_group(group).num_rows
                done = 0
                try:
                    for batch in parquet.iter_batches(BATCH_ROWS, [group], columns, use_threads=False):
                        for value in batch.to_pylist():
                            done += 1
                            yield f"row {row + done}", value
                except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
                    if not _of_content(error):
                        raise
                    reason = f"its row group {group} is damaged ({error})"
                    yield Bad(f"rows {row + done + 1} to {row + rows}", reason, rows - done)
                row += rows


@contextmanager
def _parquet(url: str) -> Iterator[Any]:
    with opened(url, 0, decompress=False) as stream:
        try:
            parquet = pq.ParquetFile(stream)
        except (OSError, pa.ArrowException) as error:
            if not _of_content(error):
                raise
            raise DataError(f"{url} is not a Parquet file ({error}). Write it anew.") from None
        yield parquet


def _of_content(error: Exception) -> bool:
    """Whether the file is wrong, rather than the reading of it: Arrow raises OSError for both."""
    return not isinstance(error, OSError) or (type(error) is OSError and error.errno is None)


def _columns(names: list[str], config: FileData) -> list[str]:
    wanted = {config.prompt_key, config.target_key, config.answer_key, config.chosen_key, config.rejected_key, "extra"}
    wanted |= set(config.extra_keys)
    return [name for name in names if name in wanted or any(key.startswith(f"{name}.") for key in wanted)]
