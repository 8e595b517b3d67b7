"""Files of every kind give the same records in the same order, wherever they are and however they are cut."""

from __future__ import annotations

import bz2
import functools
import gzip
import json
import lzma
import resource
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fsspec
import psutil
import pytest
import zstandard

from tests.trainer.data.conftest import Open, prompts
from tests.trainer.data.writing import as_samples, jsonl, parquet, problems, shard
from trainer.data.storage import expand, find_files
from trainer.errors import DataError

COMPRESS = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress, "zst": zstandard.compress}


def write(kind: str, path: Path, records: list[dict[str, str]]) -> Path:
    if kind == "webdataset":
        return shard(path, as_samples(records, path.stem))
    return parquet(path, records, rows=7) if kind == "parquet" else jsonl(path, records)


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "webdataset"])
def test_records_are_the_same_from_every_format(open_data: Open, tmp_path: Path, kind: str) -> None:
    records = problems(30)
    for part in range(3):
        write(kind, tmp_path / f"part-{part:02d}.data", records[10 * part : 10 * part + 10])
    for pattern in ("part-*.data", "part-{00..02}.data", "part-0{0,1,2}.data"):
        data = open_data(tmp_path / pattern, kind, eval_path=str(tmp_path / "part-01.data"))
        assert prompts(data) == [r["prompt"] for r in records]
        assert [data[i].answer for i in range(30)] == [r["target"] for r in records]
        assert [data[i].index for i in range(30)] == list(range(30))
        assert [r.prompt for r in data.held_out] == [r["prompt"] for r in records[10:20]]
    assert prompts(open_data(tmp_path / "part-{02,00}.data", kind)) == [
        r["prompt"] for r in records[20:] + records[:10]
    ]


@pytest.mark.parametrize(("kind", "workers"), [("jsonl", 1), ("jsonl", 2), ("parquet", 1)])
def test_the_order_does_not_depend_on_how_files_are_cut(
    open_data: Open, tmp_path: Path, kind: str, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = problems(60)
    path = write(kind, tmp_path / "a.data", records)
    whole = open_data(path, kind)
    for size in (50, 333) if workers > 1 else (1, 50, 333):
        monkeypatch.setattr("trainer.data.formats.UNIT_BYTES", size)
        cut = open_data(path, kind, workers=workers, cache_dir=str(tmp_path / f"cut-{size}"))
        assert prompts(cut) == prompts(whole) == [r["prompt"] for r in records]


def open_below(directory: Path) -> list[str]:
    """The files of a directory that this process has open."""
    return [file.path for file in psutil.Process().open_files() if file.path.startswith(str(directory))]


def test_a_process_may_have_a_file_for_each_segment_while_it_reads_them(
    open_data: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = jsonl(tmp_path / "a.jsonl", problems(100))
    monkeypatch.setattr("trainer.data.formats.UNIT_BYTES", 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
        data = open_data(path, workers=1)
        assert len(open_below(tmp_path)) > 1024
        assert prompts(data) == [r["prompt"] for r in problems(100)]
        del data
        assert not open_below(tmp_path)
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
        monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
        with pytest.raises(DataError, match=r"a\.jsonl takes \d+ open files, more than .*ulimit -n"):
            open_data(path, workers=1)
    finally:
        monkeypatch.undo()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_lines_are_found_whatever_byte_a_range_begins_at(
    open_data: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = b'{"prompt": "1"}\n\n\r\n{"prompt": "22"}\r\n{"prompt": "333"}'
    (tmp_path / "a.jsonl").write_bytes(text)
    for size in range(1, len(text) + 1):
        monkeypatch.setattr("trainer.data.formats.UNIT_BYTES", size)
        data = open_data(tmp_path / "a.jsonl", cache_dir=str(tmp_path / str(size)), workers=1)
        assert prompts(data) == ["1", "22", "333"], size


@pytest.mark.parametrize("extension", COMPRESS)
def test_compressed_lines(open_data: Open, tmp_path: Path, extension: str) -> None:
    plain = jsonl(tmp_path / "a.jsonl", problems(6000)).read_bytes()
    packed = tmp_path / f"a.jsonl.{extension}"
    packed.write_bytes(COMPRESS[extension](plain))
    assert len(open_data(packed)) == 6000
    packed.write_bytes(packed.read_bytes()[:-50])  # cut short
    with pytest.raises(DataError, match="damaged"):
        open_data(packed)
    rest = open_data(packed, max_bad=10) if extension != "bz2" else None  # its blocks are larger than the file
    assert rest is None or 1000 < len(rest) < 6000


def test_a_webdataset_is_read_as_its_own_library_reads_it(open_data: Open, tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    with webdataset.TarWriter(str(tmp_path / "a.tar")) as sink:
        sink.write({"__key__": "x/0", "json": {"prompt": "1+1=", "target": "2", "tests": ["a", 3]}})
        sink.write({"__key__": "x/1", "prompt.txt": "no", "txt": "2+2=", "target": "4", "png": b"\x89\xff"})
        sink.write({"__key__": "x/2.v1", "txt": "3+3=", "target": "6", "tests.json": [7]})
    data = open_data(tmp_path / "a.tar", "webdataset", max_bad=1)
    assert [(r.prompt, r.answer) for r in (data[i] for i in range(2))] == [("1+1=", "2"), ("2+2=", "4")]
    theirs = list(webdataset.WebDataset(str(tmp_path / "a.tar"), shardshuffle=False))
    assert [sample["__key__"] for sample in theirs] == ["x/0", "x/1", "x/2"]
    assert set(theirs[2]) >= {"v1.txt", "v1.target"}  # so it is not a record of ours
    assert data.summary()["bad"] == [f"{tmp_path}/a.tar, sample 'x/2': 'prompt' is not a text"]


@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz"])
def test_a_shard_that_is_cut_short_gives_what_is_whole(open_data: Open, tmp_path: Path, name: str) -> None:
    path = shard(tmp_path / name, as_samples(problems(200)))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(DataError, match="the shard is damaged"):
        open_data(path, "webdataset")
    data = open_data(path, "webdataset", max_bad=1)
    assert 20 < len(data) < 200
    assert prompts(data) == [r["prompt"] for r in problems(len(data))]
    assert data.summary()["bad_records"] == 1


def test_a_damaged_row_group_is_left_out_whole(open_data: Open, tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", [r | {"unused": "x" * 100} for r in problems(100)], rows=25)
    data = bytearray(path.read_bytes())
    place = data.find(b"25+26=")  # the first of the second group
    data[place - 20 : place + 300] = b"\xff" * 320
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"rows? \d+.*damaged"):
        open_data(path, "parquet")
    kept = open_data(path, "parquet", max_bad=25)
    assert len(kept) + kept.summary()["bad_records"] == 100
    assert {r["prompt"] for r in problems(25)} | {r["prompt"] for r in problems(50, 50)} <= set(prompts(kept))


def test_columns_that_are_not_named_are_not_read(open_data: Open, tmp_path: Path) -> None:
    rows = [{**r, "reward": {"truth": "7", "other": 1}, "tests": ["t"], "image": b"\x00" * 10} for r in problems(3)]
    path = parquet(tmp_path / "a.parquet", rows)
    data = open_data(path, "parquet", answer_key="reward.truth", extra_keys=("tests",))
    assert data[1].answer == "7"
    assert data[1].extra == {"tests": ["t"]}


@pytest.mark.parametrize(
    ("kind", "content", "complaint"),
    [
        ("parquet", b"PAR1 not really", "not a Parquet file"),
        ("parquet", b"PAR1" + b"\xff" * 50 + b"\x20\0\0\0PAR1", "not a Parquet file"),
        ("webdataset", b"no tar at all" * 100, "the shard is damaged"),
        ("jsonl", b"\xff\xfe{}", "line 1: it is not JSON"),
    ],
)
def test_another_kind_of_file_is_named(
    open_data: Open, tmp_path: Path, kind: str, content: bytes, complaint: str
) -> None:
    (tmp_path / "a.bin").write_bytes(content)
    with pytest.raises(DataError, match=rf"a\.bin.*{complaint}"):
        open_data(tmp_path / "a.bin", kind)


def test_a_line_without_end_does_not_fill_the_memory(
    open_data: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.data.formats.LARGEST_BYTES", 1000)
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "1", "x": "y" * 5000}) + '\n{"prompt": "2"}\n')
    data = open_data(tmp_path / "a.jsonl", max_bad=1)
    assert prompts(data) == ["2"]
    assert data.summary()["bad"] == [f"{tmp_path}/a.jsonl, line 1: the line is longer than 1000 bytes"]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("a", ["a"]),
        ("a{1..3}", ["a1", "a2", "a3"]),
        ("a{08..10}.b", ["a08.b", "a09.b", "a10.b"]),
        ("{x,y}{0..1}", ["x0", "x1", "y0", "y1"]),
    ],
)
def test_braces(pattern: str, expected: list[str]) -> None:
    assert expand(pattern) == expected


@pytest.mark.parametrize(
    ("path", "complaint"),
    [
        ("absent.jsonl", r"absent\.jsonl does not exist"),
        ("*.none", "names no file"),
        ("", "is a directory"),
        ("nowhere://x/y.jsonl", "not in a store"),
    ],
)
def test_what_cannot_be_opened_is_named(open_data: Open, tmp_path: Path, path: str, complaint: str) -> None:
    with pytest.raises(DataError, match=complaint):
        open_data(path if "://" in path else tmp_path / path)


def test_any_store_that_fsspec_knows(open_data: Open, tmp_path: Path) -> None:
    text = jsonl(tmp_path / "a.jsonl", problems(5)).read_bytes()
    with fsspec.open("memory://bucket/part-0.jsonl", "wb") as stream:
        stream.write(text)
    assert len(open_data("memory://bucket/part-*.jsonl")) == 5
    assert len(open_data(f"file://{tmp_path}/a.jsonl")) == 5


class WithoutRanges(SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None: ...


class WithRanges(WithoutRanges):
    """Serves byte ranges, as object stores do."""

    def do_GET(self) -> None:
        if not (wanted := self.headers.get("Range")):
            return super().do_GET()
        content = Path(self.translate_path(self.path)).read_bytes()
        first, last = wanted.removeprefix("bytes=").split("-")
        part = content[int(first) : int(last or len(content)) + 1]
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{int(first) + len(part) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part)
        return None

    def end_headers(self) -> None:
        self.send_header("Accept-Ranges", "bytes")
        super().end_headers()


@pytest.fixture(params=[WithRanges, WithoutRanges])
def http(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    handler = functools.partial(request.param, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_signed_url_is_one_file_and_is_not_read_to_find_it(tmp_path: Path, http: str) -> None:
    """A question mark is no wildcard there, and what looks like links in a file does not make it a directory."""
    jsonl(tmp_path / "a.jsonl", [{"prompt": f"<a href='{http}/a.jsonl?sig=1/b'>"}])
    (found,) = find_files(f"{http}/a.jsonl?sig=1")
    assert (found.url, found.size) == (f"{http}/a.jsonl?sig=1", (tmp_path / "a.jsonl").stat().st_size)


def test_over_http(open_data: Open, tmp_path: Path, http: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.data.formats.UNIT_BYTES", 500)
    monkeypatch.setattr("trainer.data.tokenise.DELAY_S", 0.01)
    records = problems(100)
    jsonl(tmp_path / "a.jsonl", records)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    for number in range(2):
        shard(tmp_path / f"s{number}.tar", as_samples(records[number * 50 : number * 50 + 50]))
    for name, kind in (("a.jsonl", "jsonl"), ("b.jsonl.gz", "jsonl"), ("s{0..1}.tar", "webdataset")):
        assert prompts(open_data(f"{http}/{name}", kind)) == [r["prompt"] for r in records]
    with pytest.raises(DataError, match="does not exist"):
        open_data(f"{http}/absent.jsonl")
