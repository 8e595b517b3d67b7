"""Who holds the device's memory in which phase, and how much of it there is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainer.config.checks import in_range, positive
from trainer.config.watching import TelemetryConfig
from trainer.errors import ConfigError


@dataclass(frozen=True)
class ServingMemory:
    """The instances that share the device with the trainer, and the admin port that puts them to sleep.

    `instances`: their ids; empty: all there are. `level` 2 gives everything back, 1 what is quick to have again (vLLM's
    sleep mode where it is on; else the process keeps its imports). Requests get `drain_s` to end. An instance wakes by
    itself `ttl_s` after the trainer has died. `engine_gib` (null: the published weights) and `kv_cache_gib` are what
    the instances together take of one device, for the plan. `ca_file` and `cluster_tls` are as in `gateway`.
    """

    admin_url: str
    admin_key_env: str = "HOTSWAP_ADMIN_KEY"
    admin_key_file: str | None = None
    instances: tuple[str, ...] = ()
    level: Literal[1, 2] = 2
    drain_s: float = 30.0
    timeout_s: float = 180.0
    ttl_s: float = 60.0
    engine_gib: float | None = None
    kv_cache_gib: float = 1.0
    ca_file: str | None = None
    cluster_tls: str | None = None

    def __post_init__(self) -> None:
        positive(self, "timeout_s", "engine_gib")
        in_range(self, "drain_s", 0.0, 3600.0)
        in_range(self, "ttl_s", 3.0, 86400.0)
        in_range(self, "kv_cache_gib", 0.0, 1e6)
        self.as_telemetry()

    def as_telemetry(self) -> TelemetryConfig:
        """Where the admin port is and how its key is found, in the form that knows how to read it."""
        place = (self.admin_url, self.admin_key_env, self.admin_key_file, self.timeout_s)
        return TelemetryConfig(*place, self.ca_file, self.cluster_tls)

    def admin_key(self) -> str:
        """Raises ConfigError when there is none."""
        try:
            return self.as_telemetry().admin_key()
        except ConfigError as error:
            advice = error.advice.replace("telemetry.", "memory.serving.")
            raise ConfigError("memory.serving", error.problem, advice) from None


@dataclass(frozen=True)
class MemoryConfig:
    """Phases that share a device: what one does not need is offloaded before the next begins.

    `budget_gib` is what trainer and serving may hold of one device together (without a GPU: of this host's memory, all
    ranks together; null: all there is); `reserve_gib` of it is kept for activations and buffers. `offload` is where to:
    `host` (pinned memory; needs a GPU), `disk` (a file in `directory` that is gone with the process), or `auto`.
    """

    budget_gib: float | None = None
    reserve_gib: float = 0.0
    offload: Literal["auto", "host", "disk"] = "auto"
    directory: str = "/var/tmp"  # noqa: S108 - a file without a name, and not memory as /tmp may be
    serving: ServingMemory | None = None

    def __post_init__(self) -> None:
        positive(self, "budget_gib")
        in_range(self, "reserve_gib", 0.0, 1e6)
        if self.budget_gib is not None and self.reserve_gib >= self.budget_gib:
            problem = f"{self.reserve_gib:g} leaves nothing of budget_gib ({self.budget_gib:g})"
            raise ConfigError("reserve_gib", problem, "Lower it, or raise budget_gib")
