"""Data sets in files: tokenised into a cache on disk, once for each combination of files, keys and tokenizer.

    CACHE/DIGEST/             an entry: the records (trainer/data/tokenise.py) and
    CACHE/DIGEST/MANIFEST     JSON (Manifest), written last
    CACHE/DIGEST.lock         held by the one process that makes the entry; others wait, then find it
    CACHE/.making-DIGEST      being made; left behind by a killed run, removed by the next that makes it

The name digests everything that the records depend on: the format, the files with their sizes and time stamps, the
keys, the tokenizer, and what the run needs of a record. An entry whose files are not as the manifest says is made anew.
Entries may be deleted at any time; a run that has one open keeps it.
"""

from __future__ import annotations

import bisect
import contextlib
import fcntl
import itertools
import logging
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, overload

import msgspec
import xxhash

from trainer.config import FileData, HubData
from trainer.data.formats import place
from trainer.data.hub import sources, window
from trainer.data.parse import ANY, Needs
from trainer.data.records import Record
from trainer.data.storage import File, explained
from trainer.data.tokenise import FORMATS, NAMED, Records, Writer, part_name, tokenise, writing
from trainer.data.tokenizer import Tokenizer
from trainer.errors import DataError

log = logging.getLogger(__name__)
FORMAT = 9  # raised when an entry holds something else of the same records
MANIFEST, ALL = "MANIFEST", "all"
# The settings that do not change the records.
_INDIFFERENT = ("path", "eval_path", "max_bad", "cache_dir", "workers")


class CachedRecords(Sequence[Record]):
    """The usable records of a part of the data, a path or a split, in order. Holds two open files, no records."""

    def __init__(self, config: FileData, part: str, tokenizer: Tokenizer, needs: Needs) -> None:
        began = time.monotonic()
        files, read_by = sources(config, part)
        directory, self.manifest = prepare(files, read_by, tokenizer, needs)
        self.seconds = time.monotonic() - began
        self._kind, counts = read_by.kind, [count for _, count in self.manifest.files]
        self._ends = list(itertools.accumulate(counts))
        self._records = Records(directory, ALL, sum(counts))
        self._window = window(config, part, sum(counts))
        for problem in self.manifest.bad:
            log.warning("Left out: %s", problem)

    def __len__(self) -> int:
        return len(self._window)

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> list[Record]: ...
    def __getitem__(self, index: int | slice) -> Record | list[Record]:
        """Raises DataError for a record whose bytes in the cache have changed."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self._records.read(self._window[index]).record(index % len(self))

    def place(self, index: int) -> str:
        """The file of a record, and its line or row there."""
        index = self._window[index]
        url, _ = self.manifest.files[bisect.bisect_right(self._ends, index)]
        return place(self._kind, url, self._records.place(index))

    @property
    def digest(self) -> str:
        """A digest of all records, in order."""
        return self._records.digest(self._window)


class FileDataset:
    """The records to train on, which meet the `needs`, and those that are held out. Raises DataError for files that
    cannot be read, for too many bad records, and when there are none."""

    def __init__(self, config: FileData, tokenizer: Tokenizer, needs: Needs = ANY) -> None:
        part, eval_part = config.parts
        self._config, self._records = config, CachedRecords(config, part, tokenizer, needs)
        self._evaluated = [CachedRecords(config, eval_part, tokenizer, ANY)] if eval_part else []
        self.held_out: Sequence[Record] = self._evaluated[0] if self._evaluated else []
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

    def place(self, index: int) -> str:
        """The file of a record, and its line or row there."""
        return self._records.place(index)

    @property
    def digest(self) -> str:
        """A digest of all training records, in order."""
        return self._records.digest

    def summary(self) -> dict[str, Any]:
        """Figures of reading, for the metrics: counts of records read and left out, the first bad records by name, and
        the commit of a data set of the hub."""
        opened = [self._records, *self._evaluated]
        parts = [part.manifest for part in opened]
        at = {"revision": self._config.revision} if isinstance(self._config, HubData) else {}
        return at | {
            "tokens": self._records.manifest.tokens,
            "bad_records": sum(part.bad_records for part in parts),
            "too_long": sum(part.too_long for part in parts),
            "bad": [name for part in parts for name in part.bad],
            "seconds": round(sum(part.seconds for part in opened), 3),
        }


class Manifest(msgspec.Struct, frozen=True):
    """The content of an entry: each file and how many records it gave; their bytes and tokens; which were left out, the
    first of them by name."""

    files: list[tuple[str, int]]
    size: int
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
    units = []
    for file in files:
        with explained(file.url):
            units += FORMATS[config.kind].units(file, config)
    size = sum(max(file.size, 0) for file in files)
    counts, bad = list[tuple[str, int]](), list[str]()
    tokens = bad_records = too_long = places = 0
    results = tokenise(units, size, config, tokenizer, needs, directory)
    with Writer(directory, ALL) as whole, contextlib.closing(results):  # type: ignore[type-var]
        for number, (unit, done) in enumerate(zip(units, results, strict=True)):
            if not number or units[number - 1].url != unit.url:
                counts.append((unit.url, 0))
                places = 0
            for at, found in done.bad[: NAMED - len(bad)]:
                bad.append(f"{place(config.kind, unit.url, places + at, found)}: {found.reason}")
            bad_records, too_long = bad_records + done.bad_records, too_long + done.too_long
            if bad_records > config.max_bad:
                _refuse(bad, config.max_bad)
            whole.take(part_name(number), places)
            counts[-1] = (unit.url, counts[-1][1] + done.records)
            tokens, places = tokens + done.tokens, places + done.places
            log.info("tokenised %d of %d parts, %d tokens", number + 1, len(units), tokens)
    return Manifest(counts, whole.size, tokens, bad_records, too_long, bad)


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
        expected = {"records": manifest.size, "index": 24 * sum(count for _, count in manifest.files)}
        for kind, size in expected.items():
            if (entry / f"{ALL}.{kind}").stat().st_size != size:
                log.warning("%s is damaged; it is made anew.", entry)
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
