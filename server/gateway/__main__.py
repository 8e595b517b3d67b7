"""`python -m server.gateway`, which `hotswap gateway` is."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace

from server import options
from server.errors import ConfigError
from server.gateway.config import OPTIONS, GatewayConfig
from server.gateway.workers import Place
from weightsync.errors import StoreError, TlsUnavailable


def configured(argv: Sequence[str], worker: Place | None = None) -> GatewayConfig:
    """Checked settings. Raises ConfigError. The admin key itself is taken from the environment, never from argv."""
    about = "The public port in front of the instances."
    given = options.parse(OPTIONS, argv, options.arguments(OPTIONS, prog="hotswap gateway", description=about))
    admin_key = os.environ.get("HOTSWAP_ADMIN_KEY") or None
    config = options.build(GatewayConfig, given, admin_key=admin_key, worker=worker)
    return config if worker is None or worker.leads else replace(config, run_coordinator=False)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs a gateway until it is told to stop. A setting that cannot work ends it with one line and status 2."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        config = configured(argv, Place.taken())
        from server.gateway.main import run

        run(config, argv)
    except (ConfigError, StoreError, TlsUnavailable) as exc:
        print(f"hotswap gateway: {exc}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:  # uvicorn has shut down in order and hands the signal on
        sys.exit(130)


if __name__ == "__main__":
    main()
