"""Ranks meet at a store that listens on one address: those of one host on loopback, others on their launcher's node.

torchrun's own listens on every address, and whoever reaches it may read and write what ranks tell each other. It takes
a listening socket instead of making one, though, and agents of one host have nobody to wait for.
"""

from __future__ import annotations

import socket
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

BACKEND = "hotswap-loopback"
ADDRESS = "127.0.0.1"
PATIENCE_S = 60.0  # of one operation on the store


class Loopback(RendezvousHandler):  # type: ignore[misc]
    """The rendezvous of one agent with itself. Its store outlives the ranks that are started anew."""

    def __init__(self, run_id: str) -> None:
        self._store, self._where = listening_store(ADDRESS)
        self._run_id, self._round = run_id, 0

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """Ranks use this very store."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """One more start of the ranks."""
        self._round += 1
        return RendezvousInfo(PrefixStore(f"{self._run_id}/{self._round}", self._store), 0, 1, self._where)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """No other agent could join."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


def listening_store(address: str) -> tuple[TCPStore, RendezvousStoreInfo]:
    """A store for ranks to meet at, which listens on that address alone, and where it is. It lives with its process."""
    listener = socket.create_server((address, 0))
    port = listener.getsockname()[1]
    store = TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=PATIENCE_S),
        master_listen_fd=listener.detach(),  # the store closes it
    )
    return store, RendezvousStoreInfo(address, port)


def register() -> str:
    """Make it known to torchrun's agent; the name to give it."""
    rendezvous_handler_registry.register(BACKEND, _create)
    return BACKEND


def _create(parameters: RendezvousParameters) -> Loopback:
    return Loopback(parameters.run_id)
