"""Which ranks share the memory of rank 0's host, where versions are written, and how they get what the others have.

A rank on another host holds its share in memory of its own (`weightsync.Share`); each rank on rank 0's reads the shares
of some of them into the slot, over the transport that peers use.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

import weightsync
from trainer.config import PublishConfig
from trainer.errors import ConfigError
from trainer.megatron.parallel import gather_json, lead
from weightsync.errors import WeightSyncError
from weightsync.hosts import this_host
from weightsync.manifest import Schema
from weightsync.tls import ClusterTls
from weightsync.transport import Transport, open_transport

ADDRESS_ENV = "HOTSWAP_ADDRESS"


class SeveralHosts:
    """`one` when all ranks share a host: then nothing is opened, and nothing of this is needed.

    A host is a start of a kernel and a HOTSWAP_HOST. All methods but `close` are collective.
    """

    def __init__(self, config: PublishConfig, schema: Schema) -> None:
        """Raises ConfigError when a rank cannot open its transport."""
        hosts = gather_json([_boot(), this_host()])
        self._rank = int(dist.get_rank())
        self._beside = [rank for rank, host in enumerate(hosts) if host == hosts[0]]
        self.one, self.beside = len(self._beside) == len(hosts), self._rank in self._beside
        self._transport: Transport | None = None
        self.share: weightsync.Share | None = None
        self._collector: weightsync.Collector | None = None
        if not self.one:
            problems = gather_json(self._open(config, schema))
            lead(lambda: check(problems))

    def bring(self, writer: Any, problem: str) -> str:
        """Shares of ranks elsewhere into the slot, unless a rank has a problem; returns this rank's.

        They must stay as they are until all ranks have been here: let nobody write again before another collective.
        """
        told = gather_json({"problem": problem, "offer": self._offer(problem)})
        if any(rank["problem"] for rank in told) or self._collector is None:
            return problem
        elsewhere = [rank["offer"] for rank in told if rank["offer"] is not None]
        try:
            for offer in elsewhere[self._beside.index(self._rank) :: len(self._beside)]:
                self._collector.collect(offer, writer)
        except WeightSyncError as error:
            return str(error)
        return ""

    def _offer(self, problem: str) -> dict[str, Any] | None:
        if self.share is None:
            return None
        if not problem:
            return self.share.seal()
        self.share.discard()
        return None

    def close(self) -> None:
        for opened in (self._collector, self.share, self._transport):
            if opened is not None:
                opened.close()

    def _open(self, config: PublishConfig, schema: Schema) -> str:
        try:
            self._transport = open_transport(config.transport, listen=address(), tls=ClusterTls.of_environment())
        except (WeightSyncError, ValueError) as error:
            return str(error)
        if self.beside:
            self._collector = weightsync.Collector(self._transport)
        else:
            self.share = weightsync.Share(self._transport, schema)
        return ""


def address() -> str:
    """HOTSWAP_ADDRESS, or the address of this host from which it reaches the one where ranks meet."""
    if told := os.environ.get(ADDRESS_ENV):
        return told
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    family, _, _, _, where = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # nothing is sent
        probe.connect(where)
        return str(probe.getsockname()[0])


def check(problems: Sequence[str]) -> None:
    """What kept each rank from opening its transport. Raises ConfigError for the first that is not empty."""
    for rank, problem in enumerate(problems):
        if problem:
            what = f"rank {rank}, one of several hosts', cannot pass on its share of a version ({problem})"
            advice = "Set HOTSWAP_CLUSTER_TLS and, if need be, HOTSWAP_ADDRESS on every host, or leave publish out"
            raise ConfigError("publish", what, advice)


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()
