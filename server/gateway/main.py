"""Starting a gateway process, or several on one port.

A process that only looks after workers imports neither the app nor uvicorn: half its memory.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from server.errors import ConfigError
from server.gateway.access.key_sources import load_keys, read_private
from server.gateway.config import GatewayConfig
from server.gateway.fleet import routing
from server.gateway.models.file import ModelsFile
from server.gateway.observe.logs import configure
from server.gateway.workers import Place, Supervisor
from weightsync.dying import die_with
from weightsync.store import open_store
from weightsync.tls import ClusterTls, FollowedContext

if TYPE_CHECKING:
    import ssl

    import uvicorn

log = logging.getLogger("hotswap.gateway")

SHUTDOWN_GRACE_S = 30
BACKLOG = 2048


def uvicorn_config(config: GatewayConfig) -> uvicorn.Config:
    """How uvicorn runs the gateway: our protocol for the forwarded routes, our app for the rest."""
    import uvicorn

    from server.gateway.app import build_app
    from server.gateway.connection import GatewayProtocol

    return uvicorn.Config(
        build_app(config),
        host=config.host,
        port=config.port,
        http=cast(type[asyncio.Protocol], GatewayProtocol),  # by its methods
        ws="none",
        loop="uvloop",
        lifespan="on",
        access_log=False,
        log_config=None,
        log_level=config.log_level,
        server_header=False,
        timeout_graceful_shutdown=SHUTDOWN_GRACE_S,
        ssl_certfile=cast(str | None, config.ssl_certfile and str(config.ssl_certfile)),
        ssl_keyfile=config.ssl_keyfile and str(config.ssl_keyfile),
        ssl_context_factory=_certificate(config),
    )


def _certificate(config: GatewayConfig) -> Callable[[Any, Callable[[], ssl.SSLContext]], ssl.SSLContext] | None:
    """uvicorn's hook; what it is handed makes a context of the files."""
    if config.ssl_certfile is None or config.ssl_keyfile is None:
        return None
    paths = [config.ssl_certfile, config.ssl_keyfile]
    return lambda _, make: FollowedContext(paths, make, server=True)


def admin_tls(config: GatewayConfig) -> ssl.SSLContext | None:
    """Mutual TLS for the admin port; None where it speaks what the public port does. Raises TlsUnavailable."""
    if config.cluster_tls is None or not config.is_admin_mutual:
        return None
    return ClusterTls(config.cluster_tls).server_context()


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


def run(config: GatewayConfig, argv: Sequence[str] = ()) -> None:
    """Serves until SIGINT or SIGTERM, then lets answers in progress finish.

    Raises ConfigError, StoreUnavailable, TlsUnavailable.

    `argv`: the options, for the workers to read, if there are to be several.
    """
    configure(config.log_level, config.observe.log_format)
    if config.models is not None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until there is something to read anew (gateway.py)
    if config.worker is not None:
        _serve(*bind_beside(config, config.worker))
        return
    found = ModelsFile.of(config)
    for name in found.own:
        found.settings_of(name, config)
    config = replace(config, model=found.main(config))
    routing.find(config.upstream.routing)
    if config.cluster_tls is not None:
        ClusterTls(config.cluster_tls)
    if config.webhooks.key_file is not None:
        from server.gateway.observe.ledger import read_secrets

        read_secrets(config.webhooks.key_file)
    for flag in ("--reward-key", "--sign-key"):
        for file in config.named.of(flag).values():
            read_private(Path(file))
    load_keys(config)  # what cannot work is said here, in one line, rather than by a server that fails to start
    if config.check:
        print(f"The settings can be used; models: {', '.join(found.names)}.")
        return
    asyncio.run(_try_store(config.store))
    config, listeners = bind(config)
    log.info("admin routes on %s, port %d", config.admin_host, config.admin_port)
    if config.workers == 1:
        _serve(config, listeners)
        return
    public, admin = listeners
    public.close()  # it has shown that nobody else listens there
    with _shared(config.host, config.port) as public:
        supervisor = Supervisor(argv, config.workers, public, admin, rereads=config.models is not None)
        sys.exit(asyncio.run(supervisor.run(config.leave_s + SHUTDOWN_GRACE_S)))


def bind_beside(config: GatewayConfig, place: Place) -> tuple[GatewayConfig, list[socket.socket]]:
    """The same as `bind`, for one of several workers."""
    die_with(place.parent)  # in order: SIGTERM
    public, admin = _shared(config.host, place.port), socket.socket(fileno=place.admin)
    public.listen(BACKLOG)
    config = replace(config, port=place.port, admin_port=admin.getsockname()[1])
    if place.leads:
        return config, [public, admin]
    admin.close()
    return config, [public]


def _shared(host: str, port: int) -> socket.socket:
    """A socket on a port that others may listen on too."""
    shared = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    shared.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    shared.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    shared.bind((host, port))
    return shared


def _serve(config: GatewayConfig, listeners: list[socket.socket]) -> None:
    from server.gateway.listening import GatewayServer, spare_memory

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a connection takes two descriptors while it is forwarded

    async def leave() -> bool:
        server.lifespan.state["gateway"].leaving = True  # /readyz says so, for load balancers to see
        await asyncio.sleep(config.leave_s)
        return True

    server = GatewayServer(uvicorn_config(config), leave, admin_tls(config))
    spare_memory()
    server.run(listeners)


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
