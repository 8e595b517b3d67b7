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
NAMELESS = "'s host has no name", "Set HOTSWAP_HOST there, or leave it out where one host has all ranks"
SILENT = (
    ", one of several hosts', cannot pass on its share of a version",
    "Set HOTSWAP_CLUSTER_TLS and, if need be, HOTSWAP_ADDRESS on every host, or leave publish out",
)


class SeveralHosts:
    """`one` when all ranks share a host: then nothing is opened, and nothing of this is needed.

    A host is a start of a kernel and a HOTSWAP_HOST. All methods but `close` are collective.
    """

    def __init__(self, config: PublishConfig, schema: Schema) -> None:
        """Raises ConfigError when a rank's host has no proper name, or it cannot open its transport."""
        found = gather_json(_host())
        lead(lambda: check([host["problem"] for host in found], NAMELESS))
        hosts = [host["name"] for host in found]
        self._rank = int(dist.get_rank())
        self._beside = [rank for rank, host in enumerate(hosts) if host == hosts[0]]
        self.one, self.beside = len(self._beside) == len(hosts), self._rank in self._beside
        self._transport: Transport | None = None
        self.share: weightsync.Share | None = None
        self._collector: weightsync.Collector | None = None
        if not self.one:
            problems = gather_json(self._open(config, schema))
            lead(lambda: check(problems, SILENT))

    def bring(self, writer: Any, problem: str) -> str:
        """Shares of ranks elsewhere into the slot, unless a rank has a problem; returns this rank's.

        They must stay as they are until all ranks have been here: let nobody write again before another collective.
        """
        problem, offer = self._offer(problem)
        told = gather_json({"problem": problem, "offer": offer})
        if any(rank["problem"] for rank in told) or self._collector is None:
            return problem
        elsewhere = [rank["offer"] for rank in told if rank["offer"] is not None]
        try:
            for offer in elsewhere[self._beside.index(self._rank) :: len(self._beside)]:
                self._collector.collect(offer, writer)
        except WeightSyncError as error:
            return str(error)
        return ""

    def _offer(self, problem: str) -> tuple[str, dict[str, Any] | None]:
        """This rank's problem, and what others may read of it."""
        if self.share is None:
            return problem, None
        if problem:
            self.share.discard()
            return problem, None
        try:
            return "", self.share.seal()
        except WeightSyncError as error:
            return str(error), None

    def close(self) -> None:
        for opened in (self._collector, self.share, self._transport):
            if opened is not None:
                opened.close()

    def _open(self, config: PublishConfig, schema: Schema) -> str:
        try:
            self._transport = open_transport(config.transport, listen=address(), tls=ClusterTls.of_environment())
        except (WeightSyncError, ValueError, OSError) as error:  # the last one: there is no way to the first host
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


def check(problems: Sequence[str], why: tuple[str, str]) -> None:
    """What kept each rank from taking part. Raises ConfigError for the first that is not empty."""
    what, advice = why
    for rank, problem in enumerate(problems):
        if problem:
            raise ConfigError("publish", f"rank {rank}{what} ({problem})", advice)


def _host() -> dict[str, Any]:
    try:
        return {"name": [_boot(), this_host()], "problem": ""}
    except WeightSyncError as error:
        return {"name": [], "problem": str(error)}


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()
