"""Files by path or URL, on this machine or in any store that fsspec knows. Errors become DataError here."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import fsspec

from trainer.errors import DataError

HTTP = ("http://", "https://")
# The fields that show, without reading a file, that its content has changed; stores name them differently.
_STAMPS = ("mtime", "ETag", "etag", "md5Hash", "Content-MD5", "checksum", "LastModified", "last_modified", "updated")
_CLIENTS = ("aiohttp", "azure", "botocore", "fsspec", "gcsfs", "google", "httpx", "httpx2", "s3fs")


@dataclass(frozen=True)
class File:
    """One file. `size` is -1 where the store does not tell; `stamp` changes when its content does, where it tells;
    `seekable` says whether it can be read from the middle."""

    url: str
    size: int
    stamp: str
    seekable: bool = True


def is_remote(url: str) -> bool:
    return "://" in url and not url.startswith(("file://", "memory://"))


def find_files(pattern: str) -> list[File]:
    """The files that a path or URL names, `{a,b}` and `{000..009}` expanded in order, `*` in the order of the names.
    Raises DataError when there are none."""
    files = [file for one in expand(pattern) for file in _glob(one)]
    if not files:
        raise DataError(f"{pattern} names no file. Correct the path; patterns are matched on the store's side.")
    return files


def expand(pattern: str) -> list[str]:
    """`a{1,2}b{08..10}` -> a1b08, a1b09, a1b10, a2b08, ..."""
    found = re.search(r"\{([^{}]*)\}", pattern)
    if found is None:
        return [pattern]
    numbers = re.fullmatch(r"(\d+)\.\.(\d+)", found[1])
    if numbers:
        first, last = numbers.groups()
        width = len(first) if first.startswith("0") else 0
        choices = [f"{n:0{width}d}" for n in range(int(first), int(last) + 1)]
    else:
        choices = found[1].split(",")
    rests = expand(pattern[found.end() :])
    return [pattern[: found.start()] + choice + rest for choice in choices for rest in rests]


@contextlib.contextmanager
def opened(url: str, start: int | None = None, *, decompress: bool = True) -> Iterator[Any]:
    """A binary stream, decompressed by the file's extension: from `start`, which needs a seekable and uncompressed
    file, or (None) from the beginning to the end. Raises what the store does: see `explained`."""
    zstd = decompress and url.endswith(".zst")
    compression = "infer" if decompress and not zstd else None
    whole_over_http = start is None and url.startswith(HTTP)
    with fsspec.open(url, "rb", compression=compression, block_size=0 if whole_over_http else 1 << 22) as stream:
        if start:
            stream.seek(start)
        if zstd:
            import pyarrow as pa  # slow to import; fsspec's own reader takes a cut file for a whole one

            stream = pa.CompressedInputStream(pa.PythonFile(stream, "r"), "zstd")
        yield stream


@contextlib.contextmanager
def explained(url: str) -> Iterator[None]:
    """The errors of a store, as DataError: a missing file, no permission, no connection, no driver."""
    try:
        yield
    except ImportError as error:
        raise DataError(f"{url} needs a driver that is not installed ({error}).") from None
    except FileNotFoundError:
        raise DataError(f"{url} does not exist. Correct the path.") from None
    except DataError:
        raise
    except Exception as error:
        if not isinstance(error, OSError) and not of_client(error):
            raise
        raise DataError(f"cannot read {url}: {str(error) or type(error).__name__}. Check it and its store.") from error


def of_client(error: Exception) -> bool:
    """Whether an HTTP client raised it; these errors are no OSError."""
    return type(error).__module__.split(".")[0] in _CLIENTS


def _glob(url: str) -> list[File]:
    with explained(url):
        try:
            filesystem, path = fsspec.core.url_to_fs(url)
        except ValueError as error:  # an unknown protocol
            raise DataError(f"{url} is not in a store that can be read: {error}.") from None
        wildcards = "*[" if url.startswith(HTTP) else "*?["  # there a question mark begins the query: a signature, say
        if not any(c in url for c in wildcards):
            return [_file(filesystem, path, url)]
        found = sorted(path for path in filesystem.glob(path) if not filesystem.isdir(path))
        local = "://" not in url
        return [_file(filesystem, path, path if local else filesystem.unstrip_protocol(path)) for path in found]


def file_at(url: str) -> File:
    """The file of a path or URL without wildcards. Raises what the store does: see `explained`."""
    filesystem, path = fsspec.core.url_to_fs(url)
    return _file(filesystem, path, url)


def _file(filesystem: Any, path: str, url: str) -> File:
    info = filesystem.info(path)
    if info.get("type") == "directory":
        raise DataError(f"{url} is a directory. Name its files, with * for all of a kind.")
    stamp = next((str(info[key]) for key in _STAMPS if info.get(key) is not None), "")
    size = info.get("size")
    seekable = bool(info.get("partial")) if url.startswith(HTTP) else True
    return File(url, -1 if size is None else int(size), stamp, seekable)
