"""vLLM's options that are the affair of the gateway or the checkpoint engine: refused, with what to use instead.

An instance answers the gateway alone, so what would change its door has no effect on clients, or shuts the gateway out.
Importable without vLLM: a command refuses at once, before anything is started.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from server.errors import ConfigError

if TYPE_CHECKING:
    from server.instance.config import InstanceConfig

_CORS = "no page of another site may ask the gateway; answer CORS in a proxy in front of it"
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


def check(vllm_args: Sequence[str]) -> None:
    """Raises ConfigError for the first option that is not vLLM's affair here; vLLM also takes their beginnings."""
    for argument in vllm_args:
        name = argument.partition("=")[0].replace("_", "-")
        if not name.startswith("--") or name == "--":
            continue
        meant = name if name in _INSTEAD else next((known for known in _INSTEAD if known.startswith(name)), None)
        if meant is not None:
            raise ConfigError(f"{argument.partition('=')[0]} of vLLM is not taken here: {_INSTEAD[meant]}.")


def parse(config: InstanceConfig, port: int) -> Any:
    """vLLM's own namespace of settings for this instance. Raises ConfigError."""
    from vllm.entrypoints.launchers.cli_args import validate_parsed_serve_args
    from vllm.platforms import current_platform

    args = parser().parse_args(config.vllm_argv(cpu=current_platform.is_cpu(), port=port))
    validate_parsed_serve_args(args)
    return args


def parser() -> Any:
    """vLLM's own parser. Where vLLM would print its usage and exit, it raises ConfigError in one line."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
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

    return make_arg_parser(Parser(prog="hotswap instance"))
