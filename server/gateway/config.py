"""The gateway's settings, most of which are options (server/options.py). Imports neither torch nor vLLM."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, get_args
from urllib.parse import urlsplit

from server.errors import ConfigError
from server.gateway.workers import Place
from server.options import ClusterTlsDirectory, Option, settings
from weightsync.tls import is_loopback


@dataclass(frozen=True)
class Limits:
    """The bounds on the cost of clients, one and all together. Sizes in bytes, times in seconds."""

    max_body: Annotated[int, Option("largest request body, bytes")] = 16 * 2**20
    max_head: Annotated[int, Option("largest request line with headers, and largest trailers, bytes")] = 32 * 2**10
    max_headers: Annotated[int, Option("most headers of a request")] = 100
    request_timeout_s: Annotated[float, Option("seconds from the first byte of a request to its last")] = 60.0
    keep_alive_s: Annotated[float, Option("seconds after which an idle connection is closed")] = 75.0
    stalled_client_s: Annotated[
        float, Option("seconds after which a client that reads nothing is dropped", "--write-timeout")
    ] = 60.0
    max_connections: Annotated[int, Option("most connections at a time")] = 10_000
    max_buffered: Annotated[int, Option("request bodies held at a time, of all connections, bytes")] = 256 * 2**20

    def __post_init__(self) -> None:
        for setting in settings("gateway", Limits):
            value = getattr(self, setting.path[-1])
            if not value > 0:
                raise ConfigError(f"{setting.flag} {value:g}: must be more than 0.")


@dataclass(frozen=True)
class HealthSettings:
    """When an instance is asked no more, and when again (fleet/instance.py). Times in seconds."""

    probe_timeout_s: float = 5.0
    unhealthy_after: int = 3  # probes without an answer, in a row; one good one takes it back
    eject_after: Annotated[int, Option("failures in a row after which an instance is left out for a while")] = 5
    window_s: float = 10.0
    min_requests: int = 20  # in the window, before a share of them counts
    max_failure_share: float = 0.5
    ejection_s: float = 5.0  # the first time; then twice as long each time
    max_ejection_s: float = 120.0
    forgive_s: float = 300.0  # after so long without one, the next ejection is a first one again
    max_ejected: Annotated[float, Option("most that may be left out, as a share of the instances, 0 to 1")] = 0.5
    trials: int = 2  # answers that close the circuit again
    trial_interval_s: float = 1.0


Failover = Literal["same", "any", "off"]


@dataclass(frozen=True)
class FailoverSettings:
    """Whether another instance continues a stream whose instance dies (fleet/retries.py), and the bytes kept for it."""

    mode: Annotated[
        Failover,
        Option(
            "which instance goes on with the streams of a dead one: one of the same version, one of any, none",
            "--failover",
        ),
    ] = "same"
    max_bytes: Annotated[int, Option("kept for failover, of all streams, bytes", "--failover-bytes")] = 64 * 2**20
    max_stream_bytes: int = 2**20
    idle_s: Annotated[
        float, Option("seconds of silence after which a stream counts as dead; 0: never", "--failover-idle")
    ] = 0.0


Kv = Literal["version", "session", "any"]


@dataclass(frozen=True)
class KvSettings:
    """Weights whose KV cache a prompt may be found in, for requests that do not say."""

    mode: Annotated[
        Kv, Option("KV cache that a prompt may reuse: of its version, of any in its session, of any", "--kv")
    ] = "version"
    versions: Annotated[int, Option("most versions with a part in the KV cache of a prompt", "--kv-versions")] = 8
    age_s: Annotated[float, Option("most seconds since a session's oldest KV cache in use", "--kv-age")] = 900.0


@dataclass(frozen=True)
class UpstreamSettings:
    """The settings of connections to instances."""

    connect_timeout_s: Annotated[float, Option("seconds to connect to an instance")] = 2.0
    # Covers a queued non-streaming request, which is silent until it is done.
    read_idle_timeout_s: Annotated[
        float, Option("seconds of silence after which an instance has failed", "--read-timeout")
    ] = 600.0
    max_idle_connections: int = 64
    # Below uvicorn's default keep-alive of 5 s, so that the gateway closes first and rarely meets a stale one.
    max_idle_s: float = 4.0
    scrape_interval_s: float = 2.0
    scrape_timeout_s: float = 0.5
    hold_s: Annotated[float, Option("seconds a request waits while no instance can be asked")] = 5.0
    max_held: int = 1024
    max_in_flight: Annotated[
        int | None, Option("requests at one instance; default: what it says it can run; 0: no limit")
    ] = None
    health: HealthSettings = HealthSettings()
    retry_share: Annotated[float, Option("share of requests that may be sent to another instance, 0 to 1")] = 0.2
    failover: FailoverSettings = FailoverSettings()
    routing: Annotated[
        str,
        Option("how an instance is chosen: affinity, least-loaded, round-robin, or MODULE:NAME of your own"),
    ] = "affinity"


@dataclass(frozen=True)
class QueueSettings:
    """The number of requests that wait for room at an instance, and their longest wait."""

    max_entries: Annotated[int, Option("requests that wait for room, at most", "--max-queued")] = 1024
    max_bytes: Annotated[int, Option("bytes of their bodies, at most", "--max-queued-bytes")] = 64 * 2**20
    max_wait_s: Annotated[float, Option("longest such wait, seconds", "--max-queue-wait")] = 30.0

    def __post_init__(self) -> None:
        if self.max_entries < 0 or self.max_bytes < 0:
            raise ConfigError("--max-queued and --max-queued-bytes: must be 0 (nothing waits) or more.")
        if not self.max_wait_s > 0:
            raise ConfigError(f"--max-queue-wait {self.max_wait_s:g}: must be a positive number of seconds.")


@dataclass(frozen=True)
class ObserveSettings:
    """The reports on requests, beside metrics."""

    log_format: Annotated[Literal["text", "json"], Option("format of the gateway's log lines")] = "text"
    access_log: Annotated[
        float | None, Option("share of requests with a log line, 0 to 1; default: 1 with json, 0 with text")
    ] = None
    otlp_endpoint: Annotated[
        str | None, Option("trace requests to this collector, http://HOST:4318", env="OTEL_EXPORTER_OTLP_ENDPOINT")
    ] = None
    trace_ratio: Annotated[
        float, Option("share of the traces begun here that is recorded, 0 to 1", "--trace-sample-ratio")
    ] = 1.0

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


Role = Literal["viewer", "operator", "publisher", "admin"]
ROLES: tuple[Role, ...] = get_args(Role)  # each may do what those before it may
Algorithm = Literal["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"]


@dataclass(frozen=True)
class OidcSettings:
    """The OpenID Connect issuer whose tokens the admin port admits (access/oidc.py), and what its users may do."""

    issuer: Annotated[
        str | None, Option("admit tokens of this OpenID Connect issuer on the admin port", "--oidc-issuer")
    ] = None
    audience: Annotated[str | None, Option("audience that its tokens must name", "--oidc-audience")] = None
    claim: Annotated[str, Option("claim with groups or roles; a dot leads into an object", "--oidc-claim")] = "roles"
    roles: Annotated[
        tuple[str, ...],
        Option(
            "VALUE=ROLE: a token with VALUE in the claim has ROLE; may be given again",
            "--oidc-role",
            metavar="VALUE=ROLE",
        ),
    ] = ()
    algorithms: Annotated[
        tuple[Algorithm, ...],
        Option("algorithm of its signatures; may be given again; default: RS256 and ES256", "--oidc-algorithm"),
    ] = ()
    leeway_s: Annotated[float, Option("seconds that its clock may be off", "--oidc-leeway")] = 30.0
    ca_file: Annotated[Path | None, Option("authority of its certificate; default: the system's", "--oidc-ca")] = None

    @property
    def allowed(self) -> tuple[str, ...]:
        """Algorithms."""
        return self.algorithms or ("RS256", "ES256")

    @property
    def mapping(self) -> dict[str, str]:
        """Value of the claim -> role."""
        return {value: role for value, _, role in (text.rpartition("=") for text in self.roles)}

    @staticmethod
    def is_trustworthy(url: str) -> bool:
        """Whether what is read there comes from whom the URL names: https, or this host."""
        parts = urlsplit(url)
        return parts.scheme == "https" or (parts.scheme == "http" and is_loopback(parts.hostname or ""))

    def __post_init__(self) -> None:
        if self.issuer is None:
            if self.audience is not None or self.roles:
                raise ConfigError("--oidc-audience and --oidc-role: name the issuer, too, with --oidc-issuer.")
            return
        if not self.is_trustworthy(self.issuer):
            raise ConfigError(f"--oidc-issuer {self.issuer}: must be an https URL (http on loopback alone).")
        if not self.audience:
            raise ConfigError("--oidc-audience: name the audience; else tokens for other services would be admitted.")
        if not self.roles:
            raise ConfigError("--oidc-role: say what the issuer's users may do, such as `--oidc-role sre=operator`.")
        for text in self.roles:
            value, _, role = text.rpartition("=")
            if not value or role not in ROLES:
                raise ConfigError(f"--oidc-role {text}: write VALUE=ROLE, with a role of {', '.join(ROLES)}.")
        if not 0 <= self.leeway_s <= 300:
            raise ConfigError(f"--oidc-leeway {self.leeway_s:g}: must be from 0 to 300 seconds.")


@dataclass(frozen=True)
class AnswerSettings:
    """The log of answers to keys that have opted in: its content, its place, and its age (docs/feedback.md)."""

    url: Annotated[
        str | None,
        Option(
            "where answers are kept: a directory or an fsspec URL; default: answers/ beside the SQLite store",
            "--answers",
        ),
    ] = None
    anonymous: Annotated[
        bool, Option("keep the answers to requests without a key too", "--collect-anonymous", negatable=True)
    ] = False
    redact: Annotated[
        str | None,
        Option("function of a record, MODULE:NAME, that changes or drops it before it is kept", "--answers-redact"),
    ] = None
    segment_s: Annotated[float, Option("seconds after which what was kept can be read", "--answers-segment")] = 60.0
    segment_bytes: Annotated[int, Option("the same, bytes", "--answers-segment-bytes")] = 16 * 2**20
    max_bytes: Annotated[int, Option("bytes of answers that are kept, at most", "--answers-max-bytes")] = 2 * 2**30
    max_age_s: Annotated[float, Option("seconds for which answers are kept", "--answers-max-age")] = 30 * 86_400.0
    feedback_s: Annotated[
        float, Option("seconds after an answer in which feedback on it is taken", "--feedback-window")
    ] = 86_400.0

    def __post_init__(self) -> None:
        for setting in settings("gateway", AnswerSettings):
            value = getattr(self, setting.path[-1])
            if setting.type in (int, float) and not value > 0:
                raise ConfigError(f"{setting.flag} {value:g}: must be more than 0.")


@dataclass(frozen=True)
class WebhookSettings:
    """The receiver of the ledger's entries (observe/ledger.py)."""

    urls: Annotated[
        tuple[str, ...],
        Option("URL that each entry of the ledger is posted to; may be given again", "--webhook", metavar="URL"),
    ] = ()
    key_file: Annotated[
        Path | None,
        Option("file with the secrets that sign them, whsec_BASE64, one a line", "--webhook-key-file"),
    ] = None

    def __post_init__(self) -> None:
        for url in self.urls:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ConfigError(f"--webhook {url}: give a URL with http:// or https://.")
        if self.urls and self.key_file is None:
            raise ConfigError("--webhook: name the secret that signs its messages, too, with --webhook-key-file.")


@dataclass(frozen=True)
class NamedSettings:
    """Places that policies and publications name. Each is opened with the gateway's rights, so requests and
    records have the name alone: no key, and no writer of the store, chooses a file or a URL."""

    reward: Annotated[
        tuple[str, ...],
        Option("NAME=URL: the server of the reward NAME; may be given again", metavar="NAME=URL"),
    ] = ()
    reward_key: Annotated[
        tuple[str, ...],
        Option("NAME=FILE: its key, in a private file; may be given again", metavar="NAME=FILE"),
    ] = ()
    evaluation: Annotated[
        tuple[str, ...], Option("NAME=FILE: the evaluation set NAME; may be given again", metavar="NAME=FILE")
    ] = ()
    sign_key: Annotated[
        tuple[str, ...],
        Option("NAME=FILE: a private key in PEM for versions; may be given again", metavar="NAME=FILE"),
    ] = ()

    def of(self, flag: str) -> dict[str, str]:
        """Name -> what `flag` says of it."""
        texts: tuple[str, ...] = getattr(self, flag.removeprefix("--").replace("-", "_"))
        return {name: value for name, _, value in (text.partition("=") for text in texts)}

    def find(self, flag: str, name: str) -> str:
        """The value that `flag` gives to `name`. Raises ConfigError."""
        known = self.of(flag)
        if name not in known:
            names = ", ".join(known) or "none"
            raise ConfigError(f"This gateway has no {flag} {name}=...; start it with one, or name another ({names}).")
        return known[name]

    def __post_init__(self) -> None:
        for setting in settings("gateway", NamedSettings):
            texts, named = getattr(self, setting.path[-1]), self.of(setting.flag)
            if not all(named) or not all(named.values()) or len(named) < len(texts):
                raise ConfigError(f"{setting.flag} {' '.join(texts)}: write {setting.option.metavar}, each name once.")
        for name, url in self.of("--reward").items():
            if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
                raise ConfigError(f"--reward {name}={url}: give a URL with http:// or https://.")


def _workers(text: str) -> int:
    if text == "auto":
        return len(os.sched_getaffinity(0))
    if not text.isdecimal():
        raise ConfigError(f"--workers {text}: must be a number of processes, or `auto` for one for each core.")
    return int(text)


_NO_STORE = "--store: give a store URL such as sqlite:///var/lib/hotswap/store.db, or set HOTSWAP_STORE."


@dataclass(frozen=True)
class GatewayConfig:
    """Everything `hotswap gateway` can be told, and `hotswap up`, which passes it on."""

    store: Annotated[str, Option("store URL, e.g. sqlite:///path/store.db", env="HOTSWAP_STORE", missing=_NO_STORE)]
    model: Annotated[str, Option("served model name")] = ""
    models: Annotated[
        Path | None, Option("file that names several models, aliases and upstreams; read anew on SIGHUP")
    ] = None
    check: Annotated[bool, Option("look at the settings and the files they name, and end")] = False
    host: Annotated[str, Option("address to listen on")] = "127.0.0.1"
    port: Annotated[int, Option("port to listen on; 0: any free port")] = 8000
    admin_host: Annotated[str, Option("address of the admin port; keep it private")] = "127.0.0.1"
    admin_port: Annotated[int | None, Option("port of /admin/*; default: the one after --port, or any free one")] = None
    admin_key: str | None = None  # the key itself, or "sha256:<hex>"; None: see admin_key_file
    admin_key_file: Annotated[
        Path | None, Option("file with the admin key, made if it does not exist; default: beside the SQLite store")
    ] = None
    api_key_file: Annotated[
        Path | None, Option("file with keys for inference, one a line, beside those in the store")
    ] = None
    require_key: Annotated[bool, Option("ask for a key for inference even before there is one", negatable=True)] = False
    allowed_origins: Annotated[
        tuple[str, ...],
        Option("page that may ask and read answers, or *; may be given again", "--allow-origin", metavar="ORIGIN"),
    ] = ()
    oidc: OidcSettings = OidcSettings()
    limits: Limits = Limits()
    upstream: UpstreamSettings = UpstreamSettings()
    queue: QueueSettings = QueueSettings()
    observe: ObserveSettings = ObserveSettings()
    answers: AnswerSettings = AnswerSettings()
    ledger_archive: Annotated[
        str | None,
        Option("directory or fsspec URL for older entries of the ledger; default: `ledger` beside a SQLite store"),
    ] = None
    webhooks: WebhookSettings = WebhookSettings()
    named: NamedSettings = NamedSettings()
    checkpoints: Annotated[
        tuple[str, ...],
        Option("directory whose checkpoints keys below `admin` may name; may be given again", metavar="DIR"),
    ] = ()
    swap_deadline_s: Annotated[float, Option("seconds for all instances to stage a version")] = 120.0
    push_timeout_s: float = 3600.0
    run_coordinator: Annotated[bool, Option("leave swaps to another gateway of this model", "--no-coordinator")] = True
    keep_versions: Annotated[int, Option("versions kept staged, the active one included")] = 2
    leave_s: Annotated[float, Option("on SIGTERM: seconds for which /readyz says no before the port closes")] = 0.0
    probes_file: Annotated[
        Path | None, Option("file with prompts that the canary of a rolling swap is asked", "--probes")
    ] = None
    max_logprob_drift: Annotated[
        float | None, Option("mean drift of the canary's log-probabilities that is let pass")
    ] = None
    cache_scope: Annotated[
        Literal["key", "shared"], Option("who shares prefix cache blocks: the requests of a key, or all")
    ] = "key"
    kv: KvSettings = KvSettings()
    log_level: Annotated[Literal["debug", "info", "warning", "error"], Option("least level of the log lines")] = "info"
    workers: Annotated[
        int, Option("processes on the port, or `auto`: one for each core", metavar="N", read=_workers)
    ] = 1
    worker: Place | None = None  # which of several this process is; None: the only one
    ssl_certfile: Annotated[Path | None, Option("serve TLS with this certificate chain")] = None
    ssl_keyfile: Annotated[Path | None, Option("private key of --ssl-certfile")] = None
    cluster_tls: ClusterTlsDirectory = None  # this member's certificate, for instances at https (docs/security.md)

    def __post_init__(self) -> None:
        if not self.model and self.models is None:
            raise ConfigError("--model: give the served model name, or --models FILE for several.")
        for option, port in (("--port", self.port), ("--admin-port", self.admin_port or 0)):
            if not 0 <= port < 65536:
                raise ConfigError(f"{option} {port}: must be between 0 (any free port) and 65535.")
        if self.port and self.port == self.admin_port:
            raise ConfigError("--admin-port must differ from --port: what it serves is not for the public.")
        kept = self.upstream.failover
        if kept.max_bytes < 0 or kept.idle_s < 0:
            raise ConfigError("--failover-bytes and --failover-idle must be 0 or more.")
        if self.kv.versions < 1 or not self.kv.age_s > 0:
            raise ConfigError("--kv-versions must be 1 or more, and --kv-age more than 0.")
        if self.upstream.hold_s < 0:
            raise ConfigError(f"--hold {self.upstream.hold_s:g}: must be 0 (answer 503 at once) or more seconds.")
        health = self.upstream.health
        if health.eject_after < 1 or not 0 <= health.max_ejected < 1:
            raise ConfigError("--eject-after must be 1 or more, and --max-ejected a share from 0 to below 1.")
        if not 0 <= self.upstream.retry_share <= 1:
            raise ConfigError(f"--retry-share {self.upstream.retry_share:g}: must be from 0 (no retries) to 1.")
        if self.upstream.max_in_flight is not None and self.upstream.max_in_flight < 0:
            raise ConfigError("--max-in-flight: must be 1 or more requests at one instance, or 0 for no limit.")
        if not all(Path(directory).is_absolute() for directory in self.checkpoints):
            raise ConfigError(f"--checkpoints {' '.join(self.checkpoints)}: give absolute directories.")
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
    def scheme(self) -> str:
        """Of the public port."""
        return "http" if self.ssl_certfile is None else "https"

    @property
    def admin_scheme(self) -> str:
        """Of the admin port, which speaks mutual TLS beyond loopback, where it has no certificate of the public one."""
        return "https" if self.is_admin_mutual else self.scheme

    @property
    def is_admin_mutual(self) -> bool:
        return self.ssl_certfile is None and self.cluster_tls is not None and not is_loopback(self.admin_host)

    @property
    def key_path(self) -> Path:
        """Where a generated admin key is kept (mode 0600)."""
        if self.admin_key_file is not None:
            return self.admin_key_file
        beside = self._beside_store
        return beside / "admin.key" if beside is not None else Path.home() / ".config" / "hotswap" / "admin.key"

    @property
    def answers_url(self) -> str:
        """Where answers are kept."""
        if self.answers.url is not None:
            return self.answers.url
        beside = self._beside_store or Path.home() / ".local" / "state" / "hotswap"
        return str(beside / "answers")

    @property
    def _beside_store(self) -> Path | None:
        scheme, _, rest = self.store.partition("://")
        return Path(rest).parent if scheme == "sqlite" and rest else None

    @property
    def ledger_place(self) -> str:
        """Where older entries of the ledger go; "": nowhere, they are dropped."""
        if self.ledger_archive is not None:
            return self.ledger_archive if "://" in self.ledger_archive else str(Path(self.ledger_archive).absolute())
        beside = self._beside_store
        return str(beside.absolute() / "ledger") if beside is not None else ""


OPTIONS = settings("gateway", GatewayConfig)
