"""The log of answers: JSON lines in segments under a directory that fsspec reaches, a writer for each process.

    20261125T065335123-3f2a9c01-000001.jsonl   a segment, named by the moment it was closed, its writer, its number
    20261125T065300001-3f2a9c01-000002.open    what a writer on this host has so far; no reader looks at it
    20261125T070000000-9b1d.forget             what was kept of this key before this file is gone (`forget`)

A segment appears whole: on a file system of this host by renaming the `.open` file, in an object store by one write. On
this host a line is in its file within a tenth of a second, so a process that is killed loses no more than that, and the
next writer closes what it has left. Elsewhere lines wait in memory until their segment is closed.

Clocks of two hosts are never compared to delete a key's lines. The lines in segments were there before the deletion,
and go. Of the lines that it still holds, each writer drops those that ended before it saw the mark, by its own clock,
which timed them; it looks for marks every `MAINTAIN_S` and at each segment's end.

Retention drops whole segments: those that were closed too long ago, then the oldest until the rest is small enough.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import logging
import math
import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import fsspec
import msgspec
import orjson

from server.answers.feedback import Feedback
from server.answers.parse import Answer
from server.errors import ConfigError
from server.gateway.access.keys import ANONYMOUS, Principal
from server.gateway.config import AnswerSettings
from server.gateway.observe.stats import ProcessStats

log = logging.getLogger("hotswap.gateway")

SEGMENT, OPEN, FORGET, HALF = ".jsonl", ".open", ".forget", ".half"
HALF_S: Final = 3600.0  # nobody writes one file for so long
MAINTAIN_S: Final = 30.0
CAUSES: Final = ("redaction", "store")
_TIME: Final = "%Y%m%dT%H%M%S"
Redact = Callable[[dict[str, Any]], dict[str, Any] | None]


def find_redaction(name: str) -> Redact:
    """The function that `MODULE:NAME` names. Raises ConfigError."""
    module, colon, attribute = name.partition(":")
    try:
        if not (module and colon and attribute):
            raise ValueError("it is not of that form")
        found = getattr(importlib.import_module(module), attribute)
        if not callable(found):
            raise TypeError("it is no function")
    except Exception as error:
        raise ConfigError(f"--answers-redact {name}: {error}; give MODULE:NAME of a function of a record.") from error
    function: Redact = found
    return function


class Folder:
    """The directory of a log. Raises ConfigError, at the start, for a place that cannot be reached."""

    def __init__(self, url: str) -> None:
        self.url = url
        try:
            self.fs, self.path = fsspec.core.url_to_fs(url)
            self.local = "file" in (self.fs.protocol if isinstance(self.fs.protocol, tuple) else (self.fs.protocol,))
            if self.local:
                Path(self.path).mkdir(parents=True, exist_ok=True, mode=0o700)
        except (ImportError, ValueError, OSError) as error:
            raise ConfigError(f"--answers {url}: {error}.") from error

    def segments(self) -> list[tuple[str, int]]:
        """Paths of the segments and their bytes, in the order in which they were closed. Raises OSError."""
        return self._of_kind(SEGMENT)

    def forgotten(self) -> list[tuple[str, int]]:
        """Paths of the marks of keys that were forgotten."""
        return self._of_kind(FORGET)

    def _of_kind(self, suffix: str) -> list[tuple[str, int]]:
        try:
            self.fs.invalidate_cache(self.path)
            found = self.fs.ls(self.path, detail=True)
        except FileNotFoundError:
            return []
        return sorted((one["name"], int(one.get("size") or 0)) for one in found if one["name"].endswith(suffix))

    def read(self, path: str) -> bytes:
        """Empty for a segment that is gone by now."""
        try:
            content: bytes = self.fs.cat_file(path)
        except FileNotFoundError:
            return b""
        return content

    def write(self, path: str, content: bytes) -> None:
        """The file is there as a whole or not at all."""
        if not self.local:
            self.fs.pipe_file(path, content)
            return
        half = Path(f"{path}.{secrets.token_hex(4)}{HALF}")
        half.write_bytes(content)
        half.chmod(0o600)
        half.replace(path)

    def remove(self, path: str) -> None:
        """Removes it, unless another process has."""
        with contextlib.suppress(FileNotFoundError):
            self.fs.rm_file(path)

    def name(self, moment: float, *parts: str) -> str:
        """The path of a file that was made at `moment`, unix seconds."""
        stamp = datetime.fromtimestamp(moment, UTC).strftime(_TIME) + f"{int(moment * 1000) % 1000:03d}"
        return f"{self.path.rstrip('/')}/{'-'.join((stamp, *parts[:-1]))}{parts[-1]}"


def closed_at(path: str) -> float:
    """The moment in a file's name; 0 where it has none."""
    stamp = path.rpartition("/")[2].partition("-")[0]
    try:
        return datetime.strptime(stamp[:-3], _TIME).replace(tzinfo=UTC).timestamp() + int(stamp[-3:]) / 1000
    except ValueError:
        return 0.0


class Mark(msgspec.Struct):
    """Records of the key with this name or id, up to this moment (unix seconds), are gone.

    In a file the moment is the deleter's; a writer puts the one at which it saw the file in its place.
    """

    key: str
    before: float

    def covers(self, line: bytes) -> bool:
        """Whether this record is gone."""
        record = msgspec.json.decode(line, type=_Owned)
        owner = record.about or record
        moment = record.about.ended if record.about is not None else record.time
        return self.key in (owner.key, owner.key_id) and moment <= self.before


class _Owner(msgspec.Struct):
    key: str = ""
    key_id: str = ""
    ended: float = 0.0


class _Owned(_Owner):
    """As far as it says whose a record is: an answer's `about` has it, feedback itself."""

    about: _Owner | None = None
    time: float = 0.0


def forget(url: str, key: str) -> int:
    """Deletes what was kept of the key with this name or id: the number of records that were in segments.

    Lines that writers have not closed yet go before they do, since they look for the mark that this leaves.
    """
    folder = Folder(url)
    now = time.time()
    folder.write(folder.name(now, secrets.token_hex(4), FORGET), msgspec.json.encode(Mark(key, now)))
    return sum(_rewrite(folder, path, [Mark(key, math.inf)]) for path, _ in folder.segments())


def _mark(folder: Folder, path: str, before: float) -> Mark | None:
    """That of this file; None for a file that is gone by now."""
    raw = folder.read(path)
    return Mark(msgspec.json.decode(raw, type=Mark).key, before) if raw else None


def _kept(lines: list[bytes], marks: list[Mark]) -> list[bytes]:
    return [line for line in lines if not any(mark.covers(line) for mark in marks)]


def _rewrite(folder: Folder, path: str, marks: list[Mark]) -> int:
    lines = folder.read(path).splitlines()
    kept = _kept(lines, marks)
    if len(kept) == len(lines):
        return 0
    if kept:
        folder.write(path, b"\n".join(kept) + b"\n")
    else:
        folder.remove(path)
    return len(lines) - len(kept)


class _InMemory:
    """The lines of a segment that is not closed yet, for an object store."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._lines: list[bytes] = []
        self.size = 0

    def append(self, lines: list[bytes]) -> None:
        """All of them, or none: raises OSError."""
        self._lines += lines
        self.size += sum(map(len, lines)) + len(lines)

    def close(self, path: str, marks: list[Mark]) -> None:
        """The segment appears at `path`, without what `marks` cover."""
        kept = _kept(self._lines, marks)
        if kept:
            self._folder.write(path, b"\n".join(kept) + b"\n")


class _InFile:
    """The same in a file of this host, which is locked while its writer lives."""

    def __init__(self, folder: Folder, name: str) -> None:
        self._folder, self._path = folder, Path(name)
        hidden = self._path.with_suffix(HALF)
        self._fd = os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_EX)  # before anybody can see that it is there
        hidden.rename(self._path)
        self.size = 0

    def append(self, lines: list[bytes]) -> None:
        content = memoryview(b"\n".join(lines) + b"\n")
        try:
            while content:
                content = content[os.write(self._fd, content) :]
        except OSError:  # a full disk takes a part
            os.ftruncate(self._fd, self.size)
            raise
        self.size += sum(map(len, lines)) + len(lines)

    def close(self, path: str, marks: list[Mark]) -> None:
        _publish(self._folder, self._path, path, marks)
        os.close(self._fd)


def _publish(folder: Folder, opened: Path, path: str, marks: list[Mark]) -> None:
    """A file of whole lines, but perhaps for the last, becomes a segment."""
    content = opened.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    lines = whole.splitlines()
    kept = _kept(lines, marks)
    if kept and len(kept) == len(lines) and len(whole) == len(content):
        opened.rename(path)
        return
    if kept:
        folder.write(path, b"\n".join(kept) + b"\n")
    opened.unlink()


class Writer:
    """Writes the segments of one process, and keeps the log within its bounds. Every call is made on one thread."""

    def __init__(self, folder: Folder, bounds: AnswerSettings) -> None:
        self._folder, self._bounds = folder, bounds
        self.name = secrets.token_hex(4)
        self.lost = 0  # lines that found no room while the store did not answer
        self._number = 0
        self._lines: list[bytes] = []  # not in the segment yet
        self._size = 0  # bytes of them
        self._segment: _InMemory | _InFile | None = None
        self._opened_at = 0.0  # monotonic
        self._closing: deque[_InMemory | _InFile] = deque()  # which could not be closed yet
        self._maintained_at = 0.0
        self._failing = False
        self._marks: dict[str, Mark | None] = {}  # by the path; None: older than this writer's first line
        with self._noted():
            self._marks = {path: None for path, _ in folder.forgotten()}

    def append(self, line: bytes) -> None:
        """A record, without its newline."""
        held = sum(segment.size for segment in self._closing)
        if held + self._size > 4 * self._bounds.segment_bytes:
            self.lost += 1
            return
        self._lines.append(line)
        self._size += len(line)
        if self._size > min(2**20, self._bounds.segment_bytes):
            self.tick()

    def tick(self) -> None:
        """Writes what is there, closes what is full or old enough, and looks after the others now and then."""
        now = time.monotonic()
        with self._noted():
            if now - self._maintained_at > MAINTAIN_S or not self._maintained_at:
                self._maintained_at = now
                self.maintain()  # first: what it drops may be what lets the rest be written
            self._write(now)
            segment = self._segment
            if segment is not None and self._is_over(segment, now):
                self._segment = None
                self._closing.append(segment)
            self._close_all()

    def close(self) -> None:
        """Closes what is open."""
        with self._noted():
            self._write(time.monotonic())
            if self._segment is not None:
                self._closing.append(self._segment)
                self._segment = None
            self._close_all()

    def maintain(self) -> None:
        """Adopts what dead writers left, and drops what is over the bounds. Raises OSError."""
        if self._folder.local:
            self._adopt()
        self._look()
        now, bounds = time.time(), self._bounds
        for path, _ in self._folder.forgotten():
            if closed_at(path) < now - bounds.max_age_s:
                self._folder.remove(path)
        segments = self._folder.segments()
        total = sum(size for _, size in segments)
        for path, size in segments:
            if closed_at(path) >= now - bounds.max_age_s and total <= bounds.max_bytes:
                break
            self._folder.remove(path)
            total -= size

    def _is_over(self, segment: _InMemory | _InFile, now: float) -> bool:
        return segment.size >= self._bounds.segment_bytes or now - self._opened_at >= self._bounds.segment_s

    def _write(self, now: float) -> None:
        if not self._lines:
            return
        if self._segment is None:
            self._number += 1
            opened = self._folder.name(time.time(), self.name, f"{self._number:06d}", OPEN)
            self._segment = _InFile(self._folder, opened) if self._folder.local else _InMemory(self._folder)
            self._opened_at = now
        self._segment.append(self._lines)
        self._lines, self._size = [], 0

    def _close_all(self) -> None:
        while self._closing:
            self._number += 1
            path = self._folder.name(time.time(), self.name, f"{self._number:06d}", SEGMENT)
            marks = self._look()
            self._closing[0].close(path, marks)
            self._closing.popleft()
            later = self._look()  # of a key that was forgotten meanwhile
            if len(later) > len(marks):
                _rewrite(self._folder, path, later)

    def _look(self) -> list[Mark]:
        """The marks that came since this writer began, each with the moment at which it saw them. Raises OSError."""
        for path in [path for path, _ in self._folder.forgotten() if path not in self._marks]:
            self._marks[path] = _mark(self._folder, path, time.time())
        return [mark for mark in self._marks.values() if mark is not None]

    def _adopt(self) -> None:
        for half in Path(self._folder.path).glob(f"*{HALF}"):
            with contextlib.suppress(FileNotFoundError):
                if half.stat().st_mtime < time.time() - HALF_S:
                    half.unlink()
        for opened in Path(self._folder.path).glob(f"*{OPEN}"):
            with contextlib.suppress(FileNotFoundError), opened.open("rb") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue  # its writer lives
                path = self._folder.name(opened.stat().st_mtime, self.name, opened.stem.rpartition("-")[2], SEGMENT)
                # Its writer cannot say any more which marks it had seen: each of them counts.
                marks = [_mark(self._folder, mark, math.inf) for mark, _ in self._folder.forgotten()]
                _publish(self._folder, opened, path, [mark for mark in marks if mark is not None])
                log.info("%s was left by a writer that is gone, and is a segment now", opened.name)

    @contextlib.contextmanager
    def _noted(self) -> Iterator[None]:
        """A store that does not answer is said once, and asked again at the next tick."""
        try:
            yield
        except Exception as error:  # fsspec's clients raise errors of their own
            if not self._failing:
                log.warning("the log of answers cannot be written to %s: %s", self._folder.url, error)
            self._failing = True
        else:
            self._failing = False


class Log:
    """Writes what keys that have opted in were answered, and what they say of it (desk.Consumer)."""

    name = "log"
    share = 1.0
    most = 4096
    all_keys = False

    def __init__(self, url: str, settings: AnswerSettings, stats: ProcessStats) -> None:
        """Nothing is opened before there is a record. Raises ConfigError: the redaction cannot be loaded."""
        self._url, self._settings = url, settings
        self._redact = find_redaction(settings.redact) if settings.redact is not None else None
        self._writer: Writer | None = None
        self.all_keys = settings.anonymous
        self._written, self._dropped = stats.answers_written, stats.answers_dropped
        for cause in CAUSES:
            self._dropped[self.name, cause] += 0

    def wants(self, principal: Principal) -> bool:
        return principal.collect or (self.all_keys and principal.digest == ANONYMOUS.digest)

    def take(self, answer: Answer) -> None:
        if answer.choices and answer.about.status in (200, 499):
            self._keep("answer", answer)

    def rate(self, feedback: Feedback) -> None:
        self._keep("feedback", feedback)

    def tick(self) -> None:
        if self._writer is not None:
            self._writer.tick()
            self._dropped[self.name, "store"] = self._writer.lost

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _keep(self, kind: str, record: Answer | Feedback) -> None:
        line = msgspec.json.encode(record)
        if self._redact is not None:
            try:
                redacted = self._redact(orjson.loads(line))
                line = b"" if redacted is None else msgspec.json.encode(msgspec.convert(redacted, Answer | Feedback))
            except Exception:
                log.exception("--answers-redact failed, and the record is dropped")
                line = b""
            if not line:
                self._dropped[self.name, "redaction"] += 1
                return
        if self._writer is None:
            self._writer = Writer(Folder(self._url), self._settings)
        self._writer.append(line)
        self._written[kind] += 1
