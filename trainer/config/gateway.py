"""Where a run's answers come from."""

from __future__ import annotations

import os
from dataclasses import dataclass

from trainer.config.checks import key_in, positive, server
from trainer.errors import ConfigError


@dataclass(frozen=True)
class GatewayConfig:
    """Where `/generate` answers. `api_key_env` names the environment variable that holds the inference key, or
    `api_key_file` the file it is in, which is read again for every request. For https, `ca_file` is the authority that
    signed the gateway's certificate (default: those of the system), or `cluster_tls` a member's directory with tls.crt,
    tls.key and ca.crt."""

    url: str
    api_key_env: str | None = None
    api_key_file: str | None = None
    ca_file: str | None = None
    cluster_tls: str | None = None
    timeout_s: float = 120.0
    retry_s: float = 30.0
    concurrency: int = 64

    def __post_init__(self) -> None:
        positive(self, "timeout_s", "retry_s", "concurrency")
        server("url", self.url, self.ca_file, self.cluster_tls)

    def api_key(self) -> str | None:
        """Raises ConfigError when one is named that is not there."""
        if self.api_key_env is not None:
            if self.api_key_env not in os.environ:
                raise ConfigError("gateway.api_key_env", f"{self.api_key_env} is not set", "Export it")
            return os.environ[self.api_key_env]
        return key_in(self.api_key_file, "gateway.api_key_file") if self.api_key_file is not None else None
