"""Configuration of one instance, and which of vLLM's options it takes; importable without vLLM.

An instance answers the gateway alone, so an option of vLLM that would change its door has no effect on clients, or
shuts the gateway out; weights come through the checkpoint engine. Such options are refused, with what to use instead,
at once, before anything is started.
"""

from __future__ import annotations

import difflib
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn

from server.errors import ConfigError
from server.instance.grammars.trials import DEFAULT, Limits
from server.options import ClusterTlsDirectory, Option
from server.ports import ANY, url_of
from weightsync.control.records import Keys
from weightsync.errors import RecordError
from weightsync.tls import is_loopback
from weightsync.vllm_engine.device.pacing import Staging
from weightsync.vllm_engine.releases import find


@dataclass(frozen=True)
class Form:
    """The form that an engine is started with. `digest`: of the versions that it can run, None if none is known yet.

    `config` is their configuration ("": that of the model directory), and `config_dir` holds it, None if the model
    directory does; `tensors` is the JSON of their schema. `swap_id` is the swap that asked for this start, None if none
    did.
    """

    digest: str | None = None
    config_dir: Path | None = None
    tensors: str = ""
    swap_id: str | None = None
    config: str = ""


ITS_OWN = Form()
CPU_KV_CACHE_GIB = 1.0
KV_CACHE = "KV cache of each rank, GiB; default: 1 on a CPU, what vLLM finds free on a GPU"
ACROSS_HOSTS = frozenset(
    {"--nnodes", "--node-rank", "--master-addr", "--data-parallel-address", "--distributed-executor-backend"}
)


@dataclass(frozen=True)
class InstanceConfig:
    """One instance: which model directory, where it listens, which store it reports to.

    Beyond loopback it speaks mutual TLS alone, with the certificate in `cluster_tls`; `advertise` is the address under
    which gateways reach it, if that is not `host`. Raises ConfigError.

    `vllm_args` are passed to vLLM as they are. `kv_cache_gib` is the KV cache of each rank. Left out, a GPU's is what
    vLLM finds free, and a CPU's 1 GiB: vLLM would take, and zero-fill, most of the machine's memory. `headless`: vLLM's
    workers of this host alone, for an instance that another host leads. `allow_non_finite`: versions with NaN or
    infinities are not refused. `staging`: whether staging on a CPU bounds what each step of decoding loses. `trust`:
    versions that none of these keys and certificates has signed are refused.
    """

    model_dir: Annotated[Path, Option("checkpoint directory: config and tokenizer; weights come by version", "--model")]
    model: Annotated[str, Option("model name in the store and for clients", "--name")]
    store: Annotated[str, Option("store URL, e.g. sqlite:///path/store.db", env="HOTSWAP_STORE")]
    instance_id: Annotated[str, Option("default: host name and process id")] = ""
    host: Annotated[str, Option("address to listen on; beyond loopback with --cluster-tls")] = "127.0.0.1"
    port: Annotated[int, Option("0: any free port")] = 0
    advertise: Annotated[str, Option("address that gateways connect to; default: --host")] = ""
    cluster_tls: ClusterTlsDirectory = None
    kv_cache_gib: Annotated[float | None, Option(KV_CACHE)] = None
    headless: Annotated[bool, Option("the workers of this host alone, for an instance that another host leads")] = False
    allow_non_finite: Annotated[bool, Option("stage versions with NaN or infinite weights, which are refused")] = False
    staging: Annotated[Staging, Option("on a CPU: smooth takes a tenth of each step; fast does not wait")] = "smooth"
    trust: Annotated[
        tuple[Path, ...], Option("public key or certificate that must have signed versions; may be given again")
    ] = ()
    grammars: Limits = DEFAULT  # of trying one out before vLLM compiles it
    stage_timeout_s: float = 600.0
    drain_s: Annotated[float, Option("seconds that answers get to end after SIGTERM; then others go on with them")] = (
        25.0  # whoever sends SIGTERM must wait for it, and some seconds more, before SIGKILL
    )
    vllm_args: tuple[str, ...] = ()
    form: Form = ITS_OWN  # of the versions that its engine is started for (forms.py)

    def __post_init__(self) -> None:
        check_vllm_args(self.vllm_args)
        if self.trust:
            _check_trust(self.trust)
        if not self.instance_id:
            object.__setattr__(self, "instance_id", default_instance_id())
        try:
            Keys(self.model).instance(self.instance_id)
        except RecordError as error:
            raise ConfigError(f"--model {self.model}, --instance-id {self.instance_id}: {error}") from None
        if self.kv_cache_gib is not None and self.kv_cache_gib <= 0:
            raise ConfigError(f"--kv-cache-gib {self.kv_cache_gib:g}: must be more than 0.")
        if self.drain_s < 0:
            raise ConfigError(f"--drain {self.drain_s:g}: must not be negative.")
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
        """The instance's address in its record, to which gateways connect."""
        return url_of(self.advertise or self.host, port, "http" if self.cluster_tls is None else "https")

    def vllm_argv(self, *, cpu: bool, port: int) -> list[str]:
        """The command line vLLM's own parser gets: weights arrive through the checkpoint engine, so none are loaded."""
        argv = ["--model", str(self.model_dir), "--served-model-name", self.model]
        argv += ["--host", self.host, "--port", str(port), "--load-format", "dummy"]
        argv += ["--weight-transfer-config", '{"backend": "hotswap"}']
        argv += ["--worker-extension-cls", "weightsync.vllm_engine.backend.WorkerMethods"]
        argv += ["--disable-uvicorn-access-log", "--scheduling-policy", "priority"]
        argv += ["--dp-sync-interval", "4"]  # steps: ranks that share experts flip only there (engine_core/steps.py)
        argv += ["--enable-scale-out"]  # routes that the gateway forwards from its admin port
        if not any(argument.startswith("--kv-events-config") for argument in self.vllm_args):
            argv += ["--kv-events-config", '{"enable_kv_cache_events": true, "publisher": "null"}']  # prefixes.py
        argv += ["--headless"] if self.headless else []
        if (directory := self.form.config_dir) is not None:
            argv += ["--hf-config-path", str(directory), "--generation-config", str(directory)]
            template = directory / "chat_template.jinja"
            argv += ["--chat-template", str(template)] if template.exists() else []
        argv += ["--enforce-eager"] if cpu else []
        if (gib := self.kv_cache_gib or (CPU_KV_CACHE_GIB if cpu else None)) is not None:
            argv += ["--kv-cache-memory-bytes", str(int(gib * 2**30))]  # of an option given again the last one counts
        return [*argv, *self.vllm_args]


def default_instance_id() -> str:
    """Host name and process id: unique among live instances, and it says where to look."""
    return f"{socket.gethostname()}-{os.getpid()}"


_CORS = "the gateway answers pages of other sites; name each of them with --allow-origin"
_TLS = "give it to `hotswap gateway`, which serves TLS (docs/security.md); instances use --cluster-tls"
_DOOR = "clients never reach an instance: set limits of the gateway, or put a proxy in front of it (docs/gateway.md)"
_OURS = "hotswap sets it: weights come as versions (docs/architecture.md)"
_INSTEAD = {
    "--api-key": "put keys into a file and give --api-key-file FILE, or make them with `hotswap keys create`",
    "--allowed-origins": _CORS,
    "--allowed-methods": _CORS,
    "--allowed-headers": _CORS,
    "--allow-credentials": _CORS,
    "--ssl-keyfile": _TLS,
    "--ssl-certfile": _TLS,
    "--ssl-ca-certs": _TLS,
    "--ssl-cert-reqs": _TLS,
    "--ssl-ciphers": _TLS,
    "--enable-ssl-refresh": _TLS,
    "--root-path": _DOOR,
    "--middleware": _DOOR,
    "--uds": _DOOR,
    "--h11-max-incomplete-event-size": _DOOR,
    "--h11-max-header-count": _DOOR,
    "--disable-fastapi-docs": "the gateway has no such pages; /openapi.json is its own",
    "--enable-offline-docs": "the gateway has no such pages; /openapi.json is its own",
    "--enable-request-id-headers": "leave it out: every answer of the gateway has x-request-id",
    "--uvicorn-log-level": "use --log-format; the gateway writes the access log (docs/gateway.md)",
    "--disable-access-log-for-endpoints": "use --log-format; the gateway writes the access log (docs/gateway.md)",
    "--served-model-name": "use --name",
    "--model-tag": "use --model",
    "--config": "write the options on the command line",
    "--grpc": "only HTTP is served",
    "--grpc-port": "only HTTP is served",
    "--tokens-only": "leave it out: POST /generate and, on the admin port, /inference/v1/generate take tokens",
    "--api-server-count": "start more instances instead, with --instances",
    "--data-parallel-supervisor-port": "start more instances instead, with --instances",
    "--load-format": _OURS,
    "--weight-transfer-config": _OURS,
    "--worker-extension-cls": _OURS,
}


def check_vllm_args(vllm_args: Sequence[str]) -> None:
    """Raises ConfigError for the first option that is not vLLM's affair here; vLLM also takes their beginnings."""
    for argument in vllm_args:
        name = argument.partition("=")[0].replace("_", "-")
        if not name.startswith("--") or name == "--":
            continue
        meant = name if name in _INSTEAD else next((known for known in _INSTEAD if known.startswith(name)), None)
        if meant is not None:
            raise ConfigError(f"{argument.partition('=')[0]} of vLLM is not taken here: {_INSTEAD[meant]}.")


def parse_vllm_args(config: InstanceConfig, port: int) -> Any:
    """vLLM's own namespace of settings for this instance. Raises ConfigError."""
    from vllm.platforms import current_platform

    args = vllm_parser().parse_args(config.vllm_argv(cpu=current_platform.is_cpu(), port=port))
    find("validate_parsed_serve_args")(args)
    return args


def vllm_parser() -> Any:
    """vLLM's own parser. Where vLLM would print its usage and exit, it raises ConfigError in one line."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise ConfigError(f"vLLM: {message}{self._meant(message)}")

        def _meant(self, message: str) -> str:
            """The option that is most like the one it does not know."""
            unknown = next((word for word in message.split() if word.startswith("--")), "")
            known = [name for action in self._actions for name in action.option_strings]
            close = difflib.get_close_matches(unknown.partition("=")[0], known, 1) if "unrecognized" in message else []
            return f"; did you mean {close[0]}?" if close else ""

    return find("make_arg_parser")(Parser(prog="hotswap instance"))


def _check_trust(paths: tuple[Path, ...]) -> None:
    """Raises ConfigError for what is no key."""
    from weightsync.errors import WeightSyncError
    from weightsync.signing import Trust

    try:
        Trust(paths)
    except WeightSyncError as error:
        raise ConfigError(f"--trust {error}.") from error
