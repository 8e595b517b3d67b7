"""Starting a gateway process."""

from __future__ import annotations

import asyncio
import logging
import resource
from typing import cast

import uvicorn

from server.gateway.app import build_app
from server.gateway.auth import load_keys
from server.gateway.config import GatewayConfig
from server.gateway.protocol import GatewayProtocol
from weightsync.store import open_store

SHUTDOWN_GRACE_S = 30


def uvicorn_config(config: GatewayConfig) -> uvicorn.Config:
    """How uvicorn runs the gateway: its protocol on our routes, our app for the rest."""
    return uvicorn.Config(
        build_app(config),
        host=config.host,
        port=config.port,
        http=GatewayProtocol,
        ws="none",
        loop="uvloop",
        lifespan="on",
        access_log=False,
        log_level=config.log_level,
        server_header=False,
        date_header=False,
        timeout_keep_alive=max(1, int(config.limits.keep_alive_s)),
        timeout_graceful_shutdown=SHUTDOWN_GRACE_S,
        ssl_certfile=cast(str | None, config.ssl_certfile and str(config.ssl_certfile)),
        ssl_keyfile=config.ssl_keyfile and str(config.ssl_keyfile),
    )


def run(config: GatewayConfig) -> None:
    """Serves until SIGINT or SIGTERM, then lets answers in progress finish. Raises ConfigError, StoreUnavailable."""
    logging.basicConfig(level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    load_keys(config)  # what cannot work is said here, in one line, rather than by a server that fails to start
    asyncio.run(_try_store(config.store))
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a connection takes two descriptors while it is forwarded
    uvicorn.Server(uvicorn_config(config)).run()


async def _try_store(url: str) -> None:
    await open_store(url).close()
