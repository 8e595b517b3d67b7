"""Tokenised data sets on disk, made once for each combination of files, keys and tokenizer.

    CACHE/DIGEST/             an entry: the segments and
    CACHE/DIGEST/MANIFEST     JSON (Manifest), written last
    CACHE/DIGEST.lock         held by the one process that makes the entry; others wait, then find it
    CACHE/.making-DIGEST      being made; left behind by a killed run, removed by the next that makes it

The name digests everything that the records depend on: the format, the files with their sizes and time stamps, the
keys, and the tokenizer. An entry whose files are not as the manifest says is made anew. Entries may be deleted at any
time; a run that has one open keeps it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import xxhash

from trainer.config import FileData
from trainer.data.formats import Bad, format_of
from trainer.data.segment import digests, writing
from trainer.data.storage import File, explained
from trainer.data.tokenise import NAMED
from trainer.data.tokenizer import Tokenizer
from trainer.data.workers import segment_name, tokenise
from trainer.errors import DataError

FORMAT = 1  # raised when what an entry holds changes
MANIFEST = "MANIFEST"
# What does not change the records.
_INDIFFERENT = ("path", "eval_path", "max_bad", "cache_dir", "workers")
log = logging.getLogger(__name__)


class Manifest(msgspec.Struct, frozen=True):
    """What an entry holds: (records, bytes) of each segment; the digest of all records, however they were cut; which
    were left out, the first of them by name."""

    segments: list[tuple[int, int]]
    digest: str
    tokens: int
    bad_records: int
    too_long: int
    bad: list[str]


def prepare(files: list[File], config: FileData, tokenizer: Tokenizer) -> tuple[Path, Manifest]:
    """The entry of these files, made now if there is none. Raises DataError when more than `max_bad` records cannot be
    used, naming the first."""
    root = _root(config)
    entry = root / _key(files, config, tokenizer)
    manifest = _whole(entry)
    if manifest is None:
        with _alone(root / f"{entry.name}.lock"):
            manifest = _whole(entry)  # another run may have made it meanwhile
            if manifest is None:
                manifest = _make(entry, files, config, tokenizer)
    if manifest.bad_records > config.max_bad:
        _refuse(manifest.bad, config.max_bad)
    return entry, manifest


def _make(entry: Path, files: list[File], config: FileData, tokenizer: Tokenizer) -> Manifest:
    staged = entry.parent / f".making-{entry.name}"
    for leftover in (staged, entry):
        shutil.rmtree(leftover, ignore_errors=True)
    with writing(staged):
        staged.mkdir()
        try:
            manifest = _fill(staged, files, config, tokenizer)
            (staged / MANIFEST).write_bytes(msgspec.json.encode(manifest))
            staged.rename(entry)
        finally:
            shutil.rmtree(staged, ignore_errors=True)
    return manifest


def _fill(directory: Path, files: list[File], config: FileData, tokenizer: Tokenizer) -> Manifest:
    units, reader = [], format_of(config.kind)
    for file in files:
        with explained(file.url):
            units += reader.units(file, config)
    size = sum(max(file.size, 0) for file in files)
    digest, segments, bad = xxhash.xxh3_128(), [], list[str]()
    tokens = bad_records = too_long = lines = 0
    results = tokenise(units, size, config, tokenizer, directory)
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


def _key(files: list[File], config: FileData, tokenizer: Tokenizer) -> str:
    values = {k: v for k, v in dataclasses.asdict(config).items() if k not in _INDIFFERENT}
    sources = [(file.url, file.size, file.stamp) for file in files]
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode([FORMAT, values, tokenizer.digest, sources]))


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
    """A directory where everybody may make one, and where records of somebody else's making must not be trained on."""
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
