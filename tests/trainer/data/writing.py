"""Data sets in files, written for tests."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq


def problems(count: int, first: int = 0) -> list[dict[str, Any]]:
    """Addition problems, all different."""
    return [{"prompt": f"{n}+{n + 1}=", "target": f"{2 * n + 1}"} for n in range(first, first + count)]


def jsonl(path: Path, records: Iterable[object]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def parquet(path: Path, records: Sequence[Mapping[str, Any]], rows: int = 1000) -> Path:
    """`rows` is the size of a row group."""
    pq.write_table(pa.Table.from_pylist([dict(r) for r in records]), path, row_group_size=rows)
    return path


def shard(path: Path, samples: Mapping[str, Mapping[str, bytes]]) -> Path:
    """A tar file of `{sample: {extension: content}}`."""
    with tarfile.open(path, "w:gz" if path.suffix == ".gz" else "w") as tar:
        for name, parts in samples.items():
            for extension, content in parts.items():
                member = tarfile.TarInfo(f"{name}.{extension}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return path


def as_samples(records: Iterable[object], prefix: str = "s") -> dict[str, dict[str, bytes]]:
    """Each record as one `.json`."""
    return {f"{prefix}{i:06d}": {"json": json.dumps(record).encode()} for i, record in enumerate(records)}
