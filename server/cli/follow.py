"""`hotswap follow`: the process that follows a source, until it is told to end."""

from __future__ import annotations

import hashlib
import logging

from server.cli.admin import AdminClient
from server.errors import ConfigError
from server.follow.config import FollowConfig
from server.follow.loop import Follower
from server.follow.opening import open_source
from server.follow.state import StateFile
from server.up import interrupts
from weightsync.bucket.metrics import serve
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
