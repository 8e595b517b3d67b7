"""The gateway's settings. Imports neither torch nor vLLM, and nothing that does."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from server.errors import ConfigError


@dataclass(frozen=True)
class Limits:
    """What clients may cost, one and all together. Sizes in bytes, times in seconds."""

    max_body: int = 16 * 2**20
    max_head: int = 32 * 2**10
    max_headers: int = 100
    request_timeout_s: float = 60.0  # first byte of the request to its last
    keep_alive_s: float = 75.0
    stalled_client_s: float = 60.0  # a reader that takes nothing for so long is dropped
    max_connections: int = 10_000
    max_buffered: int = 256 * 2**20  # request bodies held at one time, over all connections


@dataclass(frozen=True)
class UpstreamSettings:
    """How instances are spoken to."""

    connect_timeout_s: float = 2.0
    # Covers a queued non-streaming request, which is silent until it is done.
    read_idle_timeout_s: float = 600.0
    max_idle_connections: int = 64
    # Below uvicorn's default keep-alive of 5 s, so that the gateway closes first and rarely meets a stale one.
    max_idle_s: float = 4.0
    scrape_interval_s: float = 2.0
    scrape_timeout_s: float = 0.5
    hold_s: float = 5.0  # for which a request waits while no instance can be asked
    max_held: int = 1024


@dataclass(frozen=True)
class GatewayConfig:
    """Everything `hotswap gateway` can be told."""

    store: str
    model: str
    host: str = "127.0.0.1"
    port: int = 8000
    admin_host: str = "127.0.0.1"
    admin_port: int | None = None  # None: the one after `port` if it is free, else any
    admin_key: str | None = None  # the key itself, or "sha256:<hex>"; None: see admin_key_file
    admin_key_file: Path | None = None  # None: `admin.key` beside the SQLite store
    api_key_file: Path | None = None  # None: no key is asked for inference
    limits: Limits = Limits()
    upstream: UpstreamSettings = UpstreamSettings()
    swap_deadline_s: float = 120.0
    push_timeout_s: float = 3600.0
    run_coordinator: bool = True
    keep_versions: int = 2
    probes_file: Path | None = None  # prompts asked of the canary of a rolling swap
    max_logprob_drift: float | None = None
    cache_scope: str = "key"  # whose prefix cache a request may hit: its "key"'s, or "shared" by all
    log_level: str = "info"
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError("--model: give the served model name.")
        for option, port in (("--port", self.port), ("--admin-port", self.admin_port or 0)):
            if not 0 <= port < 65536:
                raise ConfigError(f"{option} {port}: must be between 0 (any free port) and 65535.")
        if self.port and self.port == self.admin_port:
            raise ConfigError("--admin-port must differ from --port: what it serves is not for the public.")
        if self.upstream.hold_s < 0:
            raise ConfigError(f"--hold {self.upstream.hold_s:g}: must be 0 (answer 503 at once) or more seconds.")
        if self.keep_versions < 2:
            raise ConfigError("--keep-versions: at least 2, the active version and the one to roll back to.")
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ConfigError("--ssl-certfile and --ssl-keyfile go together; give both or neither.")
        if self.limits.max_body <= 0 or self.limits.max_head <= 0:
            raise ConfigError("--max-body and --max-head must be positive numbers of bytes.")

    @property
    def key_path(self) -> Path:
        """Where a generated admin key is kept (mode 0600)."""
        if self.admin_key_file is not None:
            return self.admin_key_file
        scheme, _, rest = self.store.partition("://")
        if scheme == "sqlite" and rest:
            return Path(rest).parent / "admin.key"
        return Path.home() / ".config" / "hotswap" / "admin.key"
