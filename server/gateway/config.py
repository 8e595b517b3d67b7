"""The gateway's settings. Imports neither torch nor vLLM, and nothing that does."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from server.errors import ConfigError
from server.gateway.workers import Place
from weightsync.tls import is_loopback

_LIMIT_OPTIONS = {"stalled_client_s": "write-timeout"}


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

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not value > 0:
                option = _LIMIT_OPTIONS.get(name, name.removesuffix("_s").replace("_", "-"))
                raise ConfigError(f"--{option} {value:g}: must be more than 0.")


@dataclass(frozen=True)
class HealthSettings:
    """When an instance is asked no more, and when again (fleet/instance.py). Times in seconds."""

    probe_timeout_s: float = 5.0
    unhealthy_after: int = 3  # probes without an answer, in a row; one good one takes it back
    eject_after: int = 5  # failures in a row
    window_s: float = 10.0
    min_requests: int = 20  # in the window, before a share of them counts
    max_failure_share: float = 0.5
    ejection_s: float = 5.0  # the first time; then twice as long each time
    max_ejection_s: float = 120.0
    forgive_s: float = 300.0  # after so long without one, the next ejection is a first one again
    max_ejected: float = 0.5  # share of the instances; one always stays
    trials: int = 2  # answers that close the circuit again
    trial_interval_s: float = 1.0


Failover = Literal["same", "any", "off"]


@dataclass(frozen=True)
class FailoverSettings:
    """Who goes on with a stream whose instance dies (fleet/retries.py), and what may be kept for it, in bytes."""

    mode: Failover = "same"  # an instance of the same version; of any version if none runs it; nobody
    max_bytes: int = 64 * 2**20  # requests and tokens, of all streams
    max_stream_bytes: int = 2**20
    idle_s: float = 0.0  # a stream silent for so long counts as dead; 0: only with its connection, or its record


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
    max_in_flight: int | None = None  # at one instance; None: what it says it can run, 0: no limit
    health: HealthSettings = HealthSettings()
    retry_share: float = 0.2  # of the requests of the last seconds may be sent again after a lost connection
    failover: FailoverSettings = FailoverSettings()
    routing: str | None = None  # the policy: one of fleet/routing.py, or MODULE:NAME of another; None: its default


@dataclass(frozen=True)
class QueueSettings:
    """How many requests wait for room at an instance, and for how long."""

    max_entries: int = 1024
    max_bytes: int = 64 * 2**20  # bodies of those that wait
    max_wait_s: float = 30.0

    def __post_init__(self) -> None:
        if self.max_entries < 0 or self.max_bytes < 0:
            raise ConfigError("--max-queued and --max-queued-bytes: must be 0 (nothing waits) or more.")
        if not self.max_wait_s > 0:
            raise ConfigError(f"--max-queue-wait {self.max_wait_s:g}: must be a positive number of seconds.")


@dataclass(frozen=True)
class ObserveSettings:
    """What is told of requests, beside metrics."""

    log_format: Literal["text", "json"] = "text"
    access_log: float | None = None  # share of requests that get a line; None: all in JSON logs, none in text
    otlp_endpoint: str | None = None  # http://HOST:PORT of a collector; None: no traces
    trace_ratio: float = 1.0  # share of the traces begun here that are recorded

    @property
    def access_share(self) -> float:
        """Share of requests that get a line."""
        return self.access_log if self.access_log is not None else float(self.log_format == "json")

    def __post_init__(self) -> None:
        for option, share in (("--access-log", self.access_share), ("--trace-sample-ratio", self.trace_ratio)):
            if not 0.0 <= share <= 1.0:
                raise ConfigError(f"{option} {share:g}: must be a share of requests, from 0 (none) to 1 (all).")
        url = urlsplit(self.otlp_endpoint or "http://none")
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ConfigError(f"--otlp-endpoint {self.otlp_endpoint}: give http://HOST:PORT of an OTLP/HTTP collector.")


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
    api_key_file: Path | None = None  # keys for inference, beside those in the store
    require_key: bool = False  # ask for a key for inference even while there is none
    allowed_origins: tuple[str, ...] = ()  # pages that may ask while no key is needed, beside this machine's
    limits: Limits = Limits()
    upstream: UpstreamSettings = UpstreamSettings()
    queue: QueueSettings = QueueSettings()
    observe: ObserveSettings = ObserveSettings()
    swap_deadline_s: float = 120.0
    push_timeout_s: float = 3600.0
    run_coordinator: bool = True
    keep_versions: int = 2
    leave_s: float = 0.0  # on SIGTERM: how long /readyz says no before the port closes
    probes_file: Path | None = None  # prompts asked of the canary of a rolling swap
    max_logprob_drift: float | None = None
    cache_scope: str = "key"  # whose prefix cache a request may hit: its "key"'s, or "shared" by all
    log_level: str = "info"
    plain_asgi: bool = False  # the server's own HTTP protocol below an ASGI app (asgi.py), not connection.py
    workers: int = 1  # processes on the same port
    worker: Place | None = None  # which of several this process is; None: the only one
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
    cluster_tls: Path | None = None  # this member's certificate, for instances at https (docs/security.md)

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError("--model: give the served model name.")
        for option, port in (("--port", self.port), ("--admin-port", self.admin_port or 0)):
            if not 0 <= port < 65536:
                raise ConfigError(f"{option} {port}: must be between 0 (any free port) and 65535.")
        if self.port and self.port == self.admin_port:
            raise ConfigError("--admin-port must differ from --port: what it serves is not for the public.")
        kept = self.upstream.failover
        if kept.max_bytes < 0 or kept.idle_s < 0:
            raise ConfigError("--failover-bytes and --failover-idle must be 0 or more.")
        if self.upstream.hold_s < 0:
            raise ConfigError(f"--hold {self.upstream.hold_s:g}: must be 0 (answer 503 at once) or more seconds.")
        health = self.upstream.health
        if health.eject_after < 1 or not 0 <= health.max_ejected < 1:
            raise ConfigError("--eject-after must be 1 or more, and --max-ejected a share from 0 to below 1.")
        if not 0 <= self.upstream.retry_share <= 1:
            raise ConfigError(f"--retry-share {self.upstream.retry_share:g}: must be from 0 (no retries) to 1.")
        if self.upstream.max_in_flight is not None and self.upstream.max_in_flight < 0:
            raise ConfigError("--max-in-flight: must be 1 or more requests at one instance, or 0 for no limit.")
        if self.workers < 1:
            raise ConfigError(f"--workers {self.workers}: must be 1 or more processes, or `auto`.")
        if not 0 <= self.leave_s <= 300:
            raise ConfigError(f"--leave {self.leave_s:g}: must be from 0 to 300 seconds.")
        if self.keep_versions < 2:
            raise ConfigError("--keep-versions: at least 2, the active version and the one to roll back to.")
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ConfigError("--ssl-certfile and --ssl-keyfile go together; give both or neither.")
        if not is_loopback(self.admin_host) and self.ssl_certfile is None and self.cluster_tls is None:
            advice = "give --cluster-tls, or --ssl-certfile and --ssl-keyfile (docs/security.md)"
            raise ConfigError(f"--admin-host {self.admin_host}: beyond loopback the admin port needs TLS; {advice}.")

    @property
    def key_path(self) -> Path:
        """Where a generated admin key is kept (mode 0600)."""
        if self.admin_key_file is not None:
            return self.admin_key_file
        scheme, _, rest = self.store.partition("://")
        if scheme == "sqlite" and rest:
            return Path(rest).parent / "admin.key"
        return Path.home() / ".config" / "hotswap" / "admin.key"
