"""The source that an option names."""

from __future__ import annotations

from pathlib import Path

from server.errors import ConfigError
from server.follow import registry, versions
from server.follow.config import FollowConfig
from server.follow.sources import FilesystemPlace, Prefix, Source
from weightsync.errors import BucketError


def open_source(config: FollowConfig) -> Source:
    """Raises ConfigError for what names no source."""
    url = config.source
    if url.startswith(registry.SCHEME):
        return registry.Registry(url, config.tracking_uri, config.main)
    if url.startswith(versions.SCHEME):
        return _versions(config)
    scheme = url.partition("://")[0] if "://" in url else ""
    if scheme in ("dir", ""):
        path = Path(url.partition("://")[2] if scheme else url).expanduser()
        if scheme and not path.is_absolute():
            raise ConfigError(f"{url}: name the directory by its whole path, dir:///models/run.")
        from fsspec.implementations.local import LocalFileSystem

        path = path.absolute()
        place = FilesystemPlace(LocalFileSystem(), str(path))
        return Prefix(f"dir://{path}", place, str(path), config.main, config.newest_by, in_place=True)
    place, root = open_place(url)
    return Prefix(url, place, root, config.main, config.newest_by)


def _versions(config: FollowConfig) -> Source:
    if config.part:
        raise ConfigError(f"--part {config.part}: the versions in a bucket say themselves what they are.")
    if config.cast:
        raise ConfigError("--cast: versions in a bucket are taken as they were published there.")
    if config.sign_key:
        raise ConfigError("--sign-key: versions in a bucket are signed by who publishes them there.")
    try:
        return versions.Versions(config.source)
    except BucketError as error:
        raise ConfigError(str(error)) from error


def open_place(url: str) -> tuple[FilesystemPlace, str]:
    """A URL of fsspec's. Raises ConfigError."""
    from fsspec.core import url_to_fs

    try:
        files, root = url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"{url} cannot be opened ({error}): name dir:///DIRECTORY or a URL of fsspec's.") from error
    return FilesystemPlace(files, url), root
