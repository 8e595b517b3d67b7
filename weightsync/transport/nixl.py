"""NIXL with its UCX backend, in a process of its own."""

from __future__ import annotations

import importlib
import os
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec

from weightsync.transport.addresses import interface_of
from weightsync.transport.engine import EngineError, Settings

BACKEND = "UCX"
MEMORY = "DRAM"
MODULES = ("nixl_cu13", "nixl_cu12")  # `nixl` itself is only the choice between the two


class Remote(msgspec.Struct, frozen=True):
    """NIXL's description of one region and the way to it, and the address where the region begins."""

    agent: str
    metadata: bytes
    address: int


class NixlEngine:
    """As Engine."""

    def __init__(self, settings: Settings) -> None:
        _configure(settings)
        library = _library()
        self._agent = library.nixl_agent(f"hotswap-{uuid.uuid4()}", library.nixl_agent_config(backends=[BACKEND]))
        if BACKEND not in self._agent.backends:
            raise EngineError("NIXL has no UCX backend here")
        self._regions: dict[int, Any] = {}
        self._known: set[Remote] = set()
        self.endpoint = settings.host.encode()

    def register(self, address: int, nbytes: int) -> bytes:
        try:
            region = self._agent.register_memory([(address, nbytes, 0, "")], MEMORY, backends=[BACKEND])
        except Exception as error:  # the library's own classes, which need it to be imported
            raise EngineError(f"NIXL does not register {nbytes:,} bytes ({error}): allow more locked memory") from error
        self._regions[address] = region
        metadata = self._agent.get_partial_agent_metadata(region, True, [BACKEND])
        return msgspec.msgpack.encode(Remote(self._agent.name, metadata, address))

    def forget(self, address: int, nbytes: int) -> None:
        self._agent.deregister_memory(self._regions.pop(address), [BACKEND])

    def read(self, endpoint: bytes, remote: bytes, pieces: Sequence[tuple[int, int, int]]) -> NixlReading:
        region = msgspec.msgpack.decode(remote, type=Remote)
        try:
            self._learn(region)
            return NixlReading(self._agent, region, pieces)
        except Exception as error:
            raise EngineError(f"{type(error).__name__}: {error}") from error

    def _learn(self, region: Remote) -> None:
        """A region that lies where another of that agent lay is refused at first: then forget what lay there."""
        if region in self._known:
            return
        try:
            self._agent.add_remote_agent(region.metadata)
        except Exception:
            self._agent.remove_remote_agent(region.agent)
            self._known = {known for known in self._known if known.agent != region.agent}
            self._agent.add_remote_agent(region.metadata)
        self._known.add(region)


class NixlReading:
    """As Reading."""

    def __init__(self, agent: Any, region: Remote, pieces: Sequence[tuple[int, int, int]]) -> None:
        import numpy as np

        local = np.array([(at, nbytes, 0) for at, _, nbytes in pieces], np.uint64)
        remote = np.array([(region.address + offset, nbytes, 0) for _, offset, nbytes in pieces], np.uint64)
        self._agent = agent
        self._handle = agent.initialize_xfer(
            "READ", agent.get_xfer_descs(local, MEMORY), agent.get_xfer_descs(remote, MEMORY), region.agent
        )
        self._state = agent.transfer(self._handle)

    def done(self) -> bool:
        try:
            if self._state == "PROC":
                self._state = self._agent.check_xfer_state(self._handle)
            if self._state == "DONE":
                self._agent.release_xfer_handle(self._handle)
        except Exception as error:
            raise EngineError(f"{type(error).__name__}: {error}") from error
        if self._state not in ("PROC", "DONE"):
            raise EngineError(f"NIXL says {self._state}")
        return bool(self._state == "DONE")


def _configure(settings: Settings) -> None:
    """Before UCX is loaded. What the environment says already, stays."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
    os.environ.setdefault("UCX_LOG_LEVEL", "fatal")
    # Never another process's memory directly: containers of one host have different process numbers.
    os.environ.setdefault("UCX_TLS", "ib,tcp" if settings.rdma else "tcp")
    if not settings.rdma and (interface := interface_of(settings.host)) is not None:
        os.environ.setdefault("UCX_NET_DEVICES", interface)


def _library() -> Any:
    for name in MODULES:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            continue
    raise ModuleNotFoundError("No module named 'nixl_cu12'")
