"""The configuration of operation: checkpoints, faults, evaluation, metrics, and device memory."""

from __future__ import annotations

import os
from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from trainer.config.datasets import DataConfig
from trainer.config.rewards import RewardConfig
from trainer.config.strict import Count, Natural, NonNegative, Positive, Section, Text, key_in, server
from trainer.errors import ConfigError

COLLECTIVE_TIMEOUT_S = 600.0
SetName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*\Z", description="Use letters, digits, _ and -")]


class CheckpointConfig(Section, frozen=True):
    """Where checkpoints go, and which stay. `every` and `keep_every` count steps, `max_failures` writes in a row."""

    path: str
    every: Count = 100
    keep: Count = 2
    keep_every: Natural = 0
    keep_best: Natural = 0
    asynchronous: bool = True
    max_failures: Natural = 0
    resume: Literal["auto", "must", "never"] = "auto"


class FaultsConfig(Section, frozen=True):
    """Ranks that die or hang, and numbers that leap. `hang_s` must be longer than the longest phase, rollouts included;
    0: never. A leap is a loss or gradient norm `spike_sigma` standard deviations above the mean of the last
    `spike_window` steps, `spike_patience` steps in a row; 0 turns that off."""

    max_restarts: Natural = 0
    heartbeat_s: Positive = 2.0
    heartbeat_timeout_s: Positive = 60.0
    hang_s: NonNegative = 1800.0
    collective_timeout_s: Positive = COLLECTIVE_TIMEOUT_S
    grace_s: Positive = 120.0
    on_diverged: Literal["stop", "rollback"] = "stop"
    max_rollbacks: Count = 3
    rollback_serving: bool = True
    spike_sigma: NonNegative = 0.0
    spike_window: Annotated[int, Meta(ge=8)] = 32
    spike_patience: Count = 1

    def __post_init__(self) -> None:
        if self.heartbeat_timeout_s < 2 * self.heartbeat_s:
            raise ConfigError(
                "heartbeat_timeout_s",
                f"{self.heartbeat_timeout_s:g} is less than two heartbeats of {self.heartbeat_s:g} s",
                "Make it longer, or heartbeat_s shorter",
            )


class EvalConfig(Section, frozen=True):
    """One of the sets of prompts that are answered through the gateway and scored, every `every` steps. Null is the
    run's for `data` and `rewards`, and for `pass_at` (the k of pass@k) `samples`, if there are several."""

    name: SetName = "held_out"
    every: Count = 20
    prompts: Count = 100
    samples: Count = 1
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    pass_at: tuple[int, ...] | None = None
    data: DataConfig | None = None
    rewards: tuple[RewardConfig, ...] | None = None

    def __post_init__(self) -> None:
        if self.samples > 1 and self.heat == 0.0:
            raise ConfigError("temperature", f"0, so all {self.samples} samples are the same", "Set samples to 1")
        for k in self.passes:
            if not 1 <= k <= self.samples:
                problem = f"{k} of {self.samples} samples"
                raise ConfigError("pass_at", problem, "Give numbers from 1 to samples, or raise samples")
        if self.rewards == ():
            raise ConfigError("rewards", "empty, so no answer is right", "Name one, or leave it out for the run's")

    @property
    def heat(self) -> float:
        """The temperature, also where none is given."""
        if self.temperature is not None:
            return self.temperature
        return 0.0 if self.samples == 1 else 1.0

    @property
    def passes(self) -> tuple[int, ...]:
        """The k of pass@k."""
        if self.pass_at is not None:
            return self.pass_at
        return (self.samples,) if self.samples > 1 else ()

    @property
    def metrics(self) -> tuple[str, ...]:
        """The metrics by which evaluations can be compared, each reward's own mean aside."""
        return ("accuracy", "reward_mean", *(f"pass_at_{k}" for k in self.passes))


class TelemetryConfig(Section, frozen=True):
    """The console that shows the run's numbers: the gateway's admin port. The key is in the environment variable
    `admin_key_env`, or in `admin_key_file` (0600), never in this file. `ca_file` and `cluster_tls` are as in
    `gateway`."""

    section: ClassVar[str] = "telemetry"
    admin_url: str
    admin_key_env: str = "HOTSWAP_ADMIN_KEY"
    admin_key_file: str | None = None
    timeout_s: Positive = 5.0
    ca_file: str | None = None
    cluster_tls: str | None = None

    def __post_init__(self) -> None:
        server("admin_url", self.admin_url, self.ca_file, self.cluster_tls)

    def admin_key(self) -> str:
        """Raises ConfigError when there is none."""
        key = os.environ.get(self.admin_key_env, "")
        if not key and self.admin_key_file is not None:
            return key_in(self.admin_key_file, f"{self.section}.admin_key_file")
        if not key or not key.isascii() or not key.isprintable():
            advice = f"Set {self.admin_key_env}, or {self.section}.admin_key_file"
            raise ConfigError(self.section, "there is no admin key", advice)
        return key


class WandbConfig(Section, frozen=True):
    """Weights & Biases. `offline` writes below `dir`, for `wandb sync` later; `online` wants WANDB_API_KEY. Runs of the
    same `id` are one run there: set it for a run that will be resumed."""

    project: Text = "hotswap"
    name: str | None = None
    group: str | None = None
    id: str | None = None
    tags: tuple[str, ...] = ()
    dir: str = "runs"
    mode: Literal["offline", "online"] = "offline"

    def check_key(self) -> None:
        """Raises ConfigError when `online` has no key."""
        if self.mode == "online" and not os.environ.get("WANDB_API_KEY"):
            raise ConfigError("watch.wandb.mode", "online, but WANDB_API_KEY is not set", "Set it, or use offline")


class WatchConfig(Section, frozen=True):
    """How a run is shown. `peak_tflops` is what MFU is a share of, by rank (default: the GPU's published bf16 figure; a
    CPU's is measured). `tensorboard` is a directory."""

    progress: Literal["auto", "bar", "lines", "off"] = "auto"
    tensorboard: str | None = None
    wandb: WandbConfig | None = None
    peak_tflops: Positive | None = None
    samples: Natural = 0
    samples_every: Count = 20


class ServingMemory(TelemetryConfig, frozen=True):
    """The instances that share the device with the trainer, and the admin port that puts them to sleep. `instances` has
    their ids; empty: all there are. `engine_gib` and `kv_cache_gib` are what the instances together take of one device.
    """

    section: ClassVar[str] = "memory.serving"
    instances: tuple[str, ...] = ()
    level: Literal[1, 2] = 2
    drain_s: Annotated[float, Meta(ge=0.0, le=3600.0)] = 30.0
    timeout_s: Positive = 180.0
    ttl_s: Annotated[float, Meta(ge=3.0, le=86400.0)] = 60.0
    engine_gib: Positive | None = None
    kv_cache_gib: NonNegative = 1.0


class MemoryConfig(Section, frozen=True):
    """Phases that share a device: what one does not need is offloaded before the next begins. `budget_gib` is what
    trainer and serving may hold of one device together; without a GPU: of this host's memory, all ranks together."""

    budget_gib: Positive | None = None
    reserve_gib: NonNegative | None = None
    offload: Literal["auto", "host", "disk"] = "auto"
    directory: str = "/var/tmp"  # noqa: S108 - a file without a name, and not memory as /tmp may be
    serving: ServingMemory | None = None

    def __post_init__(self) -> None:
        if self.reserve_gib is not None and self.budget_gib is not None and self.reserve_gib >= self.budget_gib:
            problem = f"{self.reserve_gib:g} leaves nothing of budget_gib ({self.budget_gib:g})"
            raise ConfigError("reserve_gib", problem, "Lower it, or raise budget_gib")
