"""The configuration of the training API. Imports neither torch nor Megatron."""

from __future__ import annotations

import os
import ssl
from dataclasses import asdict, dataclass, field
from pathlib import Path

from trainer.config import Dtype, FaultsConfig, GatewayConfig, ModelConfig, ParallelConfig
from trainer.config.strict import positive, read
from trainer.errors import ConfigError
from weightsync.tls import is_loopback


@dataclass(frozen=True)
class LimitsConfig:
    """`rank` is the largest of an adapter. Of each key: `models` training clients, `pending` requests that wait or run,
    `jobs` that have not ended, and uploaded `files` of at most `file_mb` each. `resident` clients without a pending
    gradient stay in memory, `served` snapshots of adapters in the server; of each client as many snapshots without a
    name stay on disk. `body_mb` bounds a request."""

    rank: int = 64
    models: int = 64
    pending: int = 2000
    resident: int = 16
    served: int = 8
    body_mb: int = 64
    jobs: int = 8
    files: int = 100
    file_mb: int = 512

    def __post_init__(self) -> None:
        names = ("rank", "models", "pending", "resident", "served", "body_mb", "jobs", "files", "file_mb")
        positive(self, *names)


@dataclass(frozen=True)
class JobsConfig:
    """What fine-tuning jobs train with. `rank` of their adapters: by default 16, or `limits.rank` if that is less. A
    job's first step has `learning_rate` (of preferences `dpo_learning_rate`) times the job's multiplier, and it falls
    linearly towards zero."""

    rank: int | None = None
    learning_rate: float = 1e-4
    dpo_learning_rate: float = 1e-5

    def __post_init__(self) -> None:
        positive(self, "rank", "learning_rate", "dpo_learning_rate")


@dataclass(frozen=True)
class RanksConfig:
    """What watches over several ranks, as in `faults` of `hotswap train`. After one has died all are started anew, at
    most `max_restarts` times, and go on from the journal."""

    max_restarts: int = 100
    heartbeat_s: float = 2.0
    heartbeat_timeout_s: float = 60.0
    collective_timeout_s: float = 600.0
    grace_s: float = 30.0

    def __post_init__(self) -> None:
        _ = self.as_trainer

    @property
    def as_trainer(self) -> FaultsConfig:
        """Ranks that nobody asks for anything do not hang."""
        return FaultsConfig(**asdict(self), hang_s=0.0)


@dataclass(frozen=True)
class ServedConfig:
    """The model that the gateway serves, and the store of its versions (default: HOTSWAP_STORE). `dtype` must be what
    the serving engine was started with."""

    model: str
    store: str | None = None
    dtype: Dtype = "bfloat16"
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        positive(self, "timeout_s")

    @property
    def store_url(self) -> str:
        return self.store or os.environ.get("HOTSWAP_STORE", "")


@dataclass(frozen=True)
class ApiConfig:
    """`directory` holds the journal, the states of all clients and their checkpoints. `parallel` is the layout of the
    model over ranks. `base_model` is the name by which clients ask for the model (default: `publish.model`),
    `tokenizer` what the SDK's get_tokenizer() loads (default: `model.path`). `micro_tokens` bounds the tokens of a
    forward pass, padding included. With `ssl_certfile` and `ssl_keyfile` it speaks HTTPS; beyond loopback it must.
    Adapters are published as `adapters`-0, -1 and so on, in the lineage `adapters`. With `full` one client at a time
    trains all weights, which are published as whole versions."""

    model: ModelConfig
    gateway: GatewayConfig
    publish: ServedConfig
    directory: str
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    faults: RanksConfig = field(default_factory=RanksConfig)
    host: str = "127.0.0.1"
    port: int = 8400
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    base_model: str | None = None
    tokenizer: str | None = None
    full: bool = False
    adapters: str = "tinker"
    alpha: float = 32.0
    micro_tokens: int = 8192
    seed: int = 0
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    jobs: JobsConfig = field(default_factory=JobsConfig)

    def __post_init__(self) -> None:
        positive(self, "micro_tokens", "alpha")
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ConfigError("ssl_certfile", "given without ssl_keyfile, or the other way round", "Give both or none")
        if self.ssl_certfile is None and not is_loopback(self.host):
            problem = f"{self.host} is beyond loopback, where keys would travel in the clear"
            raise ConfigError("host", problem, "Set ssl_certfile and ssl_keyfile, or a TLS proxy before 127.0.0.1")
        if self.model.fp8 != "none":
            raise ConfigError("model.fp8", "nothing is trained here on layers in 8 bits", "Set it to none")
        if self.model.router_balance_loss or self.model.router_z_loss:
            problem = "losses are sums here, which nothing says how to weigh it against"
            raise ConfigError("model.router_balance_loss", problem, "Leave it and router_z_loss out")
        if self.parallel.shard == "full":
            raise ConfigError("parallel.shard", "each rank has its weights whole here", "Set it to optimizer")
        if self.full and self.model.random_init:
            raise ConfigError("full", "begins with the weights of a checkpoint", "Set model.random_init to false")
        if self.model.dtype == "float16":
            raise ConfigError("model.dtype", "float16 needs a scaled loss", "Set it to bfloat16 or float32")
        if not self.publish.store_url:
            raise ConfigError("publish.store", "missing, and HOTSWAP_STORE is not set", "Set it to the store's URL")
        if self.job_rank > self.limits.rank:
            problem = f"{self.job_rank} is more than limits.rank, {self.limits.rank}"
            raise ConfigError("jobs.rank", problem, "Lower it, or raise limits.rank")
        if "/" in self.adapters or not self.adapters:
            raise ConfigError("adapters", f"{self.adapters!r} cannot begin a name", "Use letters, digits and . _ : -")

    @property
    def name(self) -> str:
        """Of the base model, for clients."""
        return self.base_model or self.publish.model

    @property
    def job_rank(self) -> int:
        """Of the adapters that fine-tuning jobs train."""
        return self.jobs.rank or min(16, self.limits.rank)


def load(path: str | Path, overrides: list[str] | None = None) -> ApiConfig:
    """Read a YAML file and apply `a.b=c` overrides. Raises ConfigError naming the key that does not fit."""
    config = read(ApiConfig, path, overrides)
    try:
        Path(config.directory).mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise ConfigError("directory", f"cannot make {config.directory} ({error.strerror})", "Choose another") from None
    if not os.access(config.directory, os.W_OK):
        raise ConfigError("directory", f"may not write into {config.directory}", "Change its mode, or choose another")
    if config.ssl_certfile is not None and config.ssl_keyfile is not None:
        try:
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
        except OSError as error:
            advice = "Name PEM files of a certificate and its key"
            raise ConfigError("ssl_certfile", f"{config.ssl_certfile} cannot be used ({error})", advice) from error
    return config
