"""`hotswap follow`: the source that an option names, and the process that follows it until it is told to end."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

from server.cli.admin import AdminClient
from server.errors import ConfigError
from server.follow import registry, versions
from server.follow.config import FollowConfig
from server.follow.loop import Follower
from server.follow.sources import FilesystemPlace, Prefix, Source
from server.follow.state import StateFile
from server.up import interrupts
from weightsync.bucket.metrics import serve
from weightsync.errors import BucketError
from weightsync.running import state_root

log = logging.getLogger("hotswap.follow")


def run_follow(config: FollowConfig) -> None:
    """Returns at Ctrl-C and SIGTERM alone. Raises ConfigError, CliError."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for name in ("httpx", "httpcore"):
        logging.getLogger(name).setLevel(logging.WARNING)
    interrupts.install()
    source = open_source(config)
    told = f"{source.told} {config.part}".strip()
    default = state_root() / "follow" / hashlib.sha256(told.encode()).hexdigest()[:16]
    cache = (config.cache_dir or default).expanduser().absolute()
    file = StateFile(cache, told)
    gateway = AdminClient(config.state_dir, config.url, config.admin_key_file)
    follower = Follower(source, gateway, file, cache, config)
    if config.metrics:
        try:
            serve(follower.metrics.registry, config.metrics)
        except (OSError, ValueError) as error:
            problem = f"--metrics {config.metrics}: {error}; name a free ADDRESS:PORT of this host."
            raise ConfigError(problem) from error
    log.info("follows %s; what it knows is in %s", told, cache)
    follower.run()


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
