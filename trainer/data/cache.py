"""Data sets in files: tokenised into a cache on disk, once for each combination of files, keys and tokenizer.

    CACHE/DIGEST/             an entry: the segments and
    CACHE/DIGEST/MANIFEST     JSON (Manifest), written last
    CACHE/DIGEST.lock         held by the one process that makes the entry; others wait, then find it
    CACHE/.making-DIGEST      being made; left behind by a killed run, removed by the next that makes it

The name digests everything that the records depend on: the format, the files with their sizes and time stamps, the
keys, the tokenizer, and what the run needs of a record. An entry whose files are not as the manifest says is made anew.
Entries may be deleted at any time; a run that has one open keeps it.

Processes of their own tokenise, each fed one unit at a time (trainer/data/tokenise.py).
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import fcntl
import itertools
import logging
import os
import queue
import resource
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, overload

import msgspec
import xxhash

from trainer.config import FileData
from trainer.data.formats import Bad, Unit
from trainer.data.parse import ANY, Needs
from trainer.data.records import Record
from trainer.data.storage import File, explained, find_files
from trainer.data.tokenise import NAMED, Done, Failed, Segment, Setup, Task, Worker, digests, format_of, writing
from trainer.data.tokenizer import Tokenizer
from trainer.errors import DataError

log = logging.getLogger(__name__)
FORMAT = 5  # raised when an entry holds something else of the same records
MANIFEST = "MANIFEST"
# What does not change the records.
_INDIFFERENT = ("path", "eval_path", "max_bad", "cache_dir", "workers")
SMALL_BYTES = 1 << 22  # not worth the start of a process


class CachedRecords(Sequence[Record]):
    """The usable records of some files, in order. Holds open files, no records."""

    def __init__(self, path: str, config: FileData, tokenizer: Tokenizer, needs: Needs) -> None:
        began = time.monotonic()
        directory, self.manifest = prepare(find_files(config.pattern(path)), config, tokenizer, needs)
        self.seconds = time.monotonic() - began
        counts = [count for count, _ in self.manifest.segments]
        with _files(2 * len(counts), path):
            self._segments = [Segment(directory, segment_name(i), count) for i, count in enumerate(counts)]
        self._ends = list(itertools.accumulate(counts))
        for problem in self.manifest.bad:
            log.warning("Left out: %s", problem)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> list[Record]: ...
    def __getitem__(self, index: int | slice) -> Record | list[Record]:
        """Raises DataError for a record whose bytes in the cache have changed."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index %= len(self)
        number = bisect.bisect_right(self._ends, index)
        before = self._ends[number - 1] if number else 0
        return self._segments[number].read(index - before).record(index)


@contextlib.contextmanager
def _files(needed: int, path: str) -> Iterator[None]:
    """Lets this process have `needed` more files open than it has by default. Raises DataError where it may not."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if needed > soft // 2:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        yield
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        most = f"more than this process may have ({hard}). Raise its limit (ulimit -n)."
        raise DataError(f"{path} takes {needed} open files, {most}") from error


class FileDataset:
    """The records of `config.path`, which meet the `needs`, and those of `config.eval_path` held out. Raises DataError
    for files that cannot be read, for too many bad records, and when there are none."""

    def __init__(self, config: FileData, tokenizer: Tokenizer, needs: Needs = ANY) -> None:
        self._records = CachedRecords(config.path, config, tokenizer, needs)
        held_out = CachedRecords(config.eval_path, config, tokenizer, ANY) if config.eval_path else None
        self.held_out: Sequence[Record] = [] if held_out is None else held_out
        self._evaluated = held_out
        if not self._records:
            long = self._records.manifest.too_long
            if long:
                problem = f"each of the {long} usable records of {config.path} is longer than data.max_length"
                raise DataError(f"{problem} ({config.max_length} tokens). Raise it.")
            raise DataError(f"{config.path} has no {config.records}. Add at least one.")

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> Record:
        return self._records[index]

    @property
    def digest(self) -> str:
        """A digest of all training records, in order."""
        return self._records.manifest.digest

    def summary(self) -> dict[str, Any]:
        """What was read and what was left out, for the metrics: counts, and the first bad records by name."""
        parts = [part.manifest for part in (self._records, self._evaluated) if part is not None]
        return {
            "tokens": self._records.manifest.tokens,
            "bad_records": sum(part.bad_records for part in parts),
            "too_long": sum(part.too_long for part in parts),
            "bad": [name for part in parts for name in part.bad],
            "seconds": round(self._records.seconds + (self._evaluated.seconds if self._evaluated else 0.0), 3),
        }


class Manifest(msgspec.Struct, frozen=True):
    """The content of an entry: (records, bytes) of each segment; the digest of all records, however they were cut;
    which were left out, the first of them by name."""

    segments: list[tuple[int, int]]
    digest: str
    tokens: int
    bad_records: int
    too_long: int
    bad: list[str]


def prepare(files: list[File], config: FileData, tokenizer: Tokenizer, needs: Needs) -> tuple[Path, Manifest]:
    """The entry of these files, made now if there is none. Raises DataError when more than `max_bad` records cannot be
    used, naming the first."""
    root = _root(config)
    entry = root / _key(files, config, tokenizer, needs)
    manifest = _whole(entry)
    if manifest is None:
        with _alone(root / f"{entry.name}.lock"):
            manifest = _whole(entry)  # another run may have made it meanwhile
            if manifest is None:
                manifest = _make(entry, files, config, tokenizer, needs)
    if manifest.bad_records > config.max_bad:
        _refuse(manifest.bad, config.max_bad)
    return entry, manifest


def _make(entry: Path, files: list[File], config: FileData, tokenizer: Tokenizer, needs: Needs) -> Manifest:
    staged = entry.parent / f".making-{entry.name}"
    for leftover in (staged, entry):
        shutil.rmtree(leftover, ignore_errors=True)
    with writing(staged):
        staged.mkdir()
        try:
            manifest = _fill(staged, files, config, tokenizer, needs)
            (staged / MANIFEST).write_bytes(msgspec.json.encode(manifest))
            staged.rename(entry)
        finally:
            shutil.rmtree(staged, ignore_errors=True)
    return manifest


def _fill(directory: Path, files: list[File], config: FileData, tokenizer: Tokenizer, needs: Needs) -> Manifest:
    units, reader = [], format_of(config.kind)
    for file in files:
        with explained(file.url):
            units += reader.units(file, config)
    size = sum(max(file.size, 0) for file in files)
    digest, segments, bad = xxhash.xxh3_128(), [], list[str]()
    tokens = bad_records = too_long = lines = 0
    results = tokenise(units, size, config, tokenizer, needs, directory)
    with contextlib.closing(results):  # type: ignore[type-var]
        for number, (unit, done) in enumerate(zip(units, results, strict=True)):
            lines = lines if number and units[number - 1].url == unit.url else 0
            bad += [_named(unit.url, found, lines) for found in done.bad[: NAMED - len(bad)]]
            bad_records, too_long = bad_records + done.bad_records, too_long + done.too_long
            if bad_records > config.max_bad:
                _refuse(bad, config.max_bad)
            digest.update(digests(directory, segment_name(number)))
            segments.append((done.records, done.size))
            tokens, lines = tokens + done.tokens, lines + done.places
            log.info("tokenised %d of %d parts, %d tokens", number + 1, len(units), tokens)
    return Manifest(segments, digest.hexdigest(), tokens, bad_records, too_long, bad)


def _named(url: str, bad: Bad, lines: int) -> str:
    place = f"line {lines + bad.place}" if isinstance(bad.place, int) else bad.place
    return f"{url}, {place}: {bad.reason}"


def _refuse(bad: list[str], allowed: int) -> None:
    shown = "; ".join(bad[:3])
    if allowed:
        raise DataError(
            f"more than data.max_bad = {allowed} records cannot be used: {shown}. Correct them, or raise it."
        )
    raise DataError(f"{shown}. Correct the record, or set data.max_bad to leave such out.")


def _key(files: list[File], config: FileData, tokenizer: Tokenizer, needs: Needs) -> str:
    values = {k: v for k, v in msgspec.to_builtins(config).items() if k not in _INDIFFERENT}
    sources = [(file.url, file.size, file.stamp) for file in files]
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode([FORMAT, values, tokenizer.digest, needs, sources]))


def _whole(entry: Path) -> Manifest | None:
    """The manifest of an entry whose files are there in full."""
    try:
        manifest = msgspec.json.decode((entry / MANIFEST).read_bytes(), type=Manifest)
        for number, (records, size) in enumerate(manifest.segments):
            name = entry / segment_name(number)
            sizes = name.with_suffix(".records").stat().st_size, name.with_suffix(".index").stat().st_size
            if sizes != (size, 16 * records):
                log.warning("%s is damaged; it is made anew.", name)
                return None
    except (OSError, msgspec.MsgspecError):
        return None
    return manifest


def _root(config: FileData) -> Path:
    """Where entries are. A home that cannot be written is no reason not to train; a directory that was asked for is."""
    chosen = config.cache_dir or os.environ.get("HOTSWAP_CACHE")
    root = Path(chosen) if chosen else Path.home() / ".cache" / "hotswap"
    root = root / "records"
    try:
        with writing(root):
            root.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=root).close()
    except DataError:
        if chosen:
            raise
        root = _own(Path(tempfile.gettempdir()) / f"hotswap-{os.getuid()}") / "records"
        root.mkdir(exist_ok=True)
        log.warning("%s cannot be written; tokenised records are kept in %s.", Path.home() / ".cache", root)
    return root


def _own(directory: Path) -> Path:
    """This user's directory, below one where everybody may make one: a run must not train on what somebody else put
    there."""
    with writing(directory):
        directory.mkdir(exist_ok=True, mode=0o700)
        found = directory.lstat()
    if found.st_uid != os.getuid() or found.st_mode & 0o022 or not stat.S_ISDIR(found.st_mode):
        raise DataError(f"{directory} may be written by others. Remove it, or set data.cache_dir.")
    return directory


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[None]:
    with writing(lock), lock.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.warning("Another run tokenises the same data; waiting for it.")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def tokenise(
    units: Sequence[Unit], size: int, config: FileData, tokenizer: Tokenizer, needs: Needs, directory: Path
) -> Iterator[Done]:
    """Write segment i from unit i, for all units, on as many processes as the configuration and the work ask for; what
    each gave, in the units' order. Raises DataError for the first unit that cannot be read; closing the iterator ends
    the processes."""
    tasks = [Task(segment_name(i), unit) for i, unit in enumerate(units)]
    count = min(config.workers or len(os.sched_getaffinity(0)), len(tasks))
    if count <= 1 or (size < SMALL_BYTES and config.workers == 0):
        worker = Worker(config, tokenizer, needs, directory)
        for task in tasks:
            yield worker(task)
        return
    workers = [_Process(config, tokenizer, needs, directory) for _ in range(count)]
    idle: queue.SimpleQueue[_Process] = queue.SimpleQueue()
    for process in workers:
        idle.put(process)

    def run(task: Task) -> Done:
        process = idle.get()
        try:
            return process(task)
        finally:
            idle.put(process)

    pool = ThreadPoolExecutor(count)
    try:
        yield from pool.map(run, tasks)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in workers:
            process.kill()  # a thread that still waits for it reads its end
        pool.shutdown()
        for process in workers:
            process.close()


def segment_name(number: int) -> str:
    return f"{number:06d}"


class _Process:
    def __init__(self, config: FileData, tokenizer: Tokenizer, needs: Needs, directory: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "trainer.data.tokenise"],
            env=os.environ | {"TOKENIZERS_PARALLELISM": "false"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        values = msgspec.to_builtins(config)
        model = (str(tokenizer.directory), tokenizer.template, tokenizer.given)
        self._setup = Setup(*model, str(directory), config.kind, values, needs)  # type: ignore[arg-type]
        self._told = False

    def __call__(self, task: Task) -> Done:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            if not self._told:
                self._process.stdin.write(msgspec.json.encode(self._setup) + b"\n")
                self._told = True
            self._process.stdin.write(msgspec.json.encode(task) + b"\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = b""
        if not line:
            status = self._process.wait()
            raise DataError(
                f"the worker that tokenised {task.unit.url} ended with status {status}; what it printed says why. "
                "If it was killed for memory, lower data.workers."
            )
        answer = msgspec.json.decode(line, type=Done | Failed)
        if isinstance(answer, Failed):
            raise DataError(answer.message)
        return answer

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):  # what it did not read any more
                    stream.close()
