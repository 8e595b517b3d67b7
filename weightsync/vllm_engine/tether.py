"""The worker's end of a connection to its leader on another host, by which each notices the other's end.

vLLM's own queues between hosts do not: a worker whose leader has died waits for its next command, and a leader for the
answer of a dead worker, without end. The leader's end is `server/instance/hosts.py`.

    worker -> leader   one line of JSON: {"token", "rank", "host"}
    leader -> worker   "held\\n"; nothing else ever
    end of file        the other process, or its host, is gone
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import threading
import time
from dataclasses import dataclass, field

from weightsync.errors import EngineError, TlsUnavailable
from weightsync.tls import ENVIRONMENT, ClusterTls

log = logging.getLogger("hotswap.tether")
HELD = b"held\n"
CONNECT_S = 30.0
GRACE_S = 10.0  # for vLLM's worker to end by itself; what hangs in a collective operation does not
PROBES = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 5, "TCP_USER_TIMEOUT": 15_000}  # s, s, probes, ms


@dataclass(frozen=True)
class Tether:
    """The address of the leader's end. `host`: the leader's; `tls`: members alone are let in."""

    host: str
    address: str
    port: int
    tls: bool
    token: str = field(repr=False)


def hold(tether: Tether, rank: int, host: str) -> None:
    """Connect; from then on this process ends when the leader does. Raises EngineError, TlsUnavailable."""
    try:
        connection = _connected(tether)
        connection.sendall(json.dumps({"token": tether.token, "rank": rank, "host": host}).encode() + b"\n")
        answer = connection.recv(len(HELD))
    except OSError as error:
        raise _failed(host, tether, str(error)) from error
    if answer != HELD:
        connection.close()
        raise _failed(host, tether, "it did not take this worker")
    connection.settimeout(None)
    threading.Thread(target=_end_with, args=(connection,), name="hotswap-tether", daemon=True).start()


def _failed(host: str, tether: Tether, reason: str) -> EngineError:
    """A worker could not connect to the leader of its instance."""
    message = (
        f"the worker on host {host} cannot reach its leader at {tether.address}:{tether.port} ({reason}): set "
        "VLLM_HOST_IP there to an address that this host reaches, on any port"
    )
    return EngineError(message, code="tether_failed")


def watch_for_loss(connection: socket.socket) -> None:
    """Have the kernel notice a host that is gone without a word, after about a quarter of a minute."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in PROBES.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _connected(tether: Tether) -> socket.socket:
    plain = socket.create_connection((tether.address, tether.port), timeout=CONNECT_S)
    watch_for_loss(plain)
    if not tether.tls:
        return plain
    tls = ClusterTls.of_environment()
    if tls is None:
        plain.close()
        raise TlsUnavailable("", "the leader of this instance takes members alone", f"Set {ENVIRONMENT} here, too")
    return tls.client_context().wrap_socket(plain)


def _end_with(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while connection.recv(4096):
            pass
    log.error("the leader of this instance has ended, or cannot be reached; this worker ends too")
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os._exit(1)
