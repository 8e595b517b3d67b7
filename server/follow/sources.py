"""Where checkpoints come from: directories, object stores (any URL of fsspec's), and what other sources share.

A source lists candidates, newest first: directories of a checkpoint's files, each with its size and a tag that changes
with its content. Of those files only what a publication reads is taken: the configuration, the index, the shards, and
sums to verify them by. Directories are read where they are; everything else is fetched into a cache, file by file, so
that what was cut off goes on.

A FollowError says that the source cannot be reached or read now, or that the cache has no room (code CacheFull): that
is tried again. With the code BadCheckpoint a candidate holds no whole checkpoint: not tried again until it changes.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from server.errors import RequestFailed, ServerError
from server.follow.config import NewestBy
from weightsync.bucket.objects import redacted
from weightsync.errors import CheckpointError
from weightsync.publish.checkpoint import INDEX, Checkpoint, read_config, read_inside

SUMS = "SHA256SUMS"
MAX_SUMS = 4 << 20
# Fields that change with a file's content, by file system; the first that the file system tells counts.
TAGS = ("ETag", "etag", "md5Hash", "content_md5", "generation", "LastModified", "updated", "mtime", "created")
TIMES = ("LastModified", "last_modified", "updated", "mtime", "created")
BAD = "BadCheckpoint"
_SHARD = re.compile(r"(.*)-\d{5}-of-(\d{5})\.safetensors")
_SUM = re.compile(r"([0-9a-fA-F]{64})(?: [ *](?:\./)?(\S.*))?")


class FollowError(ServerError):
    """A checkpoint cannot be taken. The message says why, and what to do; failures are counted by `code`."""

    def __init__(self, message: str, code: str = "SourceUnavailable") -> None:
        super().__init__(message)
        self.code = code


def bad_checkpoint(message: str) -> FollowError:
    """As it is, it will never be one."""
    return FollowError(message, BAD)


@dataclass(frozen=True)
class File:
    """`path` is where its place has it; `tag` changes with its content, `modified` is in unix seconds (0: unknown)."""

    path: str
    size: int
    tag: str
    modified: float = 0.0


@dataclass(frozen=True)
class Candidate:
    """A directory of a source that may be a checkpoint. `files` are those that a publication reads, by name.

    `lacks` says why the directory is not whole yet, if it is not. A user has named it if it is `chosen`: that
    it is older than another one is then no reason to leave it out.
    """

    source: str
    name: str
    files: Mapping[str, File]
    lacks: str = ""
    chosen: bool = False

    @property
    def identity(self) -> str:
        """32 hexadecimal digits, other ones when anything of it changes."""
        told = sorted((name, file.path, file.size, file.tag) for name, file in self.files.items())
        return hashlib.sha256(repr((self.source, self.name, told)).encode()).hexdigest()[:32]

    @property
    def modified(self) -> float:
        return max((file.modified for file in self.files.values()), default=0.0)

    @property
    def nbytes(self) -> int:
        return sum(file.size for file in self.files.values())


class Admin(Protocol):
    """The admin port of a gateway. Raises RequestFailed, CliError."""

    def call(self, method: str, path: str, body: dict[str, Any] | None = None, reason: str | None = None) -> Any:
        """The JSON answer."""

    def upload(self, path: str, query: Mapping[str, str], pieces: Iterable[bytes], reason: str) -> Any:
        """The JSON answer to a POST of these bytes."""


@dataclass(frozen=True)
class Wish:
    """How a candidate is to be published. The same `upload_id` again gives the same version; `attempt` counts those of
    a candidate, `reason` is for the ledger."""

    upload_id: str
    attempt: int
    reason: str
    part: str = ""
    sign_key: str = ""
    cast: bool = False


class Source(Protocol):
    """A place that a follower follows. `told` names the place, without secrets."""

    told: str

    def candidates(self) -> Iterator[Candidate]:
        """Newest first, whole or not. Raises FollowError."""

    def fetch(self, candidate: Candidate, cache: Path, admin: Admin) -> Path:
        """The directory with its files, verified: a new one in `cache`, or the candidate itself. Raises FollowError."""

    def publish(self, candidate: Candidate, home: Path, admin: Admin, wish: Wish) -> int:
        """Has the gateway make a version of what `fetch` has brought; its number. Raises FollowError, RequestFailed."""


class Checkpoints:
    """Sources whose candidates are directories that the gateway reads itself."""

    def publish(self, candidate: Candidate, home: Path, admin: Admin, wish: Wish) -> int:
        body: dict[str, Any] = {"path": str(home), "activate": False, "upload_id": wish.upload_id}
        body |= {"part": wish.part} if wish.part else {}
        body |= ({"sign_key": wish.sign_key} if wish.sign_key else {}) | ({"cast": True} if wish.cast else {})
        try:
            return int(admin.call("POST", "/admin/weights", body, wish.reason)["version"])
        except RequestFailed as error:
            if error.code in ("checkpoint_error", "bad_path"):  # it was verified here
                advice = f"the gateway's host must see {home} as well"
                raise RequestFailed(f"{advice}: {error}", error.status, error.code) from error
            raise


class Place(Protocol):
    """Where files are. Raises FollowError."""

    def ls(self, path: str) -> tuple[dict[str, str], dict[str, File]]:
        """Paths of the directories in it, and its files, by name."""

    def read(self, file: File, target: Path) -> None:
        """Copies it. Raises OSError where `target` cannot be written."""


class FilesystemPlace:
    """A file system of fsspec's."""

    def __init__(self, files: Any, url: str) -> None:
        self._files, self._url = files, url

    def ls(self, path: str) -> tuple[dict[str, str], dict[str, File]]:
        self._files.invalidate_cache()
        with self._told():
            entries = self._files.ls(path, detail=True)
        directories, files = {}, {}
        for entry in entries:
            full = str(entry["name"])
            name = full.rstrip("/").rpartition("/")[2]
            if entry["type"] == "directory":
                directories[name] = full
            elif full.rstrip("/") != path.rstrip("/"):  # an object that stands for its prefix
                files[name] = File(full, int(entry.get("size") or 0), _tag(entry), _modified(entry))
        return directories, files

    def read(self, file: File, target: Path) -> None:
        with self._told():
            self._files.get_file(file.path, str(target))

    def _told(self) -> contextlib.AbstractContextManager[None]:
        return reading(redacted(self._url))


@contextlib.contextmanager
def reading(told: str, advice: Callable[[Exception], str] = lambda _: "") -> Iterator[None]:
    """Each error of the library behind a source becomes FollowError, but for a full disk of ours.

    Libraries have exceptions of their own, and their messages may hold the URL as it is.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        what, more = redacted(str(error) or type(error).__name__), advice(error)
        raise FollowError(f"{told} cannot be read ({what}){more and f': {more}'}") from None


class Prefix(Checkpoints):
    """The directories below one, or that directory itself if it is a checkpoint."""

    def __init__(
        self, url: str, place: Place, root: str, main: str, newest_by: NewestBy = "name", in_place: bool = False
    ) -> None:
        self.told, self._place, self._root, self._main = redacted(url), place, root, main
        self._newest_by, self._in_place = newest_by, in_place

    def candidates(self) -> Iterator[Candidate]:
        directories, files = self._place.ls(self._root)
        if self._main in files:
            yield self._candidate(self._root.rstrip("/").rpartition("/")[2], files)
            return
        names = sorted((n for n in directories if not n.startswith((".", "tmp-"))), key=natural, reverse=True)
        found: Iterator[Candidate] = (self._candidate(name, self._place.ls(directories[name])[1]) for name in names)
        if self._newest_by == "time":
            found = iter(sorted(found, key=lambda one: one.modified, reverse=True))
        yield from (one for one in found if one.files)

    def fetch(self, candidate: Candidate, cache: Path, admin: Admin) -> Path:
        if self._in_place:
            home = Path(candidate.files[self._main].path).parent
        else:
            home = fetched(candidate, cache, self._place)
        verify(home, self._main)
        return home

    def _candidate(self, name: str, files: Mapping[str, File]) -> Candidate:
        found = wanted(files, self._main)
        return Candidate(self.told, name, found, lacking(found, self._main))


def wanted(files: Mapping[str, File], main: str) -> dict[str, File]:
    """The files that a publication reads, and sums to verify them by."""
    kept = (main, INDEX, SUMS)
    return {name: file for name, file in files.items() if name in kept or name.endswith((".safetensors", ".sha256"))}


def lacking(names: Collection[str], main: str) -> str:
    """Why these files are not all of a checkpoint yet; "" if they may be."""
    if main not in names:
        return f"it has no {main}"
    shards = [name for name in names if name.endswith(".safetensors")]
    if not shards:
        return "it has no *.safetensors"
    for name in shards:
        if (numbered := _SHARD.fullmatch(name)) is None:
            continue
        stem, total = numbered[1], int(numbered[2])
        there = sum(1 for other in shards if (m := _SHARD.fullmatch(other)) and m.groups() == numbered.groups())
        if there < total:
            return f"it has {there} of {total} shards of {stem}"
        if total > 1 and INDEX not in names:
            return f"it has no {INDEX}"
    return ""


def natural(name: str) -> tuple[Any, ...]:
    """A key that sorts step-9 before step-10."""
    return tuple(int(part) if index % 2 else part for index, part in enumerate(re.split(r"([0-9]+)", name)))


def fetched(candidate: Candidate, cache: Path, place: Place) -> Path:
    """The directory in `cache` with the candidate's files; those that are there already are not fetched again. Files of
    other candidates are removed. Raises FollowError."""
    with only_home(candidate, cache) as home:
        _fetch(candidate, home, place)
    return home


@contextlib.contextmanager
def only_home(candidate: Candidate, cache: Path) -> Iterator[Path]:
    """The directory in `cache` for its files, to be written within the context; those of other candidates go. Raises
    FollowError."""
    home = cache / "fetched" / candidate.identity
    try:
        home.mkdir(parents=True, exist_ok=True)
        for other in home.parent.iterdir():
            if other != home:
                shutil.rmtree(other, ignore_errors=True)
        yield home
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise FollowError(no_room(candidate.nbytes, cache), "CacheFull") from error
        raise FollowError(f"{home} cannot be written ({error.strerror}): name another --cache-dir") from error


def _fetch(candidate: Candidate, home: Path, place: Place) -> None:
    shards = {name for name in candidate.files if name.endswith(".safetensors")}
    for name in sorted(candidate.files.keys() - shards):
        _fetch_one(candidate.files[name], home / name, place)
    needed = sorted(shards & indexed if (indexed := _of_index(home)) else shards)
    missing = [name for name in needed if not _there(home / name, candidate.files[name])]
    size = sum(candidate.files[name].size for name in missing)
    if size > shutil.disk_usage(home).free:
        raise FollowError(no_room(size, home), "CacheFull")
    for name in missing:
        _fetch_one(candidate.files[name], home / name, place)


def _fetch_one(file: File, target: Path, place: Place) -> None:
    if _there(target, file):
        return
    part = target.with_name(f".{target.name}.part")
    place.read(file, part)
    if (got := part.stat().st_size) != file.size:
        part.unlink()
        raise FollowError(f"{file.path} came with {got:,} of {file.size:,} bytes: it was cut off, or is changing")
    part.rename(target)


def _there(target: Path, file: File) -> bool:
    return target.exists() and target.stat().st_size == file.size


def _of_index(home: Path) -> set[str]:
    """The shards that its index names; empty without a good one."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        return {str(name) for name in json.loads((home / INDEX).read_bytes())["weight_map"].values()}
    return set()


def no_room(nbytes: int, cache: Path) -> str:
    """The message where the cache is full."""
    return f"{cache} has no room for {nbytes:,} bytes: make room there, or name another directory with --cache-dir"


def verify(directory: Path, main: str) -> None:
    """Checks headers, index, shards and configuration, and every SHA-256 that stands beside them. Raises
    FollowError."""
    try:
        checkpoint = Checkpoint(directory)
        if main == "config.json":
            read_config(directory)
        sums = _sums(directory)
    except CheckpointError as error:
        raise bad_checkpoint(str(error)) from error
    for name, expected in sorted(sums.items()):
        if (got := _digest(directory / name)) != expected:
            raise bad_checkpoint(f"{directory / name} has SHA-256 {got}, and should have {expected}: fetch it again")
    try:
        checkpoint.check()
    except CheckpointError as error:
        raise bad_checkpoint(str(error)) from error


def _sums(directory: Path) -> dict[str, str]:
    """The sums of files that are here. Raises FollowError, CheckpointError."""
    found: dict[str, str] = {}
    listed = directory / SUMS
    for path in (*([listed] if listed.exists() else []), *sorted(directory.glob("*.sha256"))):
        about = "" if path == listed else path.name.removesuffix(".sha256")
        lines = read_inside(path, MAX_SUMS).decode(errors="replace").splitlines()
        for line in filter(None, map(str.strip, lines)):
            parsed = _SUM.fullmatch(line)
            name = about or (parsed[2] if parsed is not None else None)
            if parsed is None or name is None:
                raise bad_checkpoint(f"{path} is no list of SHA-256 sums ({line[:80]!r}): write it with sha256sum")
            if found.setdefault(name, parsed[1].lower()) != parsed[1].lower():
                raise bad_checkpoint(f"{path} has another sum of {name} than stands elsewhere: write them again")
    there = {name for name in found if "/" not in name and (directory / name).is_file()}
    unlisted = {path.name for path in directory.glob("*.safetensors")} - there
    if listed.exists() and unlisted:
        raise bad_checkpoint(f"{listed} does not name {min(unlisted)}: list every file")
    return {name: found[name] for name in there}


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise FollowError(f"{path} cannot be read ({error.strerror})") from error


def _tag(entry: Mapping[str, Any]) -> str:
    return next((f"{name} {entry[name]}" for name in TAGS if entry.get(name)), "")


def _modified(entry: Mapping[str, Any]) -> float:
    found = next((entry[name] for name in TIMES if entry.get(name)), 0.0)
    if isinstance(found, str):
        try:
            found = datetime.fromisoformat(found)
        except ValueError:
            return 0.0
    return found.timestamp() if isinstance(found, datetime) else float(found)
