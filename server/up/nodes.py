"""Instances of `hotswap up --ray` on the nodes of a Ray cluster, each with a peer that brings it versions.

Gateway, publication, copies on disk and a peer stay where `up` runs, which is a node of the cluster too. A bundle of
the placement group is an instance's; the peer beside it takes nothing of it. Where two instances are on one node the
second peer stands by (weightsync/peer).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from server.errors import CliError, as_cli_error
from server.gpus import tensor_parallel
from server.up.config import UpConfig
from server.up.processes import BIND_ENV, cause_in
from server.up.served import Served
from weightsync import ray_cluster
from weightsync.control.hosts import HOST_ENV
from weightsync.errors import WeightSyncError
from weightsync.ray_cluster import ADDRESS, Group, Node, NodeProcess
from weightsync.tls import ENVIRONMENT as TLS_ENV
from weightsync.tls import is_loopback

PASSED_ON = ("HOTSWAP_CLUSTER_TLS", "HOTSWAP_ETCD_PASSWORD_FILE", "HOTSWAP_RACK", "VLLM_", "OTEL_")


class NodeChild(NodeProcess):
    """A process on another node, in place of a `Child`: its log comes here."""

    log: Path

    def tail(self, lines: int = 15) -> str:
        """The end of its log, for an error message."""
        if self.node is None and self.returncode is None:
            return "no node of the cluster has room for it; `ray status` shows what it waits for"
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "\n".join(text.splitlines()[-lines:])

    def cause(self) -> str:
        """The last error in its log, as `cause_in`."""
        return cause_in(self.log)

    def stop(self, grace_s: float = 10.0) -> None:
        super().stop(grace_s)


class Nodes:
    """The cluster. Raises CliError."""

    def __init__(self, config: UpConfig, models: Sequence[Served], logs: Path) -> None:
        assert config.ray is not None
        self._logs = logs
        with as_cli_error(WeightSyncError):
            self.local: Node = ray_cluster.connect(config.ray)
        os.environ[HOST_ENV] = self.local.host
        if not is_loopback(self.local.address) and TLS_ENV not in os.environ:
            self.close()
            raise CliError(
                f"--ray: nodes reach each other at {self.local.address}, and beyond loopback they need mutual TLS; "
                f"set {TLS_ENV} to a directory that is on every node (docs/security.md)"
            )
        has_gpus = ray_cluster.has_gpus()
        asked = ray_cluster.parse_bundle(config.ray_bundle) if config.ray_bundle is not None else None
        bundles = [asked or _by_ranks(m, has_gpus) for m in models for _ in range(m.instances)]
        self._group = Group(bundles, config.ray_strategy)
        self._env = ray_cluster.passed_on(os.environ, PASSED_ON)

    def start(
        self, bundle: int, store: str, model: Served, index: int, instance_args: Sequence[str]
    ) -> dict[str, NodeChild]:
        """The `index`-th instance of a model in a bundle, and its peer."""
        instance = [*instance_args, "--host", ADDRESS]
        names = [f"{model.named(what)}-{index}" for what in ("peer", "instance")]
        peer = self._child(names[0], self.peer_args(store, model.name, ADDRESS), bundle, self._env, whole=False)
        env = dict(self._env)
        if tensor_parallel(model.vllm_args) == 1:  # Ray says how many threads; which cores is the scheduler's affair
            env.setdefault(BIND_ENV, "nobind")
        return {peer.name: peer} | {names[1]: self._child(names[1], instance, bundle, env)}

    def peer_args(self, store: str, model: str, address: str | None = None) -> list[str]:
        """The command of a peer, this node's unless an address is given."""
        listen = f"{address or self.local.address}:0"
        return ["weightsync.peer", "--store", store, "--model", model, "--listen", listen, "--log-level", "warning"]

    def close(self) -> None:
        """Leave the cluster; what is left there ends."""
        ray_cluster.disconnect()

    def _child(
        self, name: str, args: Sequence[str], bundle: int, env: Mapping[str, str], whole: bool = True
    ) -> NodeChild:
        log = self._logs / f"{name}.log"

        def printed(out: bytes, err: bytes) -> None:
            with log.open("ab") as file:
                file.write(out + err)

        child = NodeChild(name, args, env, self._group, bundle, printed=printed, say=_say, whole=whole)
        child.log = log
        return child


def _by_ranks(model: Served, has_gpus: bool) -> dict[str, float]:
    ranks = float(tensor_parallel(model.vllm_args))
    return {"CPU": ranks} | ({"GPU": ranks} if has_gpus else {})


def _say(line: str) -> None:
    print(f"hotswap: {line}", file=sys.stderr)
