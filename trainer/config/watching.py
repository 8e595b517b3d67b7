"""What is seen of a run: evaluations, and where its numbers go besides the file of JSON lines."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from trainer.config.checks import key_in, positive, server
from trainer.errors import ConfigError


@dataclass(frozen=True)
class EvalConfig:
    """Answers to held-out prompts through the gateway: at the start, every `every` steps and at the end. One `samples`
    is the greedy answer; more are sampled as rollouts are, and their mean and best are reported."""

    every: int = 20
    prompts: int = 100
    samples: int = 1

    def __post_init__(self) -> None:
        positive(self, "every", "prompts", "samples")


@dataclass(frozen=True)
class TelemetryConfig:
    """Where the run's numbers are shown: the gateway's admin port. The key is in the environment variable
    `admin_key_env`, or in `admin_key_file` (0600), never in this file. `ca_file` and `cluster_tls` are as in
    `gateway`."""

    admin_url: str
    admin_key_env: str = "HOTSWAP_ADMIN_KEY"
    admin_key_file: str | None = None
    timeout_s: float = 5.0
    ca_file: str | None = None
    cluster_tls: str | None = None

    def __post_init__(self) -> None:
        positive(self, "timeout_s")
        server("admin_url", self.admin_url, self.ca_file, self.cluster_tls)

    def admin_key(self) -> str:
        """Raises ConfigError when there is none."""
        key = os.environ.get(self.admin_key_env, "")
        if not key and self.admin_key_file is not None:
            return key_in(self.admin_key_file, "telemetry.admin_key_file")
        if not key or not key.isascii() or not key.isprintable():
            advice = f"Set {self.admin_key_env}, or telemetry.admin_key_file"
            raise ConfigError("telemetry", "there is no admin key to post metrics with", advice)
        return key


@dataclass(frozen=True)
class WandbConfig:
    """Weights & Biases. `offline` writes below `dir`, for `wandb sync` later; `online` wants WANDB_API_KEY. Runs of the
    same `id` are one run there: set it for a run that will be resumed."""

    project: str = "hotswap"
    name: str | None = None
    group: str | None = None
    id: str | None = None
    tags: tuple[str, ...] = ()
    dir: str = "runs"
    mode: Literal["offline", "online"] = "offline"

    def __post_init__(self) -> None:
        if not self.project:
            raise ConfigError("project", "empty", "Name the W&B project")

    def check_key(self) -> None:
        """Raises ConfigError when `online` has no key."""
        if self.mode == "online" and not os.environ.get("WANDB_API_KEY"):
            raise ConfigError("watch.wandb.mode", "online, but WANDB_API_KEY is not set", "Set it, or use offline")


@dataclass(frozen=True)
class WatchConfig:
    """`progress` is drawn on standard error: a `bar`, `lines` (one an event, for logs), or nothing; `auto` is a bar on
    a terminal that does not show the JSON lines already. `tensorboard` is a directory for its event files.
    `peak_tflops` is what MFU is a share of, by rank (default: the GPU's published bf16 figure; a CPU's is measured)."""

    progress: Literal["auto", "bar", "lines", "off"] = "auto"
    tensorboard: str | None = None
    wandb: WandbConfig | None = None
    peak_tflops: float | None = None

    def __post_init__(self) -> None:
        positive(self, "peak_tflops")
