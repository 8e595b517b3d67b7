"""The log on disk and in memory: segments that appear whole, their bounds, keys that are forgotten, killed writers."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.answers.feedback import Feedback
from server.answers.log import OPEN, Folder, Log, Writer, closed_at, forget
from server.answers.parse import FORMAT, Answer, Choice
from server.errors import ConfigError
from server.gateway.access.keys import ANONYMOUS, Principal
from server.gateway.config import AnswerSettings
from server.gateway.observe.stats import ProcessStats
from tests.server.answers.test_parse import about

ADA = Principal("ada", frozenset(), b"a", id="k1", collect=True)


def answer(number: int, key: str = "ada", ended: float | None = None, **more: Any) -> Answer:
    known = about("/generate", key=key, key_id=f"id-of-{key}", ended=time.time() if ended is None else ended, **more)
    return Answer(FORMAT, f"a{number}", known, choices=[Choice(0, "x", finish_reason="stop")])


def line(number: int, key: str = "ada", ended: float | None = None) -> bytes:
    return msgspec.json.encode(answer(number, key, ended))


def ids(folder: Folder) -> list[str]:
    """Those in segments, in the order of the log."""
    return [orjson.loads(line)["id"] for path, _ in folder.segments() for line in folder.read(path).splitlines()]


STEP = st.tuples(st.sampled_from(["ada", "bob", "eve"]), st.sampled_from(["", "tick", "forget", "other"]))
_MEMORIES = iter(range(10**6))


@pytest.fixture(params=["file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "log") if request.param == "file" else f"memory://log-{os.getpid()}-{next(_MEMORIES)}"


def bounded(**fields: Any) -> AnswerSettings:
    return AnswerSettings(**{"segment_s": 3600.0, **fields})


def writing(url: str, **fields: Any) -> tuple[Folder, Writer]:
    folder = Folder(url)
    return folder, Writer(folder, bounded(**fields))


def test_a_segment_appears_whole_when_it_is_full(url: str) -> None:
    lines = [line(number, ended=1.5) for number in range(3)]  # of one length
    folder, writer = writing(url, segment_bytes=2 * len(lines[0]))
    for number in range(3):
        assert ids(folder) == ([] if number < 2 else ["a0", "a1"])
        writer.append(lines[number])
        writer.tick()
    assert ids(folder) == ["a0", "a1"]
    writer.close()
    assert ids(folder) == ["a0", "a1", "a2"]


def test_a_segment_appears_when_it_is_old_enough(url: str) -> None:
    folder, writer = writing(url, segment_s=1e-9)
    writer.append(line(0))
    writer.tick()
    writer.tick()
    assert ids(folder) == ["a0"]
    writer.tick()
    assert len(folder.segments()) == 1, "there is no empty segment"


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=8), most=st.integers(1, 30), seed=st.integers(0, 10**9),
    age=st.integers(1, 9),
)  # fmt: skip
def test_retention_keeps_the_newest_that_fit(sizes: list[int], most: int, seed: int, age: int) -> None:
    """Files that stay are a suffix: young enough and small enough, and one more would not be."""
    folder, now = Folder(f"memory://retention-{seed}-{next(_MEMORIES)}"), time.time()
    for back, size in enumerate(reversed(sizes)):
        folder.write(folder.name(now - 3600.0 * (back + 0.5), "w", "1", ".jsonl"), b"x" * size)
    before = folder.segments()
    Writer(folder, bounded(max_age_s=3600.0 * age, max_bytes=most)).maintain()
    left = folder.segments()
    assert left == before[len(before) - len(left) :]
    assert len(left) <= age
    assert sum(size for _, size in left) <= most
    if len(left) < min(len(before), age):
        assert sum(size for _, size in before[-len(left) - 1 :]) > most


@settings(max_examples=40, deadline=None)
@given(steps=st.lists(STEP, max_size=12), per_segment=st.integers(1, 4))
def test_a_key_that_is_forgotten_is_gone_wherever_its_lines_are(steps: list[tuple[str, str]], per_segment: int) -> None:
    """Records up to the deletion are in no segment, then or later; those after a writer's next look, and other keys',
    are all there."""
    url = f"memory://forget-{next(_MEMORIES)}"
    folder = Folder(url)
    writers = [Writer(folder, bounded(segment_bytes=per_segment * len(line(0)))) for _ in range(2)]
    wanted: dict[str, str] = {}
    for number, (key, then) in enumerate(steps):
        writers[number % 2].append(line(number, key))
        wanted[f"a{number}"] = key
        if then == "tick":
            writers[number % 2].tick()
        elif then in ("forget", "other"):
            forget(url, key if then == "forget" else f"id-of-{key}")
            wanted = {name: owner for name, owner in wanted.items() if owner != key}
            assert not {f"a{n}" for n, (k, _) in enumerate(steps[: number + 1]) if k == key} & set(ids(folder))
            for writer in writers:
                writer.maintain()
    for writer in writers:
        writer.close()
    assert sorted(ids(folder)) == sorted(wanted)


def test_forgetting_counts_and_leaves_other_segments_as_they_are(url: str) -> None:
    folder, writer = writing(url, segment_bytes=1)
    for number, key in enumerate(["ada", "bob", "ada"]):
        writer.append(line(number, key))
        writer.tick()
    untouched = folder.segments()[1]
    assert forget(url, "ada") == 2
    assert forget(url, "ada") == 0
    assert folder.segments() == [untouched]


def test_what_is_in_a_segment_is_forgotten_whatever_the_clock_of_its_writer_says(url: str) -> None:
    folder, writer = writing(url, segment_bytes=1)
    writer.append(line(0, ended=time.time() + 300.0))
    writer.tick()
    assert forget(url, "ada") == 1
    assert ids(folder) == []


@pytest.mark.parametrize("ahead", [-300.0, 300.0])
def test_the_writers_clock_alone_says_which_open_lines_are_forgotten(
    url: str, ahead: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock of the host that deletes is another, `ahead` seconds behind it or before it."""
    folder, writer = writing(url)
    right = time.time
    monkeypatch.setattr(time, "time", lambda: right() + ahead)
    writer.append(line(0))
    with monkeypatch.context() as deleter:
        deleter.setattr(time, "time", right)
        assert forget(url, "ada") == 0
    ended_before = line(1)
    writer.maintain()
    writer.append(ended_before)  # it waited to be parsed
    writer.append(line(2))
    writer.close()
    assert ids(folder) == ["a2"]


def test_marks_older_than_a_writer_are_not_about_its_lines(url: str) -> None:
    early = line(0)
    forget(url, "ada")
    folder, writer = writing(url)
    writer.append(early)
    writer.append(line(1))
    writer.close()
    assert ids(folder) == ["a0", "a1"]


def test_what_a_killed_writer_left_is_forgotten_by_every_mark(tmp_path: Path) -> None:
    """Only the writer knew which marks were there before its lines."""
    folder = Folder(str(tmp_path))
    lines = line(0, "ada", ended=2e10) + b"\n" + line(1, "bob") + b"\n"
    (tmp_path / f"20261125T065300001-dead-000001{OPEN}").write_bytes(lines)
    forget(str(tmp_path), "ada")
    Writer(folder, bounded()).maintain()
    assert ids(folder) == ["a1"]


def test_what_is_said_later_is_forgotten_too(url: str) -> None:
    folder = Folder(url)
    said = Feedback(FORMAT, "a1", "r", "ada", "k1", time.time(), "key", rating="up", score=1.0)
    writer = Writer(folder, bounded(segment_bytes=1))
    writer.append(msgspec.json.encode(said))
    writer.tick()
    assert forget(url, "k1") == 1


def test_a_forgotten_key_is_gone_from_a_segment_that_was_closed_meanwhile(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mark comes between the writer's look for marks and its segment."""
    folder, first = Folder(url), True
    writer = Writer(folder, bounded(segment_bytes=1))
    write: Callable[[Any, str, bytes], None] = Folder.write
    renamed: Callable[..., Any] = Path.rename

    def between() -> None:
        nonlocal first
        if first:
            first = False
            assert forget(url, "ada") == 0

    def late_write(self: Folder, path: str, content: bytes) -> None:
        if path.endswith(".jsonl"):
            between()
        write(self, path, content)

    def late_rename(self: Path, target: Any) -> Any:
        if str(target).endswith(".jsonl"):
            between()
        return renamed(self, target)

    monkeypatch.setattr(Folder, "write", late_write)
    monkeypatch.setattr(Path, "rename", late_rename)
    writer.append(line(0))
    writer.tick()
    assert not first
    assert ids(folder) == []


def test_marks_go_with_what_they_are_about(url: str) -> None:
    forget(url, "ada")
    folder = Folder(url)
    Writer(folder, bounded(max_age_s=3600.0)).maintain()
    assert len(folder.forgotten()) == 1
    Writer(folder, bounded(max_age_s=1e-9)).maintain()
    assert folder.forgotten() == []


KILLED = """
import sys, time
from server.answers.log import Folder, Writer
from server.gateway.config import AnswerSettings
from tests.server.answers.test_log import line
writer = Writer(Folder(sys.argv[1]), AnswerSettings(segment_s=3600.0))
for number in range(10**9):
    writer.append(line(number))
    writer.tick()
    print(number, flush=True)
"""


def test_a_killed_writer_loses_nothing_that_was_written(tmp_path: Path) -> None:
    url = str(tmp_path / "log")
    with subprocess.Popen([sys.executable, "-c", KILLED, url], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        last = 0
        for told in process.stdout:
            last = int(told)
            if last >= 20:
                break
        process.send_signal(signal.SIGKILL)
        process.wait()
    (opened,) = Path(url).glob(f"*{OPEN}")
    with opened.open("ab") as file:
        file.write(b'{"record":"answer","id":"half')
    folder = Folder(url)
    assert ids(folder) == [], "no reader sees what is open"
    Writer(folder, bounded()).maintain()
    found = ids(folder)
    assert found == [f"a{number}" for number in range(len(found))]
    assert len(found) > last
    assert not list(Path(url).glob(f"*{OPEN}"))


def test_what_a_living_writer_has_open_stays_its_own(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    mine, other = Writer(folder, bounded()), Writer(folder, bounded())
    mine.append(line(0))
    mine.tick()
    other.maintain()
    assert ids(folder) == []
    mine.append(line(1))
    mine.close()
    assert ids(folder) == ["a0", "a1"]


def test_a_store_that_is_away_loses_nothing_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Folder(f"memory://away-{next(_MEMORIES)}")
    writer = Writer(folder, bounded(segment_bytes=len(line(0))))
    write = Folder.write

    def refuse(*_: Any) -> None:
        raise OSError("it is away")

    monkeypatch.setattr(Folder, "write", refuse)
    for number in range(8):
        writer.append(line(number))
        writer.tick()
    assert ids(folder) == []
    kept = 8 - writer.lost
    assert 0 < writer.lost < 8
    monkeypatch.setattr(Folder, "write", write)
    writer.tick()
    assert ids(folder) == [f"a{number}" for number in range(kept)]


def test_a_full_disk_loses_no_line_that_finds_room_later(tmp_path: Path) -> None:
    """A limit on the size of files stands for it: like a full disk, it takes a part of a write and refuses the rest."""
    folder, writer = writing(str(tmp_path), segment_bytes=1 << 20)
    first = line(0)
    writer.append(first)
    writer.tick()
    for number in range(1, 6):
        writer.append(line(number))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(first) * 3, before[1]))
    try:
        writer.tick()
        (opened,) = tmp_path.glob(f"*{OPEN}")
        assert opened.read_bytes() == first + b"\n", "no half of a line"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    writer.append(line(6))
    writer.close()
    assert ids(folder) == [f"a{number}" for number in range(7)]
    assert writer.lost == 0


def test_names_of_segments_sort_by_the_moment_they_were_closed(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    moments = [1_700_000_000.001, 1_700_000_000.5, 1_700_000_001.0, 1_800_000_000.25]
    names = [folder.name(moment, "w", "000001", ".jsonl") for moment in moments]
    assert names == sorted(names)
    assert [closed_at(name) for name in names] == pytest.approx(moments, abs=0.0011)
    assert closed_at(str(tmp_path / "else.jsonl")) == 0.0


def test_files_are_the_owners_alone(tmp_path: Path) -> None:
    url = str(tmp_path / "log")
    writer = Writer(Folder(url), bounded())
    writer.append(line(0))
    writer.tick()
    assert Path(url).stat().st_mode & 0o077 == 0
    (opened,) = Path(url).iterdir()
    assert opened.stat().st_mode & 0o077 == 0
    writer.close()
    forget(url, "nobody")
    assert all(path.stat().st_mode & 0o077 == 0 for path in Path(url).iterdir())


def test_a_place_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for url in ("nowhere://x", str(tmp_path / "file" / "log")):
        with pytest.raises(ConfigError, match="--answers"):
            Folder(url)


# the consumer


def shout(record: dict[str, Any]) -> dict[str, Any] | None:
    """A redaction for the tests."""
    if record["record"] == "feedback":
        return None
    for choice in record["choices"]:
        choice["text"] = choice["text"].upper()
    return record


def fail(record: dict[str, Any]) -> dict[str, Any]:
    raise RuntimeError("no")


def spoil(record: dict[str, Any]) -> dict[str, Any]:
    return {"id": record["id"]}


def logged(tmp_path: Path, redact: str | None) -> tuple[list[dict[str, Any]], ProcessStats]:
    stats = ProcessStats()
    log = Log(str(tmp_path / "log"), bounded(redact=redact and f"{__name__}:{redact}"), stats)
    log.take(answer(1))
    log.take(answer(2, status=503))
    log.rate(Feedback(FORMAT, "a1", "r", "ada", "k1", 1.0, "key", rating="up", score=1.0))
    log.tick()
    log.close()
    folder = Folder(str(tmp_path / "log"))
    return [orjson.loads(line) for path, _ in folder.segments() for line in folder.read(path).splitlines()], stats


def test_what_is_kept_and_what_is_not(tmp_path: Path) -> None:
    found, stats = logged(tmp_path, None)
    assert [record["record"] for record in found] == ["answer", "feedback"]
    assert stats.answers_written == {"answer": 1, "feedback": 1}
    assert not stats.answers_dropped["log", "redaction"]


@pytest.mark.parametrize(("redact", "texts", "dropped"), [("shout", ["X"], 1), ("fail", [], 2), ("spoil", [], 2)])
def test_redaction_comes_before_anything_is_written(
    tmp_path: Path, redact: str, texts: list[str], dropped: int
) -> None:
    found, stats = logged(tmp_path, redact)
    assert [record["choices"][0]["text"] for record in found] == texts
    assert stats.answers_dropped["log", "redaction"] == dropped


@pytest.mark.parametrize("name", ["nothing", "no.such:thing", f"{__name__}:ADA", f"{__name__}:nothing"])
def test_a_redaction_that_cannot_be_loaded(name: str) -> None:
    with pytest.raises(ConfigError, match="--answers-redact"):
        Log("memory://x", AnswerSettings(redact=name), ProcessStats())


def test_whose_answers_are_kept() -> None:
    silent = Principal("bob", frozenset(), b"b", id="k2")
    for anonymous in (False, True):
        log = Log("memory://x", AnswerSettings(anonymous=anonymous), ProcessStats())
        assert [log.wants(one) for one in (ADA, silent, ANONYMOUS)] == [True, False, anonymous]
        assert log.all_keys is anonymous
