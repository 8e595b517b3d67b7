"""The cache of tokenised records: made once, by whoever comes first, and never trusted blindly."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.trainer.data.conftest import Open, prompts
from tests.trainer.data.writing import as_samples, jsonl, parquet, problems, shard
from tests.waiting import wait_until
from trainer.config import JsonlData
from trainer.data import cache as cache_module
from trainer.data.cache import FileDataset
from trainer.data.tokenizer import Tokenizer
from trainer.errors import DataError
from trainer.tiny_model import write_tiny_model

OPEN = """
    import sys, time
    from trainer.config import JsonlData
    from trainer.data.cache import FileDataset
    from trainer.data.tokenizer import Tokenizer
    path, model, workers = sys.argv[1:4]
    data = FileDataset(JsonlData(path=path, workers=int(workers)), Tokenizer(model))
    print(len(data), data.digest)
"""


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
        lambda entry: (entry / "000000.records").unlink(),
        lambda entry: os.truncate(entry / "000000.records", 10),
        lambda entry: os.truncate(entry / "000000.index", 16),
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
    file = cache / made[0] / "000000.records"
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


def test_runs_that_start_together_share_the_work(tmp_path: Path, tiny_model: str, cache: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", problems(10_000))
    first = start(OPEN, path, tiny_model, 1)
    wait_until(lambda: list(cache.glob(".making-*")), 60, process=first)
    first.send_signal(signal.SIGSTOP)  # in the middle of it
    others = [start(OPEN, path, tiny_model, 1) for _ in range(2)]
    for process in others:
        assert process.stderr is not None
        assert any("waiting for it" in line for line in process.stderr)  # reads until then
    first.send_signal(signal.SIGCONT)
    answers = [process.communicate(timeout=120)[0] for process in (first, *others)]
    assert len(set(answers)) == 1
    assert answers[0].startswith("10000 ")
    assert len([entry for entry in cache.iterdir() if entry.is_dir()]) == 1


def test_what_a_killed_run_left_behind_is_cleared(
    tmp_path: Path, tiny_model: str, cache: Path, open_data: Open
) -> None:
    for number in range(4):
        jsonl(tmp_path / f"{number}.jsonl", problems(10_000))
    path = tmp_path / "*.jsonl"
    running = start(OPEN, path, tiny_model, 2)
    wait_until(lambda: list(cache.glob(".making-*/*.records")), 60, process=running)
    workers = psutil.Process(running.pid).children()
    assert len(workers) == 2
    running.send_signal(signal.SIGKILL)
    running.communicate()
    _, alive = psutil.wait_procs(workers, timeout=20)
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


def test_a_file_ten_times_the_memory_it_needs(tmp_path: Path, tiny_model: str) -> None:
    large = "x" * (1 << 20)
    path = jsonl(tmp_path / "a.jsonl", ({**problem, "extra": {"x": large}} for problem in problems(120)))
    script = """
        import json, sys
        from pathlib import Path
        from trainer.config import JsonlData
        from trainer.data.cache import FileDataset
        from trainer.data.records import take
        from trainer.data.tokenizer import Tokenizer
        def peak():
            lines = Path("/proc/self/status").read_text().splitlines()
            return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

        tokenizer, before = Tokenizer(sys.argv[2]), peak()
        data = FileDataset(JsonlData(path=sys.argv[1], workers=1), tokenizer)
        size = sum(len(data[i].extra["x"]) for i in take(len(data), 0, 0, 120))
        print(json.dumps([size, peak() - before]))
    """
    out, errors = start(script, path, tiny_model).communicate(timeout=120)
    assert out, errors
    size, grown = json.loads(out)
    assert size == 120 << 20
    assert grown < 30 << 20


def children() -> list[psutil.Process]:
    return [p for p in psutil.Process().children() if "trainer.data.tokenise" in " ".join(p.cmdline())]


def test_any_number_of_them_gives_the_same_records(open_data: Open, tmp_path: Path) -> None:
    records = problems(400)
    for number in range(4):
        part = records[100 * number : 100 * number + 100]
        shard(tmp_path / f"s{number}.tar", as_samples(part))
        parquet(tmp_path / f"p{number}.parquet", part)
    for kind, pattern in (("webdataset", "s{0..3}.tar"), ("parquet", "p*.parquet")):
        alone = open_data(tmp_path / pattern, kind, workers=1, cache_dir=str(tmp_path / "1"))
        many = open_data(tmp_path / pattern, kind, workers=3, cache_dir=str(tmp_path / "3"), extra_keys=())
        assert [many[i] for i in range(400)] == [alone[i] for i in range(400)]
        assert [r["prompt"] for r in records] == [alone[i].prompt for i in range(400)]
        assert many.digest == alone.digest
    assert not children()


def test_the_first_bad_unit_ends_them_all(open_data: Open, tmp_path: Path) -> None:
    for number in range(6):
        jsonl(tmp_path / f"{number}.jsonl", problems(10) if number != 3 else [*problems(4), "no"])
    with pytest.raises(DataError, match=r"3\.jsonl, line 5: it is not an object"):
        open_data(tmp_path / "*.jsonl", workers=2)
    assert not children()


def test_one_that_dies_is_named_with_what_it_read(
    open_data: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        jsonl(tmp_path / f"{number}.jsonl", problems(10))
    original = cache_module._Process.__call__

    def dying(self: cache_module._Process, task: cache_module.Task) -> cache_module.Done:
        if task.unit.url.endswith("1.jsonl"):
            os.kill(self._process.pid, 9)
        return original(self, task)

    monkeypatch.setattr(cache_module._Process, "__call__", dying)
    with pytest.raises(DataError, match=r"tokenised .*1\.jsonl ended with status -9.*data\.workers"):
        open_data(tmp_path / "*.jsonl", workers=2)
    assert not children()


def test_small_data_is_not_worth_a_process(open_data: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    monkeypatch.setattr(cache_module, "_Process", lambda *_: started.append(1))
    for number in range(3):
        jsonl(tmp_path / f"{number}.jsonl", problems(10))
    assert len(open_data(tmp_path / "*.jsonl")) == 30
    assert not started
