"""The trainer's readers beside the builders of the library `datasets`: equal rows of each well-formed kind of file, and
what either makes of others. A row of DIFFERENT that fails tells that another `datasets` reads the file differently."""

from __future__ import annotations

import codecs
import itertools
import json
import re
import tempfile
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.trainer.data.writing import COMPRESS, as_samples, problems, shard
from trainer.data.formats import NAME, Bad
from trainer.data.hub import _KINDS
from trainer.data.storage import find_files
from trainer.data.tokenise import FORMATS

Rows = list[Any]
BLOCK = {"chunksize": 20}  # two short lines; without it 10 MiB


def ours(path: Path) -> Rows:
    config = _KINDS[_builder(path)](path=str(path))
    reader, files = FORMATS[config.kind], find_files(config.path)
    rows = (row for file in files for unit in reader.units(file, config) for row in reader.read(unit, config))
    return [present(row) for row in rows if row is not None]


def _builder(path: Path) -> str:
    kind = path.name.split(".")[1]
    return {"jsonl": "json", "tsv": "csv", "tar": "webdataset"}.get(kind, kind)


def loaded(path: Path, **options: Any) -> Any:
    import datasets  # for a second and a half, which no other test needs

    options |= {"sep": "\t"} if path.suffix == ".tsv" else {}  # as for names on the hub
    files, cache = str(path), str(path.parent / "cache")
    return datasets.load_dataset(_builder(path), data_files=files, split="train", cache_dir=cache, **options)


def theirs(path: Path, **options: Any) -> Rows | str:
    """The rows, or an error."""
    try:
        return [present(row) for row in loaded(path, **options)]
    except Exception as error:
        return f"{error} {error.__cause__}"


def present(row: Any) -> Any:
    """Without the keys that have no value, which builders give to each row. A sample of theirs, in our layout."""
    if not isinstance(row, dict):
        return row
    if "__url__" in row:
        row = {name.removesuffix(".json"): v.decode() if isinstance(v, bytes) else v for name, v in row.items()}
        row |= {"prompt": row.pop("txt", None)} | row.pop("json", {})
    return {name: value for name, value in row.items() if value is not None and name not in (NAME, "__url__")}


def lines(*rows: Any) -> bytes:
    """Bytes stay as they are."""
    return b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows)


def told(*answers: Any) -> Rows:
    return [{"answer": answer} for answer in answers]


def table(rows: Rows, kind: Any, **options: Any) -> bytes:
    """Each row in a batch, or row group, of its own."""
    sink, keys = pa.BufferOutputStream(), dict.fromkeys(key for row in rows for key in row)
    content = pa.Table.from_pylist([keys | row for row in rows])
    with kind(sink, content.schema, **options) as writer:
        writer.write_table(content, 1)
    return bytes(sink.getvalue().to_pybytes())


def tar(*samples: dict[str, bytes]) -> bytes:
    with tempfile.NamedTemporaryFile(suffix=".tar") as file:
        return shard(Path(file.name), {str(number): parts for number, parts in enumerate(samples)}).read_bytes()


ROWS: Rows = [
    {"prompt": 'Zwölf,\r\n"x"\t😀\x00\u2028.', "extra": {"tests": ["a", ""], "n": 2**63 - 1, "f": 1e22, "ok": True}},
    {"prompt": "007", "target": " 2", "extra": {"tests": [], "n": -1, "f": 0.1, "ok": None}},
    {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": None}]},
]
NAN, BIG = pytest.approx(float("nan"), nan_ok=True), 2**100 + 1  # no float
TEXTS: Rows = [{"prompt": 'Zwölf,\r\n"x"\t😀', "target": " b "}, {"target": "NaN?"}]
EXCEL = '\ufeffprompt,target\r\n"Zwölf,\r\n""x""\t😀", b \r\n\r\n,NaN?'.encode()
PLAIN, GZ, ZST = lines(*ROWS), COMPRESS["gz"], COMPRESS["zst"]
PARTS = {"txt": "ö".encode(), "target": b"", "more.json": b"[7]"}
WELL_FORMED: dict[str, tuple[str, bytes, Rows]] = {
    "lines": ("jsonl", PLAIN, ROWS),
    "lines in .json": ("json", PLAIN, ROWS),
    "byte order mark": ("jsonl", codecs.BOM_UTF8 + lines(*ROWS[1:]), ROWS[1:]),
    "CRLF": ("jsonl", PLAIN.replace(b"\n", b"\r\n")[:-2], ROWS),
    "empty lines": ("jsonl", lines(b"", ROWS[0], b"\r", b"  ", *ROWS[1:], b""), ROWS),
    "NaN": ("jsonl", lines(*told(float("nan"))), told(NAN)),
    **{f"two of {end}": (f"jsonl.{end}", pack(PLAIN) * 2, ROWS * 2) for end, pack in COMPRESS.items()},
    "array": ("json", codecs.BOM_UTF8 + json.dumps(ROWS, indent=1).encode(), ROWS),
    "array below an empty line": ("json", b"\n" + json.dumps(told("a", "b"), indent=1).encode(), told("a", "b")),
    "csv": ("csv.gz", GZ(EXCEL), TEXTS),
    "tsv": ("tsv", b'answer\tprompt\n"a\t,"\tb', [{"answer": "a\t,", "prompt": "b"}]),
    "parquet": ("parquet", table(ROWS * 5, pq.ParquetWriter), ROWS * 5),
    "arrow stream": ("arrow", table(ROWS, pa.ipc.new_stream), ROWS),
    "arrow file": ("arrow", table(ROWS, pa.ipc.new_file), ROWS),
    "samples": ("tar", tar(*as_samples(ROWS).values()), ROWS),
    "samples of parts": ("tar.gz", GZ(tar(PARTS)), [{"prompt": "ö", "target": "", "more": [7]}]),
}


@pytest.mark.parametrize("case", WELL_FORMED)
def test_rows_are_those_of_datasets(tmp_path: Path, case: str) -> None:
    name, data, rows = WELL_FORMED[case]
    (path := tmp_path / f"a.{name}").write_bytes(data)
    assert (ours(path), theirs(path)) == (rows, rows)


ONE, TWO, END = told("1"), told("1", "2"), "damaged.*the rest of it is left out"
TABLES = table(told("a", "bbbb", "c"), pq.ParquetWriter, compression="none")
GROUPS = re.sub(rb"(?s).{16}bbbb", b"\xff" * 20, TABLES, count=1)
DIFFERENT: dict[str, tuple[str, bytes, Rows, Rows | str]] = {
    # A bad line costs them the block, and is not named. (Texts are patterns: of why ours is bad, and of their error.)
    "broken line": ("jsonl", lines(*ONE, b"{", *TWO), [*ONE, "not JSON", *TWO], "Missing a name .* in row 1"),
    "no object": ("jsonl", lines(*ONE, b"[1]"), [*ONE, [1]], "changed from object to string in row 0"),
    "null": ("jsonl", lines(*ONE, b"null"), [*ONE, "not an object"], [*ONE, {}]),
    "Latin-1": ("jsonl", lines(*ONE, b'{"answer": "\xff"}'), [*ONE, "not valid UTF-8"], "decode byte 0xff"),
    "UTF-16": ("jsonl", "{}".encode("utf-16"), ["it is UTF-16"], "Invalid value"),
    # Values become others.
    "large integer": ("jsonl", lines(*told(BIG)), told(BIG), told(float(BIG))),
    "NaN in an array": ("json", json.dumps(told(float("nan"))).encode(), told(NAN), [{}]),
    "date": ("jsonl", lines(*told("2024-01-02")), told("2024-01-02"), told(datetime(2024, 1, 2))),
    "digits, then a list": ("jsonl", lines(*told("7", ["7"])), told("7", ["7"]), told(7, ["7"])),
    # The first block decides about the others.
    "list later": ("jsonl", lines(*told(*"777", ["7"])), told(*"777", ["7"]), told(*"777", '["7"]')),
    "key later": ("jsonl", lines(*TWO, {"prompt": "1"}), [*TWO, {"prompt": "1"}], "names don't match"),
    "value later": ("jsonl", lines(*told(None, None, "7")), [{}, {}, *told("7")], "string to null"),
    # Files that they take, and we refuse.
    "array in .jsonl": ("jsonl", json.dumps(ONE).encode(), ["begins an array"], ONE),
    "gz without its ending": ("jsonl", GZ(lines(*ONE)), [r"end the file's name in \.gz"], ONE),
    # In CSV too values become others, and columns.
    "digits": ("csv", b"answer\n007\n", told("007"), told(7)),
    "words for none": ("csv", b"answer\nNaN\nNone\nx\n", told("NaN", "None", "x"), [{}, {}, *told("x")]),
    "value too many": ("csv", b"answer\n1\n2,3\n2\n", [*ONE, "more values", *told("2")], "Expected 1 .* line 3, saw 2"),
    "all one too many": ("csv", b"answer\n1,x\n", ["more values"], [{"answer": "x", "__index_level_0__": 1}]),
    "Latin-1 in CSV": ("csv", b"answer\n1\n\xff\n2\n", [*ONE, "in UTF-8", *told("2")], "decode byte 0xff"),
    "open quote": ("csv", b'answer\n1\n"2', [*ONE, "unexpected end of data"], "EOF inside string"),
    # A damage costs them the file, or is not told.
    "gz cut": ("jsonl.gz", GZ(lines(*ONE))[:-9], [END], "ended before the end-of-stream marker"),
    "zst cut": ("csv.zst", ZST(b"answer\nx\n") + ZST(b"y\n")[:-3], [END], told("x")),
    "row group": ("parquet", GROUPS, [*told("a"), "row group 1 is damaged", *told("c")], "deserialize thrift"),
    "arrow cut": ("arrow", table(TWO, pa.ipc.new_stream)[:-99], [*ONE, END], "Expected to read .* bytes"),
    "tar cut": ("tar", tar(*as_samples(told(*"123")).values())[:2048], [*ONE, "after '0' .*cut short"], TWO),
    # Of WebDataset the first samples decide about the others.
    "no JSON": ("tar", tar({"json": lines(*ONE)}, {"json": b"{"}), [*ONE, "not JSON"], "Expecting property name"),
    "large integer in a sample": ("tar", tar({"json": lines(*told(BIG))}), told(BIG), "int too large"),
    "part less": ("tar", tar({"answer": b"1", "x": b""}, {"answer": b"2"}), [{**ONE[0], "x": ""}, TWO[1]], "share"),
    "other type": ("tar", tar(*({"json": lines(row)} for row in told("7", [7]))), told("7", [7]), "incompatible types"),
    "no image": ("tar", tar({"answer": b"1", "png": b"\x89\xff"}), ONE, "cannot identify image"),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_a_file_that_datasets_reads_otherwise(tmp_path: Path, case: str) -> None:
    name, data, rows, other = DIFFERENT[case]
    (path := tmp_path / f"a.{name}").write_bytes(data)
    for found, row in zip(ours(path), rows, strict=True):
        assert re.search(row, found.reason) if isinstance(found, Bad) else found == row
    found = theirs(path, **(BLOCK if name.startswith("json") else {}))
    assert re.search(str(other), found) if isinstance(found, str) else found == other


def test_their_stream_is_resumed_by_reading_its_file_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours is resumed at a record (`take` in trainer/data/records.py). Theirs, if shuffled, loses rows."""
    from datasets.packaged_modules.json.json import Json

    path, read, original = tmp_path / "a.jsonl", list[int](), Json._cast_table
    path.write_bytes(lines(*problems(100)))

    def counted(self: Any, rows: pa.Table, *args: Any, **options: Any) -> pa.Table:
        read.append(len(rows))
        return original(self, rows, *args, **options)

    monkeypatch.setattr(Json, "_cast_table", counted)
    stream = loaded(path, streaming=True, **BLOCK)
    for each, kept in ((stream, 10), (stream.shuffle(1, buffer_size=8), 6)):
        rows = iter(each)
        used, state, rest = list(itertools.islice(rows, 90)), each.state_dict(), list(rows)
        read.clear()
        each.load_state_dict(state)
        again = list(each)
        assert (len(used), len(rest), sum(read), len(again)) == (90, 10, 100, kept)
        assert (again == rest) == (kept == 10)
