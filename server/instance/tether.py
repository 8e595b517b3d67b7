"""The leader's end of the connections that its workers on other hosts hold, by which each notices the other's end.

What is said on them is written down beside the other end, `weightsync/vllm_engine/tether.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import secrets
from collections.abc import AsyncIterator
from dataclasses import asdict

from server.errors import ConfigError
from weightsync.hosts import this_host
from weightsync.tls import ClusterTls, is_loopback
from weightsync.vllm_engine.tether import HELD, Tether, watch_for_loss

log = logging.getLogger("hotswap.instance")
HELLO_S = 10.0  # for a worker to say who it is, from the connection on


class Tethers:
    """Who is connected. `lost` says who was and is not any more; it stays the first one."""

    def __init__(self) -> None:
        self.lost: str | None = None
        self.held: set[str] = set()
        self._token = secrets.token_hex(16)
        self._tasks: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def listening(self, nodes: int, tls: ClusterTls | None) -> AsyncIterator[dict[str, object]]:
        """What to give to the workers, {} on one host; while the context is open they can connect.

        The address is the one where vLLM's own queues are reached. Raises ConfigError.
        """
        if nodes == 1:
            yield {}
            return
        address = own_address()
        if tls is None and not is_loopback(address):
            raise ConfigError(
                f"workers on other hosts reach this one at {address}, beyond loopback: give --cluster-tls DIR on every "
                "host of the instance (docs/multinode.md)."
            )
        server = await self._listen(address, tls)
        try:
            port = int(server.sockets[0].getsockname()[1])
            yield asdict(Tether(this_host(), address, port, tls is not None, self._token))
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _listen(self, address: str, tls: ClusterTls | None) -> asyncio.Server:
        """Raises ConfigError."""
        context = tls.server_context() if tls is not None else None
        try:
            return await asyncio.start_server(self._accept, address, 0, ssl=context)
        except OSError as error:
            raise ConfigError(
                f"workers on other hosts could not reach this one at {address} ({error.strerror or error}): set "
                "VLLM_HOST_IP to an address of this host (docs/multinode.md)."
            ) from error

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._hold(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _hold(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(HELLO_S):
                who = self._name(await reader.readline())
            if who is None:
                return
            watch_for_loss(writer.get_extra_info("socket"))
            self.held.add(who)
            writer.write(HELD)
            with contextlib.suppress(OSError):
                await reader.read()
            self.held.discard(who)
            log.error("%s has ended, or cannot be reached", who)
            self.lost = self.lost or who
        except (TimeoutError, ValueError, OSError, RecursionError) as error:  # the last one: brackets without end
            log.warning("a connection that is no worker's was closed: %s", error or type(error).__name__)
        finally:
            writer.close()

    def _name(self, line: bytes) -> str | None:
        """Who says `line`; None if it is nobody that was given the token. Raises ValueError."""
        said = json.loads(line or b"{}")
        if not isinstance(said, dict) or not hmac.compare_digest(str(said.get("token")).encode(), self._token.encode()):
            return None
        return f"rank {said.get('rank')} on host {said.get('host')}"


def own_address() -> str:
    """What vLLM tells the other hosts of this one: $VLLM_HOST_IP, or that of the way out."""
    from vllm.utils.network_utils import get_ip

    return str(get_ip())
