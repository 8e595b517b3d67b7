"""Data sets in files: those of every kind give the same records in the same order, wherever they are and however they
are cut; and the cache of tokenised records, which is made once, by the first run, and never trusted blindly."""

from __future__ import annotations

import functools
import gzip
import json
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import fsspec
import psutil
import pyarrow as pa
import pytest
import zstandard
from fastapi import FastAPI
from fastapi.staticfiles import StaticFiles

from tests.trainer.data.conftest import Open, prompts
from tests.trainer.data.writing import COMPRESS, as_samples, jsonl, parquet, problems, shard, write
from tests.trainer.rollouts.generate_server import serve_app
from tests.waiting import wait_until
from trainer.config import JsonlData, ModelConfig, SftConfig, TrainerConfig
from trainer.data import cache as cache_module
from trainer.data import epoch_steps
from trainer.data.cache import FileDataset
from trainer.data.storage import expand, find_files
from trainer.data.tokenizer import Tokenizer
from trainer.errors import DataError
from trainer.tiny_model import write_tiny_model


@pytest.mark.parametrize(
    ("kind", "workers"),
    [
        *((kind, 1) for kind in ("jsonl", "csv", "parquet", "arrow", "webdataset")),
        ("parquet", 3),
        # Processes get units, whatever they are of.
        *(pytest.param(kind, 3, marks=pytest.mark.broad) for kind in ("jsonl", "csv", "arrow", "webdataset")),
    ],
)
def test_records_are_the_same_from_every_format(open_data: Open, tmp_path: Path, kind: str, workers: int) -> None:
    records = problems(30)
    for part in range(3):
        write(kind, tmp_path / f"part-{part:02d}.data", records[10 * part : 10 * part + 10])
    for pattern in ("part-*.data", "part-{00..02}.data", "part-0{0,1,2}.data"):
        data = open_data(tmp_path / pattern, kind, workers=workers, eval_path=str(tmp_path / "part-01.data"))
        assert prompts(data) == [r["prompt"] for r in records]
        assert [data[i].answer for i in range(30)] == [r["target"] for r in records]
        assert [data[i].index for i in range(30)] == list(range(30))
        assert [r.prompt for r in data.held_out] == [r["prompt"] for r in records[10:20]]
    some = open_data(tmp_path / "part-{02,00}.data", kind, workers=workers)
    assert prompts(some) == [r["prompt"] for r in records[20:] + records[:10]]


@pytest.mark.parametrize(("kind", "workers"), [("jsonl", 1), ("jsonl", 2), ("parquet", 1)])
def test_the_order_does_not_depend_on_how_files_are_cut(
    open_data: Open, tmp_path: Path, kind: str, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = problems(60)
    path = write(kind, tmp_path / "a.data", records)
    whole = open_data(path, kind)
    for size in (50,) if workers > 1 else (1, 50, 333):
        monkeypatch.setattr("trainer.data.formats.UNIT_BYTES", size)
        cut = open_data(path, kind, workers=workers, cache_dir=str(tmp_path / f"cut-{size}"))
        assert prompts(cut) == prompts(whole) == [r["prompt"] for r in records]


def test_lines_are_found_whatever_byte_a_range_begins_at(
    open_data: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = b'{"prompt": "1"}\n\n\r\n{"prompt": "22"}\r\n{"prompt": "333"}'
    (tmp_path / "a.jsonl").write_bytes(text)
    for size in range(1, len(text) + 1):
        monkeypatch.setattr("trainer.data.formats.UNIT_BYTES", size)
        data = open_data(tmp_path / "a.jsonl", cache_dir=str(tmp_path / str(size)), workers=1)
        assert prompts(data) == ["1", "22", "333"], size


BIG = 2**100
READ: dict[str, tuple[bytes, str]] = {
    "a byte order mark": (b'\xef\xbb\xbf{"prompt": "1", "answer": "2"}', "2"),
    "an integer over 64 bits": (b'{"prompt": "1", "answer": %d}' % BIG, str(BIG)),
    "NaN in an unused column": (b'{"prompt": "1", "answer": "NaN", "score": NaN}', "NaN"),
}


@pytest.mark.parametrize("case", READ)
def test_values_are_read_as_they_were_written(open_data: Open, tmp_path: Path, case: str) -> None:
    text, answer = READ[case]
    (tmp_path / "a.jsonl").write_bytes(text)
    assert open_data(tmp_path / "a.jsonl")[0].answer == answer
    shard(tmp_path / "a.tar", {"a": {"json": text}})
    assert open_data(tmp_path / "a.tar", "webdataset")[0].answer == answer


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (b'{"prompt": "\\ud800", "answer": "NaN"}', "it is not JSON .*surrogates"),
        (b'{"prompt": "NaN", "x": ' + b"[" * 100_000, "nested too deeply"),
        (b'{"prompt": "1", "answer": NaN}', "'answer' is not a text"),
        (b'{"prompt": "1", "extra": {"n": %d}}' % BIG, "more than 64 bits"),
        (b"null", "it is not an object"),
    ],
    ids=["surrogate", "deep", "NaN that is used", "integer in extra", "null"],
)
def test_a_value_that_cannot_be_kept_is_named(open_data: Open, tmp_path: Path, line: bytes, complaint: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"prompt": "1"}\n' + line)
    with pytest.raises(DataError, match=f"line 2: .*{complaint}"):
        open_data(tmp_path / "a.jsonl")


def test_epochs_are_counted_in_steps(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Of the records that can be used, and without those of an epoch that is not asked for but for the last step's."""
    path = jsonl(tmp_path / "a.jsonl", [*problems(9), {"target": "7"}])
    data = JsonlData(path=str(path), max_bad=1)
    for epochs, steps in ((1, 3), (2, 5), (0.5, 2)):
        config = TrainerConfig(ModelConfig("m"), data, SftConfig(), epochs=epochs, batch=4)
        assert epoch_steps(config, tokenizer, "target", 100) == steps


def test_a_limit_that_leaves_nothing_is_named(open_data: Open, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"each of the 3 .* longer than data\.max_length \(1 tokens\)\. Raise it"):
        open_data(jsonl(tmp_path / "a.jsonl", problems(3)), max_length=1)


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
    keys = "__key__, v1.target, v1.tests, v1.txt: name the prompt's key in data.prompt_key"
    assert data.summary()["bad"] == [f"{tmp_path}/a.tar, sample 3 (x/2): it has no 'prompt', but {keys}"]


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


def test_values_of_csv_are_the_texts_that_were_written(open_data: Open, tmp_path: Path) -> None:
    text = '\ufeffprompt,answer,target\r\n"1,\r\n""2""=",007,\r\n\r\n3=,NaN,x\r\n'
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(text.encode()))
    data = open_data(tmp_path / "a.csv.gz", "csv")
    assert [(r.prompt, r.answer, bool(r.target_ids)) for r in (data[i] for i in range(2))] == [
        ('1,\r\n"2"=', "007", False),
        ("3=", "NaN", True),
    ]
    assert data.place(1) == f"{tmp_path}/a.csv.gz, row 2"


@pytest.mark.parametrize("new", [pa.ipc.new_stream, pa.ipc.new_file])
def test_a_damaged_arrow_file_gives_what_is_whole(open_data: Open, tmp_path: Path, new: Any) -> None:
    table = pa.Table.from_pylist(problems(200))
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as sink, new(sink, table.schema) as writer:
        writer.write_table(table, 20)
    path = tmp_path / "a.arrow"
    assert prompts(open_data(path, "arrow")) == [r["prompt"] for r in problems(200)]
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(DataError, match="row .*the file is damaged" if new is pa.ipc.new_stream else "not an Arrow"):
        open_data(path, "arrow")
    if new is pa.ipc.new_stream:
        rest = open_data(path, "arrow", max_bad=1)
        assert prompts(rest) == [r["prompt"] for r in problems(len(rest))]


def test_an_array_of_records(open_data: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    path.write_text("\ufeff" + json.dumps([*problems(20), None], indent=1))
    monkeypatch.setattr("trainer.data.formats.UNIT_BYTES", 50)
    data = open_data(path, max_bad=1)
    assert prompts(data) == [r["prompt"] for r in problems(20)]
    assert data.summary()["bad"] == [f"{path}, record 21: it is not an object"]
    assert prompts(open_data(jsonl(tmp_path / "b.json", problems(3)))) == [r["prompt"] for r in problems(3)]
    path.write_text("[1, 2")
    with pytest.raises(DataError, match="record 1: it is not JSON"):
        open_data(path)
    monkeypatch.setattr("trainer.data.formats.LARGEST_BYTES", 4)
    with pytest.raises(DataError, match=r"the array is longer than 4 bytes: convert .* jq -c '\.\[\]'"):
        open_data(path)


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
        ("arrow", b"no Arrow", "not an Arrow file"),
        ("webdataset", b"no tar at all" * 100, "the shard is damaged"),
        ("csv", b'prompt\n1\n"2', "row 2: it is not CSV in UTF-8"),
        ("csv", b"prompt\n\xff", "row 1: it is not CSV in UTF-8"),
        ("csv", b"prompt\n1,2", "row 1: it has more values than the file has names"),
        ("jsonl", '{"prompt": "1"}'.encode("utf-16"), "line 1: it is UTF-16, .* iconv"),
        ("jsonl", b'[\n{"prompt": "1"}\n]', r"line 1: it begins an array, .* jq -c '\.\[\]'"),
        ("jsonl", gzip.compress(b'{"prompt": "1"}', mtime=0), r"line 1: it is compressed: .* \.gz"),
        ("jsonl", zstandard.compress(b'{"prompt": "1"}'), r"line 1: it is compressed: .* \.zst"),
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


@pytest.fixture(params=[True, False], ids=["ranges", "whole"])
def http(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Files on a server that has byte ranges, as object stores do, or none."""
    if request.param:
        app = FastAPI()
        app.mount("/", StaticFiles(directory=tmp_path))
        with serve_app(app) as url:
            yield url
        return
    handler = functools.partial(WithoutRanges, directory=str(tmp_path))
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


OPEN = """
    import pickle, sys
    from trainer.config import JsonlData
    from trainer.data.cache import FileDataset
    path, tokenizer, workers = sys.argv[1:4]
    data = FileDataset(JsonlData(path=path, workers=int(workers)), pickle.load(open(tokenizer, "rb")))
    print(len(data), data.digest)
"""


@pytest.fixture(scope="session")
def pickled(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer for processes that start: they need no transformers, whose import takes seconds, to make it."""
    file = tmp_path_factory.mktemp("pickled") / "tokenizer"
    file.write_bytes(pickle.dumps(Tokenizer(tiny_model)))
    return file


def start(script: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The entries that are made, by name."""
    names: list[str] = []
    original = cache_module._make

    def make(entry: Path, *rest: object) -> object:
        names.append(entry.name)
        return original(entry, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(cache_module, "_make", make)
    return names


def test_it_is_made_once(open_data: Open, tmp_path: Path, made: list[str], cache: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", problems(50))
    first, second = open_data(path), open_data(path, max_bad=7, workers=2)
    assert len(made) == 1
    assert prompts(first) == prompts(second)
    assert [first[i] for i in range(50)] == [second[i] for i in range(50)]
    assert sorted(p.name for p in cache.iterdir()) == [made[0], f"{made[0]}.lock"]


def test_what_changes_the_records_makes_it_anew(
    open_data: Open, tmp_path: Path, made: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = jsonl(tmp_path / "a.jsonl", problems(50))
    open_data(path)
    open_data(path, max_length=100)
    open_data(path, extra_keys=("target",))
    jsonl(path, problems(50, first=1))
    os.utime(path, (1, 1))
    assert prompts(open_data(path))[0] == "1+2="
    other = tmp_path_factory.mktemp("models")
    write_tiny_model(other, characters="9876543210+=", hidden_size=16, intermediate_size=16, num_hidden_layers=1)
    assert FileDataset(JsonlData(path=str(path)), Tokenizer(other))[0].prompt_ids != open_data(path)[0].prompt_ids
    assert len(set(made)) == len(made) == 5


@pytest.mark.parametrize(
    "harm",
    [
        lambda entry: (entry / "MANIFEST").unlink(),
        lambda entry: (entry / "MANIFEST").write_text("{"),
        lambda entry: (entry / "all.records").unlink(),
        lambda entry: os.truncate(entry / "all.records", 10),
        lambda entry: os.truncate(entry / "all.index", 16),
    ],
)
def test_a_damaged_entry_is_made_anew(
    open_data: Open, tmp_path: Path, made: list[str], cache: Path, harm: Callable[[Path], object]
) -> None:
    path = jsonl(tmp_path / "a.jsonl", problems(50))
    expected = prompts(open_data(path))
    harm(cache / made[0])
    assert prompts(open_data(path)) == expected
    assert made == [made[0]] * 2


def test_a_flipped_bit_is_found_where_it_is_read(open_data: Open, tmp_path: Path, made: list[str], cache: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", problems(50))
    open_data(path)
    file = cache / made[0] / "all.records"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    harmed = open_data(path)
    with pytest.raises(DataError, match=r"damaged at byte \d+\. Remove .*it is made anew"):
        prompts(harmed)
    assert harmed[0].prompt == "0+1="


def test_an_open_data_set_outlives_its_entry(open_data: Open, tmp_path: Path, made: list[str], cache: Path) -> None:
    data = open_data(jsonl(tmp_path / "a.jsonl", problems(50)))
    for file in (cache / made[0]).iterdir():
        file.unlink()
    assert len(prompts(data)) == 50


def test_runs_that_start_together_share_the_work(tmp_path: Path, pickled: Path, cache: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", problems(10_000))
    first = start(OPEN, path, pickled, 1)
    wait_until(lambda: list(cache.glob(".making-*")), 120, process=first)
    first.send_signal(signal.SIGSTOP)  # in the middle of it
    others = [start(OPEN, path, pickled, 1) for _ in range(2)]
    for process in others:
        assert process.stderr is not None
        assert any("waiting for it" in line for line in process.stderr)  # reads until then
    first.send_signal(signal.SIGCONT)
    answers = [process.communicate(timeout=240)[0] for process in (first, *others)]
    assert len(set(answers)) == 1
    assert answers[0].startswith("10000 ")
    assert len([entry for entry in cache.iterdir() if entry.is_dir()]) == 1


def test_what_a_killed_run_left_behind_is_cleared(tmp_path: Path, pickled: Path, cache: Path, open_data: Open) -> None:
    for number in range(4):
        jsonl(tmp_path / f"{number}.jsonl", problems(10_000))
    path = tmp_path / "*.jsonl"
    running = start(OPEN, path, pickled, 2)
    wait_until(lambda: list(cache.glob(".making-*/000001.records")), 120, process=running)
    workers = children(running.pid)
    assert len(workers) == 2
    running.send_signal(signal.SIGKILL)
    running.communicate()
    _, alive = psutil.wait_procs(workers, timeout=60)
    assert not alive, "workers outlived their run"
    assert list(cache.glob(".making-*"))
    assert len(open_data(path)) == 40_000
    assert not list(cache.glob(".making-*"))


def test_a_place_that_cannot_be_written_is_named(open_data: Open, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot write .*set data\.cache_dir elsewhere"):
        open_data(jsonl(tmp_path / "a.jsonl", problems(1)), cache_dir=str(tmp_path / "file" / "cache"))


def test_without_a_home_it_is_kept_with_the_temporary_files(
    open_data: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "home").write_text("")
    (tmp_path / "tmp").mkdir()
    monkeypatch.delenv("HOTSWAP_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    assert len(open_data(jsonl(tmp_path / "a.jsonl", problems(3)))) == 3
    assert list((tmp_path / "tmp").glob(f"hotswap-{os.getuid()}/records/*/MANIFEST"))
    (tmp_path / "tmp" / f"hotswap-{os.getuid()}").chmod(0o777)
    with pytest.raises(DataError, match=r"may be written by others. Remove it, or set data.cache_dir"):
        open_data(jsonl(tmp_path / "b.jsonl", problems(3)))


def test_a_file_ten_times_the_memory_it_needs(tmp_path: Path, pickled: Path) -> None:
    large = "x" * (1 << 20)
    path = jsonl(tmp_path / "a.jsonl", ({**problem, "extra": {"x": large}} for problem in problems(120)))
    script = """
        import json, pickle, sys
        from pathlib import Path
        from trainer.config import JsonlData
        from trainer.data.cache import FileDataset
        from trainer.data.records import take

        def peak():
            lines = Path("/proc/self/status").read_text().splitlines()
            return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

        tokenizer, before = pickle.load(open(sys.argv[2], "rb")), peak()
        data = FileDataset(JsonlData(path=sys.argv[1], workers=1), tokenizer)
        size = sum(len(data[i].extra["x"]) for i in take(len(data), 0, 0, 120))
        print(json.dumps([size, peak() - before]))
    """
    out, errors = start(script, path, pickled).communicate(timeout=240)
    assert out, errors
    size, grown = json.loads(out)
    assert size == 120 << 20
    assert grown < 30 << 20


def children(pid: int | None = None) -> list[psutil.Process]:
    """The processes that tokenise for this one, or another."""
    return [p for p in psutil.Process(pid).children() if "spawn_main" in " ".join(p.cmdline())]


def test_the_first_bad_unit_ends_them_all(open_data: Open, tmp_path: Path) -> None:
    for number in range(6):
        jsonl(tmp_path / f"{number}.jsonl", problems(10) if number != 3 else [*problems(4), "no"])
    with pytest.raises(DataError, match=r"3\.jsonl, line 5: it is not an object"):
        open_data(tmp_path / "*.jsonl", workers=2)
    assert not children()


@pytest.mark.parametrize("heard", [True, False])
def test_one_that_dies_is_named_with_what_it_read(
    open_data: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, heard: bool
) -> None:
    """Also where the others do not hear that they are to end, as one does that is being started."""
    if not heard:
        monkeypatch.setattr(BaseProcess, "terminate", lambda _: None)
    for number in range(3):
        jsonl(tmp_path / f"{number}.jsonl", problems(10))

    def kill_one() -> None:
        wait_until(children, 60)
        children()[0].kill()

    thread = threading.Thread(target=kill_one)
    thread.start()
    with pytest.raises(DataError, match=r"tokenised .*\.jsonl, or a part behind it, died.*data\.workers"):
        open_data(tmp_path / "*.jsonl", workers=2)
    thread.join()
    assert not children()


def test_small_data_is_not_worth_a_process(open_data: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("trainer.data.tokenise.ProcessPoolExecutor")
    for number in range(3):
        jsonl(tmp_path / f"{number}.jsonl", problems(10))
    assert len(open_data(tmp_path / "*.jsonl")) == 30
