"""Ranks on several hosts publish one version: where each writes, and what moves to the host of rank 0.

Ranks of other hosts than rank 0's write into a slot of their own host (`weightsync.publish.spread`). If the host's peer
takes up what is written there (`Publisher.share_hosts`), most of it stays. On any other host the slot is in memory of
its first rank, and ranks beside the slot of rank 0 read all of it.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

import weightsync
from trainer.config import PublishConfig
from trainer.errors import ConfigError
from trainer.megatron.parallel import broadcast_json, gather_json, on_rank_zero
from weightsync.control.hosts import this_host
from weightsync.errors import PublishError, WeightSyncError
from weightsync.format.manifest import Schema
from weightsync.peer.shelf import Regions
from weightsync.publish.spread import Gatherer, HostShare, MemorySlot
from weightsync.publish.writer import SealedPart
from weightsync.tls import ClusterTls
from weightsync.transport import Transport, open_transport

log = logging.getLogger("hotswap.trainer")

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

    def __init__(self, config: PublishConfig) -> None:
        """Raises ConfigError when a rank's host has no proper name, or it cannot open its transport."""
        found = gather_json(_host())
        on_rank_zero(lambda: check([host["problem"] for host in found], NAMELESS))
        self._names = [tuple(host["name"]) for host in found]
        self._rank, self._model = int(dist.get_rank()), config.model
        self._beside = [rank for rank, name in enumerate(self._names) if name == self._names[0]]
        self.one, self.beside = len(self._beside) == len(found), self._rank in self._beside
        self._transport: Transport | None = None
        self._memory: MemorySlot | None = None
        self._slot: HostShare | None = None  # of this rank's host, on the first rank there
        self.shares: dict[str, dict[str, Any]] = {}  # what stays on other hosts, for `Draft.spread`
        self.part: SealedPart | None = None  # what ranks of this host wrote of which nothing stays, on the first rank
        if not self.one:
            problems = gather_json(self._open(config))
            on_rank_zero(lambda: check(problems, SILENT))

    def carry(self, schema: Schema) -> None:
        """Take the schema of the versions: called once, before anything is written."""
        self._schema = schema
        if self._transport is None:
            return
        self._regions = Regions(self._transport)
        self._gatherer = Gatherer(self._transport, self._regions)

    def writer(self, ticket: Mapping[str, Any], places: Mapping[str, str], kept: Sequence[str]) -> Any:
        """The writer of this rank, if it is not rank 0. `places` are the directories of slots on hosts that keep
        what is written there, `kept` versions that stay there. Raises WeightSyncError, after all ranks have been
        here."""
        self.shares, self.part = {}, None
        if not self.one:
            told = gather_json(self._claim(ticket, places, kept))
            if not self.beside:
                ticket = told[self._first]
                if "problem" in ticket:
                    raise PublishError(ticket["problem"])
        return weightsync.join({**ticket, "slot": Path(ticket["slot"])}, self._rank) if self._rank else None

    @property
    def _name(self) -> str:
        return str(self._names[self._rank][1])

    @property
    def _first(self) -> int:
        """The first rank of this rank's host."""
        return self._names.index(self._names[self._rank])

    def _claim(
        self, ticket: Mapping[str, Any], places: Mapping[str, str], kept: Sequence[str]
    ) -> dict[str, Any] | None:
        """The ticket to a slot on this host, or the problem with it, on its first rank: a slot that stays there, or one
        in memory."""
        self.close_slot()
        if self.beside or self._first != self._rank:
            return None
        is_one = len({name for name in self._names if name[1] == self._name}) == 1  # not two machines of one name
        if is_one and self._name in places:
            try:
                return self._opened(places[self._name], ticket["version"], kept)
            except (WeightSyncError, OSError) as error:
                log.warning("host %s sends all of its share to the first host: %s", self._name, error)
        try:
            self._memory = self._memory or MemorySlot(self._schema)
            return self._opened(self._memory, ticket["version"], kept)
        except (WeightSyncError, OSError) as error:
            return {"problem": f"host {self._name} has no memory for a share: {error}"}

    def _opened(self, where: str | MemorySlot, version: int, kept: Sequence[str]) -> dict[str, Any]:
        self._slot = HostShare(where, self._model, version, self._schema, kept)
        return self._slot.ticket

    def bring(self, writer: Any, problem: str) -> str:
        """Copy to rank 0's slot what does not stay on other hosts, unless a rank has a problem; returns this rank's.

        Shares must stay as they are until all ranks have been here: let nobody write again before another collective.
        """
        part: SealedPart | None = None
        if not self.beside and isinstance(writer, weightsync.SlotWriter):
            if problem:
                writer.release()
            else:
                part = writer.seal()
        told = gather_json({"problem": problem, "part": part})
        if any(rank["problem"] for rank in told):
            return problem
        problem, settled = self._settled([rank["part"] for rank in told])
        found = gather_json({"problem": problem, "settled": settled})
        if any(rank["problem"] for rank in found):
            return problem
        rests: list[Any] = []
        for rank, (part, rest) in ((n, rank["settled"]) for n, rank in enumerate(found) if rank["settled"]):
            rests.append(rest)
            if part is not None:
                self.shares[self._names[rank][1]] = part
        if not self.beside:
            return ""
        try:
            for rest in rests[self._beside.index(self._rank) :: len(self._beside)]:
                self._gatherer.gather(rest, writer)
        except WeightSyncError as error:
            return str(error)
        return ""

    def _settled(self, parts: list[SealedPart | None]) -> tuple[str, Any]:
        """On the first rank of a host with a slot: its problem, or what stays there, and what is to be read."""
        if self._slot is None or self._transport is None:
            return "", None
        mine = [part for part, name in zip(parts, self._names, strict=True) if name == self._names[self._rank] and part]
        try:
            part, rest = self._slot.settle(mine, self._regions, self._transport.endpoint)
        except WeightSyncError as error:
            return str(error), None
        if self._slot.stays:
            return "", (part, rest)
        self.part = part
        return "", (None, rest)

    def accept(self, manifest: str | None) -> str:
        """Have the hosts with shares leave them to their peers; what kept one of them from it, on rank 0. `manifest` is
        what `Draft.spread` gave there, None without shares."""
        manifest, problem = broadcast_json(manifest), ""
        if manifest is None:
            return ""
        try:
            if self._slot is not None:
                self._slot.accept(manifest.encode())
        except (WeightSyncError, OSError) as error:
            problem = f"host {self._name} could not keep its share: {error}"
        return next(filter(None, gather_json(problem)), "")

    def close_slot(self) -> None:
        """Let go of the last version's slot, whatever has become of the version. Not collective."""
        if self._slot is not None:
            self._slot.close()
            self._slot = None

    def close(self) -> None:
        self.close_slot()
        for opened in (self._memory, self._transport):
            if opened is not None:
                opened.close()

    def _open(self, config: PublishConfig) -> str:
        try:
            self._transport = open_transport(config.transport, listen=address(), tls=ClusterTls.of_environment())
        except (WeightSyncError, ValueError, OSError) as error:  # the last one: there is no way to the first host
            return str(error)
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
    """Raises ConfigError for the first rank that has a problem. `why` is what the message says about it, and the
    advice."""
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
