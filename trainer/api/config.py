"""The configuration of the training API. Imports neither torch nor Megatron."""

from __future__ import annotations

import os
import ssl
from pathlib import Path

import msgspec
from msgspec.structs import force_setattr

from trainer.config import Dtype, FaultsConfig, GatewayConfig, ModelConfig, ParallelConfig
from trainer.config.strict import Count, Natural, Positive, Section, found_store, read
from trainer.errors import ConfigError
from weightsync.tls import is_loopback


class LimitsConfig(Section, frozen=True):
    """`rank` is the largest of an adapter. Of each key: `models` training clients, `pending` requests that wait or run,
    `jobs` that have not ended, and uploaded `files` of at most `file_mb` each. `resident` clients without a pending
    gradient stay in memory, `served` snapshots of adapters in the server; of each client as many snapshots without a
    name stay on disk. `body_mb` bounds a request."""

    rank: Count = 64
    models: Count = 64
    pending: Count = 2000
    resident: Count = 16
    served: Count = 8
    body_mb: Count = 64
    jobs: Count = 8
    files: Count = 100
    file_mb: Count = 512


class JobsConfig(Section, frozen=True):
    """The settings of fine-tuning jobs. `rank` of their adapters: by default 16, or `limits.rank` if that is less. A
    job's first step has `learning_rate` (of preferences `dpo_learning_rate`) times the job's multiplier. The rate falls
    linearly towards zero."""

    rank: Count | None = None
    learning_rate: Positive = 1e-4
    dpo_learning_rate: Positive = 1e-5


class RanksConfig(Section, frozen=True):
    """The watch over several ranks, as in `faults` of `hotswap train`. After a rank has died all are started anew, at
    most `max_restarts` times, and go on from the journal."""

    max_restarts: Natural = 100
    heartbeat_s: Positive = 2.0
    heartbeat_timeout_s: Positive = 60.0
    collective_timeout_s: Positive = 600.0
    grace_s: Positive = 30.0

    def __post_init__(self) -> None:
        _ = self.as_trainer

    @property
    def as_trainer(self) -> FaultsConfig:
        """Ranks that nobody asks for anything do not hang."""
        return FaultsConfig(**msgspec.structs.asdict(self), hang_s=0.0)


class ServedConfig(Section, frozen=True):
    """The model that the gateway serves, and the store of its versions (default: HOTSWAP_STORE, else that of the server
    on this host). `dtype` must be what the serving engine was started with."""

    model: str
    store: str | None = None
    dtype: Dtype = "bfloat16"
    timeout_s: Positive = 60.0

    def __post_init__(self) -> None:
        if not self.store_url:
            force_setattr(self, "store", found_store(self.model))  # looked for once: the server may end

    @property
    def store_url(self) -> str:
        return self.store or os.environ.get("HOTSWAP_STORE", "")


class ApiConfig(Section, frozen=True):
    """`directory` holds the journal, the states of all clients and their checkpoints. `parallel` is the layout of the
    model over ranks, `devices` their GPUs. `base_model` is the name by which clients ask for the model (default:
    `publish.model`), `tokenizer` what the SDK's get_tokenizer() loads (default: `model.path`). `micro_tokens` bounds
    the tokens of a forward pass, padding included. With `ssl_certfile` and `ssl_keyfile` it speaks HTTPS; beyond
    loopback it must. Adapters are published as `adapters`-0, -1 and so on, in the lineage `adapters`. With `full` one
    client at a time trains all weights, which are published as whole versions."""

    model: ModelConfig
    gateway: GatewayConfig
    publish: ServedConfig
    directory: str
    parallel: ParallelConfig = ParallelConfig()
    devices: int | str | None = None
    faults: RanksConfig = RanksConfig()
    host: str = "127.0.0.1"
    port: int = 8400
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    base_model: str | None = None
    tokenizer: str | None = None
    full: bool = False
    adapters: str = "tinker"
    alpha: Positive = 32.0
    micro_tokens: Count = 8192
    seed: int = 0
    limits: LimitsConfig = LimitsConfig()
    jobs: JobsConfig = JobsConfig()

    def __post_init__(self) -> None:
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
        if self.model.dtype == "float16":
            raise ConfigError("model.dtype", "float16 needs a scaled loss", "Set it to bfloat16 or float32")
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
