"""What a Kubernetes Service does: a new connection goes to one of the ready gateways, and stays there while it is open.

A gateway becomes ready and unready by the chart's probe alone, and clients' connections follow a moment later.
Kubernetes takes a pod out as soon as it is deleted, so a gateway that stops is sent new connections for longer here.
"""

from __future__ import annotations

import asyncio
import random
import socket
from dataclasses import dataclass

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

PERIOD_S, TIMEOUT_S, FAILURES = 3.0, 3.0, 2  # the gateway's readinessProbe (k8s/hotswap/templates/gateway.yaml)
SPREAD_S = 1.0  # until every node has heard of a change
NAME = "gateway"  # what clients connect to


@dataclass
class Endpoint:
    """One gateway, as the kubelet sees it."""

    port: int
    ready: bool = False
    failures: int = 0

    def probed(self, well: bool) -> None:
        """One success makes it ready, FAILURES in a row make it unready."""
        self.failures = 0 if well else self.failures + 1
        if well or self.failures >= FAILURES:
            self.ready = well


class Service(AbstractResolver):
    """Resolves NAME to one of those that are ready, another one each time. `connections` counts how often it did."""

    def __init__(self) -> None:
        self._shown: dict[str, int] = {}
        self._probes: dict[str, asyncio.Task[None]] = {}
        self._chosen = random.Random(0)
        self.connections = 0

    @property
    def has_ready(self) -> bool:
        return bool(self._shown)

    def add(self, name: str, port: int) -> None:
        """A gateway was started: it gets connections once it is ready."""
        self._probes[name] = asyncio.create_task(self._follow(name, Endpoint(port)))

    def remove(self, name: str) -> None:
        """Its process has ended."""
        self._probes.pop(name).cancel()
        self.show(name, None)

    def show(self, name: str, port: int | None) -> None:
        """From now on connections go there, or (None) not there any more."""
        if port is None:
            self._shown.pop(name, None)
        else:
            self._shown[name] = port

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Raises OSError where no gateway is ready."""
        if not self._shown:
            raise OSError("no gateway is ready")
        self.connections += 1
        chosen = self._chosen.choice(list(self._shown.values()))
        return [
            ResolveResult(
                hostname=host,
                host="127.0.0.1",
                port=chosen,
                family=socket.AF_INET,
                proto=0,
                flags=socket.AI_NUMERICHOST,
            )
        ]

    async def close(self) -> None:
        """Sessions close their resolver; this one is shared, and ends with the process."""

    async def _follow(self, name: str, endpoint: Endpoint) -> None:
        loop, timeout = asyncio.get_running_loop(), aiohttp.ClientTimeout(TIMEOUT_S)
        connector = aiohttp.TCPConnector(force_close=True)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            while True:
                before = endpoint.ready
                endpoint.probed(await _well(session, endpoint.port))
                if endpoint.ready != before:
                    loop.call_later(SPREAD_S, self.show, name, endpoint.port if endpoint.ready else None)
                await asyncio.sleep(PERIOD_S)


async def _well(session: aiohttp.ClientSession, port: int) -> bool:
    try:
        async with session.get(f"http://127.0.0.1:{port}/readyz") as answer:
            return answer.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False
