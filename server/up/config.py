"""The settings of `hotswap up`, importable without what it starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from server.errors import CliError, ConfigError, as_cli_error
from server.instance.config import ACROSS_HOSTS, KV_CACHE, check_vllm_args
from server.options import Option
from weightsync.ray_cluster import parse_bundle

DISK, HOSTS, GATEWAY = "Copies on disk", "Several hosts", "Gateway"  # headings of `--help-all`


def _copies(text: str) -> Path | Literal["off"]:
    return "off" if text == "off" else Path(text)


@dataclass(frozen=True)
class UpConfig:
    """The options of `hotswap up`. Raises CliError."""

    model: Annotated[str | None, Option("checkpoint directory, or the name of a model in the local cache or hub")] = (
        None
    )
    models: Annotated[
        Path | None, Option("file that names several models, aliases and upstreams; starts those with a checkpoint")
    ] = None
    name: Annotated[
        str | None, Option("name clients ask for; default: the directory's name, or OWNER/NAME of the hub")
    ] = None
    host: Annotated[str, Option("address the gateway listens on")] = "127.0.0.1"
    port: Annotated[int, Option("port the gateway listens on")] = 8000
    state_dir: Annotated[Path | None, Option("store, keys and logs; default: per model name")] = None
    fresh: Annotated[bool, Option("discard keys, versions and history of the state")] = False
    persist: Annotated[
        Path | Literal["off"] | None, Option("directory for copies of versions, or off", read=_copies)
    ] = None  # None: in the state directory
    persist_keep: Annotated[int, Option("versions kept on disk", panel=DISK)] = 2
    persist_max_gib: Annotated[float | None, Option("most that they may take, GiB", panel=DISK)] = None
    admin_key_file: Annotated[Path | None, Option("file with the admin key; default: made on start", panel=GATEWAY)] = (
        None
    )
    api_key_file: Annotated[Path | None, Option("file with API keys, one a line; default: none asked")] = None
    train: Annotated[Path | None, Option("also run this trainer configuration")] = None
    kv_cache_gib: Annotated[float | None, Option(KV_CACHE)] = None
    instances: Annotated[int, Option("vLLM instances, each with GPUs of its own; on a CPU they share the weights")] = 1
    ready_timeout_s: Annotated[
        float, Option("seconds in which every instance must come to serve; large models that are compiled take longer")
    ] = 600.0
    store: Annotated[str | None, Option("etcd://HOST:PORT/...; default: a SQLite file", panel=HOSTS)] = None
    ray: Annotated[str | None, Option("address of a Ray cluster, or auto: instances run on its nodes", panel=HOSTS)] = (
        None
    )
    ray_bundle: Annotated[
        str | None,
        Option("resources of an instance, as CPU=8,GPU=2; default: by --tensor-parallel-size", panel=HOSTS),
    ] = None
    ray_strategy: Annotated[
        Literal["SPREAD", "PACK", "STRICT_SPREAD", "STRICT_PACK"],
        Option("how Ray places the instances", panel=HOSTS),
    ] = "SPREAD"
    otlp_endpoint: Annotated[
        str | None,
        Option("trace requests to http://HOST:4318", env="OTEL_EXPORTER_OTLP_ENDPOINT", panel=GATEWAY),
    ] = None  # of the gateway and of vLLM
    gateway_args: tuple[str, ...] = ()
    vllm_args: tuple[str, ...] = ()
    throwaway: bool = False  # of a test or a benchmark: begins anew, copies nothing to disk, and a stop keeps nothing

    def __post_init__(self) -> None:
        with as_cli_error(ConfigError):
            check_vllm_args(self.vllm_args)
        if self.model is None and self.models is None:
            raise CliError("name a checkpoint: `hotswap up MODEL`, or with --models a file of models that have one")
        if self.kv_cache_gib is not None and self.kv_cache_gib <= 0:
            raise CliError(f"--kv-cache-gib {self.kv_cache_gib:g}: must be more than 0")
        if self.instances < 1:
            raise CliError(f"--instances {self.instances}: at least 1 is needed to answer anything")
        if self.ready_timeout_s <= 0:
            raise CliError(f"--ready-timeout {self.ready_timeout_s:g}: must be more than 0")
        if self.store is not None and not self.store.startswith("etcd://"):
            raise CliError("--store: only etcd://... is taken here; without it a SQLite store is made")
        if self.store is not None and self.fresh:
            raise CliError("--fresh: what an etcd holds is not this server's to discard; name another namespace in it")
        if self.ray is not None:
            self._check_ray()
        if self.persist_keep < 1 or (self.persist_max_gib or 1.0) <= 0:
            raise CliError("--persist-keep and --persist-max-gib: must be more than 0")

    def _check_ray(self) -> None:
        if self.store is None:
            raise CliError("--ray: processes on several nodes meet in an etcd, not in a file; name one with --store")
        if (across := next((a for a in self.vllm_args if a.partition("=")[0] in ACROSS_HOSTS), None)) is not None:
            raise CliError(f"--ray: an instance lies on one node, so it takes no {across} (docs/multinode.md)")
        if self.ray_bundle is not None:
            try:
                parse_bundle(self.ray_bundle)
            except ValueError as error:
                raise CliError(f"--ray-bundle {self.ray_bundle}: {error}; write it as CPU=8,GPU=2") from error
