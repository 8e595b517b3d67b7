"""Data sets in files, written for tests."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import tarfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests import world

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": zstandard.compress,
}


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


def write(kind: str, path: Path, records: Sequence[Mapping[str, Any]]) -> Path:
    """Records as a file of a kind, or by the ending of its name."""
    if kind in ("webdataset", "tar"):
        return shard(path, as_samples(records, path.stem))
    if kind in ("csv", "tsv"):
        with path.open("w", newline="") as file:
            rows = csv.DictWriter(file, list(records[0]), delimiter="\t" if kind == "tsv" else ",")
            rows.writeheader()
            rows.writerows(records)
        return path
    if kind == "arrow":
        table = pa.Table.from_pylist([dict(r) for r in records])
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table)
        return path
    return parquet(path, records, rows=7) if kind == "parquet" else jsonl(path, records)


LLAMA = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>")

CHATML = ("<|endoftext|>", "<|im_end|>", "<|im_start|>")
R1 = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>")


def published(name: str) -> str:
    """A chat template as its authors published it, out of TRL's collection."""
    return next(row.text for row in world.rows() if row.path == f"trl/chat_templates/{name}.jinja")


def byte_tokenizer(
    directory: Path, special: Sequence[str], stops: Sequence[str], eos: str | None, template: str | None
) -> Path:
    """A model's directory, without weights, whose tokens are bytes and `special`. `stops` is the list in
    generation_config.json, `eos` is in tokenizer_config.json."""
    vocabulary = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.save(str(directory / "tokenizer.json"))
    ids = [tokenizer.token_to_id(token) for token in stops]
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    config = {"bos_token": special[0], "eos_token": eos, "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return directory
