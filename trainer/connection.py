"""The trainer's connection to a gateway, with keys and certificates from files that may be replaced while it runs, and
the request that makes the fleet serve an older version again.
"""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Callable, Generator
from pathlib import Path

import httpx

from trainer.config import GatewayConfig, ServingMemory, TelemetryConfig
from trainer.errors import ConfigError, PublishError
from weightsync.errors import TlsUnavailable
from weightsync.tls import ClusterTls, FollowedContext

ROLLBACK_ROUTE = "/admin/weights/rollback"


class Bearer(httpx.Auth):
    """Sends the key that `read` finds at each request; the last one, while a file is being replaced and there is
    none."""

    def __init__(self, read: Callable[[], str | None]) -> None:
        """Raises what `read` raises."""
        self._read = read
        self._key = read()

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        with contextlib.suppress(ConfigError):
            self._key = self._read()
        if self._key is not None:
            request.headers["authorization"] = f"Bearer {self._key}"
        yield request


def verify(config: GatewayConfig | TelemetryConfig | ServingMemory) -> ssl.SSLContext | bool:
    """The value for httpx's `verify`, which checks a server's certificate. Raises ConfigError."""
    if config.cluster_tls is not None:
        try:
            return ClusterTls(config.cluster_tls).client_context()
        except TlsUnavailable as error:
            raise ConfigError("cluster_tls", error.reason, error.advice) from error
    if config.ca_file is None:
        return True
    path = Path(config.ca_file)
    try:
        return FollowedContext([path], lambda: ssl.create_default_context(cafile=path), server=False)
    except OSError as error:
        advice = "Name a PEM file with the authority of the server's certificate"
        raise ConfigError("ca_file", f"{path} cannot be used ({error})", advice) from error


def roll_back_serving(config: TelemetryConfig, version: int, timeout_s: float) -> None:
    """Serve `version` again; returns when the whole fleet does. `config` says where the admin port is and its key.

    Raises PublishError when the gateway refuses (the version may no longer be held) or does not answer.
    """
    url, key = config.admin_url.rstrip("/") + ROLLBACK_ROUTE, Bearer(config.admin_key)
    try:
        answer = httpx.post(url, json={"version": version}, auth=key, verify=verify(config), timeout=timeout_s)
    except httpx.HTTPError as error:
        raise PublishError(f"the gateway's admin port does not answer: {error or type(error).__name__}") from error
    if answer.is_error:
        raise PublishError(f"the gateway would not go back to version {version}: {answer.text[:300]}")
