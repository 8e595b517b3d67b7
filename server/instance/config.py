"""Configuration of one instance; importable without vLLM."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from server.errors import ConfigError
from server.instance import options
from server.instance.grammars.trials import DEFAULT, Limits
from server.options import ClusterTlsDirectory, Option
from weightsync.tls import is_loopback

ANY = frozenset({"", "0.0.0.0", "::"})  # noqa: S104 - to be told from an address
ACROSS_HOSTS = frozenset(
    {"--nnodes", "--node-rank", "--master-addr", "--data-parallel-address", "--distributed-executor-backend"}
)


@dataclass(frozen=True)
class InstanceConfig:
    """One instance: which model directory, where it listens, which store it reports to.

    Beyond loopback it speaks mutual TLS alone, with the certificate in `cluster_tls`; `advertise` is the address under
    which gateways reach it, if that is not `host`. Raises ConfigError.

    `vllm_args` are passed to vLLM as they are. `kv_cache_gib` bounds the KV cache on CPU, where vLLM would otherwise
    take, and zero-fill, most of the machine's memory. `headless`: vLLM's workers of this host alone, for an instance
    that another host leads. `allow_non_finite`: versions with NaN or infinities are not refused.
    """

    model_dir: Annotated[Path, Option("checkpoint directory: config and tokenizer; weights come by version", "--model")]
    model: Annotated[str, Option("model name in the store and for clients", "--name")]
    store: Annotated[str, Option("store URL, e.g. sqlite:///path/store.db", env="HOTSWAP_STORE")]
    instance_id: Annotated[str, Option("default: host name and process id")] = ""
    host: Annotated[str, Option("address to listen on; beyond loopback with --cluster-tls")] = "127.0.0.1"
    port: Annotated[int, Option("0: any free port")] = 0
    advertise: Annotated[str, Option("address that gateways connect to; default: --host")] = ""
    cluster_tls: ClusterTlsDirectory = None
    kv_cache_gib: Annotated[float, Option("KV cache on CPU, GiB")] = 1.0
    headless: Annotated[bool, Option("the workers of this host alone, for an instance that another host leads")] = False
    allow_non_finite: Annotated[bool, Option("stage versions with NaN or infinite weights, which are refused")] = False
    grammars: Limits = DEFAULT  # of trying one out before vLLM compiles it
    stage_timeout_s: float = 600.0
    drain_s: float = 25.0  # for streams to end after SIGTERM; Kubernetes kills after 30 s
    vllm_args: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        options.check(self.vllm_args)
        if not self.instance_id:
            object.__setattr__(self, "instance_id", default_instance_id())
        if self.cluster_tls is None and not is_loopback(self.host):
            raise ConfigError(
                f"--host {self.host}: beyond loopback an instance needs mutual TLS; give --cluster-tls DIR with "
                "tls.crt, tls.key and ca.crt (docs/security.md), or leave it on loopback."
            )
        if self.host in ANY and (not self.advertise or self.advertise in ANY):
            raise ConfigError(f"--host {self.host}: say with --advertise ADDRESS where gateways are to connect to.")

    @property
    def spans_hosts(self) -> bool:
        """Whether vLLM was told of ranks on other hosts."""
        return any(argument.split("=")[0] in ACROSS_HOSTS for argument in self.vllm_args)

    def address(self, port: int) -> str:
        """What its record says, and gateways connect to."""
        host = self.advertise or self.host
        scheme = "http" if self.cluster_tls is None else "https"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    def vllm_argv(self, *, cpu: bool, port: int) -> list[str]:
        """The command line vLLM's own parser gets: weights arrive through the checkpoint engine, so none are loaded."""
        argv = ["--model", str(self.model_dir), "--served-model-name", self.model]
        argv += ["--host", self.host, "--port", str(port), "--load-format", "dummy"]
        argv += ["--weight-transfer-config", '{"backend": "hotswap"}']
        argv += ["--worker-extension-cls", "weightsync.vllm_engine.backend.WorkerMethods"]
        argv += ["--disable-uvicorn-access-log", "--scheduling-policy", "priority"]
        argv += ["--enable-scale-out"]  # routes that the gateway forwards from its admin port
        argv += ["--headless"] if self.headless else []
        if cpu:
            argv += ["--enforce-eager"]
            if "--kv-cache-memory-bytes" not in self.vllm_args:
                argv += ["--kv-cache-memory-bytes", str(int(self.kv_cache_gib * 2**30))]
        return [*argv, *self.vllm_args]


def default_instance_id() -> str:
    """Host name and process id: unique among live instances, and it says where to look."""
    return f"{socket.gethostname()}-{os.getpid()}"
