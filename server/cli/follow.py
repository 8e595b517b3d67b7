"""`hotswap follow`: the process that follows a source, until it is told to end."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from server.cli.admin import AdminClient
from server.errors import ConfigError, RequestFailed
from server.follow.config import FollowConfig
from server.follow.loop import Follower, Plan
from server.follow.opening import open_source
from server.follow.state import StateFile
from server.up import interrupts
from weightsync.bucket.metrics import serve
from weightsync.running import state_root

log = logging.getLogger("hotswap.follow")


class Gateway:
    """The admin port, looked up anew when it does not answer: `up` may have begun again elsewhere, with other keys."""

    def __init__(self, state_dir: Path | None, url: str | None, key_file: Path | None) -> None:
        self._where = state_dir, url, key_file
        self._client: AdminClient | None = None

    def call(self, method: str, path: str, body: dict[str, Any] | None = None, reason: str | None = None) -> Any:
        """As AdminClient.call. Raises CliError."""
        return self._asked(lambda client: client.call(method, path, body, reason))

    def upload(self, path: str, query: Mapping[str, str], pieces: Iterable[bytes], reason: str) -> Any:
        """As AdminClient.upload. Raises CliError."""
        return self._asked(lambda client: client.upload(path, query, pieces, reason))

    def _asked(self, ask: Callable[[AdminClient], Any]) -> Any:
        client = self._client or AdminClient(*self._where)
        try:
            answer = ask(client)
        except RequestFailed as error:
            self._client = client if error.status and error.status != 401 else None
            raise
        self._client = client
        return answer


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
    plan = Plan(
        part=config.part,
        policy=config.policy,
        activate=config.activate,
        sign_key=config.sign_key,
        cast=config.cast,
        newest_by=config.newest_by,
        interval_s=config.interval_s,
        settle_s=config.settle_s,
    )
    gateway = Gateway(config.state_dir, config.url, config.admin_key_file)
    follower = Follower(source, gateway, file, cache, plan)
    if config.metrics:
        try:
            serve(follower.metrics.registry, config.metrics)
        except (OSError, ValueError) as error:
            problem = f"--metrics {config.metrics}: {error}; name a free ADDRESS:PORT of this host."
            raise ConfigError(problem) from error
    log.info("follows %s; what it knows is in %s", told, cache)
    follower.run()
