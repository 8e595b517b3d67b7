"""One instance on several hosts: vLLM's options for it, and what runs on the hosts beside the leader's."""

from __future__ import annotations

import os
from typing import Any, NoReturn

from server.errors import ConfigError
from weightsync.hosts import HOST_ENV, this_host
from weightsync.tls import ENVIRONMENT, ClusterTls

from .config import InstanceConfig


def check_nodes(args: Any, *, headless: bool) -> None:
    """`args`: vLLM's. Raises ConfigError: options that do not make one instance of several hosts."""
    if headless and (args.nnodes < 2 or args.node_rank == 0):
        raise ConfigError(
            "--headless is for the hosts beside the leader's: give --nnodes N, --node-rank R from 1 on, and "
            "--master-addr with the leader's address (docs/multinode.md)."
        )
    if not headless and args.node_rank != 0:
        raise ConfigError(f"--node-rank {args.node_rank}: the host of rank 0 leads; give --headless on all others.")
    if args.nnodes > 1 and args.data_parallel_size > 1:
        raise ConfigError("--data-parallel-size with --nnodes: run an instance for each of them instead.")
    if args.nnodes > 1 and not this_host():
        raise ConfigError(f"--nnodes {args.nnodes}: set {HOST_ENV} on each host, and run `hotswap peer` there.")


def run_follower(config: InstanceConfig) -> NoReturn:
    """vLLM's workers of this host until SIGTERM, or until they or the leader end, which is an exit with status 1.

    Raises ConfigError, TlsUnavailable.
    """
    if config.cluster_tls is not None:  # where the workers, processes of their own, look for it
        ClusterTls(config.cluster_tls)
        os.environ[ENVIRONMENT] = str(config.cluster_tls)
    from vllm.entrypoints.cli.serve import run_headless

    from .options import parse

    args = parse(config, config.port)
    check_nodes(args, headless=True)
    args.api_server_count = 0
    run_headless(args)
    raise SystemExit("the workers of this host have ended, and with them their instance: start all of its hosts anew")
