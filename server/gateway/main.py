"""Starting a gateway process."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import ssl
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import uvicorn

from server.errors import ConfigError
from server.gateway.access.key_files import load_keys
from server.gateway.admin.probes import ProbeSettings
from server.gateway.app import build_app
from server.gateway.config import GatewayConfig
from server.gateway.observe.logs import configure
from server.gateway.proxy.protocol import GatewayProtocol
from weightsync.store import open_store

log = logging.getLogger("hotswap.gateway")

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
        log_config=None,
        log_level=config.log_level,
        server_header=False,
        date_header=False,
        timeout_keep_alive=max(1, int(config.limits.keep_alive_s)),
        timeout_graceful_shutdown=SHUTDOWN_GRACE_S,
        ssl_certfile=cast(str | None, config.ssl_certfile and str(config.ssl_certfile)),
        ssl_keyfile=config.ssl_keyfile and str(config.ssl_keyfile),
        ssl_context_factory=_certificate(config),
    )


def _certificate(config: GatewayConfig) -> Callable[[Any, Callable[[], ssl.SSLContext]], ssl.SSLContext] | None:
    if config.ssl_certfile is None or config.ssl_keyfile is None:
        return None
    from server.gateway.tls import Certificate

    return Certificate(config.ssl_certfile, config.ssl_keyfile).context


def bind(config: GatewayConfig) -> tuple[GatewayConfig, list[socket.socket]]:
    """The public and the admin listener, and the settings with the ports they got. Raises ConfigError."""
    public = _listen("--port", config.host, config.port)
    port = public.getsockname()[1]
    try:
        if config.admin_port is not None:
            admin = _listen("--admin-port", config.admin_host, config.admin_port)
        else:
            admin = _listen_beside(config.admin_host, port)
    except ConfigError:
        public.close()
        raise
    return replace(config, port=port, admin_port=admin.getsockname()[1]), [public, admin]


def run(config: GatewayConfig) -> None:
    """Serves until SIGINT or SIGTERM, then lets answers in progress finish. Raises ConfigError, StoreUnavailable."""
    configure(config.log_level, config.observe.log_format)
    ProbeSettings.of(config)
    load_keys(config)  # what cannot work is said here, in one line, rather than by a server that fails to start
    asyncio.run(_try_store(config.store))
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a connection takes two descriptors while it is forwarded
    config, listeners = bind(config)
    log.info("admin routes on %s, port %d", config.admin_host, config.admin_port)
    uvicorn.Server(uvicorn_config(config)).run(listeners)


def _listen(option: str, host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as exc:
        raise ConfigError(f"{option} {port}: cannot listen on {host} ({exc.strerror or exc}).") from exc


def _listen_beside(host: str, port: int) -> socket.socket:
    if port < 65535:
        try:
            return _listen("--admin-port", host, port + 1)
        except ConfigError:
            pass
    return _listen("--admin-port", host, 0)


async def _try_store(url: str) -> None:
    await open_store(url).close()
