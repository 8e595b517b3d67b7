"""`python -m weightsync.peer`, which `hotswap peer` is: the peer of this host, until SIGTERM or SIGINT.

A second one for the same arena and model waits until the first has ended, and takes over.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from weightsync.control.arenas import ensure_arena
from weightsync.control.hosts import HOST_ENV, check_host
from weightsync.errors import WeightSyncError, bad_host_name
from weightsync.memory.arena import Arena
from weightsync.peer.control import PeerClient, listen
from weightsync.peer.service import Peer, running
from weightsync.peer.settings import Pace, PeerSettings
from weightsync.peer.shelf import lock_of
from weightsync.running import STORE_ENV
from weightsync.store import open_store
from weightsync.tls import ENVIRONMENT as TLS_ENV
from weightsync.tls import ClusterTls
from weightsync.transport import NAMES, open_transport
from weightsync.transport.addresses import Address

log = logging.getLogger("hotswap.peer")

DATA_PORT_ENV, RACK_ENV = "HOTSWAP_PEER_DATA_PORT", "HOTSWAP_RACK"
STANDBY_S = 0.2


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=options.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for name in ("httpx", "uvicorn.error"):
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        asyncio.run(serve(_settings(options)))
    except (WeightSyncError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


async def serve(settings: PeerSettings) -> None:
    """Until SIGTERM or SIGINT. Raises WeightSyncError, ValueError: it cannot be started so."""
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    tls = ClusterTls(settings.cluster_tls) if settings.cluster_tls is not None else None
    address = Address.parse(settings.listen)
    store = open_store(settings.store)
    try:
        arena = await ensure_arena(store, host=settings.host)
        lock = await _only_one(arena, settings.model, stopped)
        if lock is None:
            return
        listener = listen(address, tls)
        port = int(listener.getsockname()[1])
        data = Address(address.host, settings.data_port)
        with open_transport(settings.transport, listen=str(data), tls=tls) as transport:
            async with PeerClient(settings.model, settings.host, transport.name, tls) as client:
                reached = advertised(settings.advertise, Address(address.reachable, port))
                peer = Peer(settings, store, arena, transport, client, reached)
                async with running(peer, listener, tls) as task:
                    log.info("peer of host %s at %s, transport %s", settings.host, reached, transport.name)
                    stopping = asyncio.create_task(stopped.wait())
                    await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
                    if task.done():
                        task.result()
    finally:
        await store.close()


def advertised(wish: str | None, own: Address) -> str:
    """HOST:PORT that others connect to: `wish`, with the port listened on unless it names one."""
    if wish is None:
        return str(own)
    host, _, port = wish.rpartition(":") if not wish.endswith("]") else (wish, "", "")
    return wish if host and port.isdigit() and (":" not in host or host.endswith("]")) else f"{wish}:{own.port}"


async def _only_one(arena: Arena, model: str, stopped: asyncio.Event) -> int | None:
    """The lock of the arena's one peer, once it can be had; None if the process is to stop before."""
    fd = os.open(lock_of(arena.directory, model), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    told = False
    while not stopped.is_set():
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fd
        except BlockingIOError:
            if not told:
                log.info("another peer serves %s; standing by", arena.directory)
                told = True
            await asyncio.sleep(STANDBY_S)
    os.close(fd)
    return None


def _settings(options: argparse.Namespace) -> PeerSettings:
    """Raises PeerError."""
    if not options.host_id:
        raise bad_host_name("")
    limit = options.limit_gbps * 1e9 / 8 if options.limit_gbps else None
    return PeerSettings(
        store=options.store,
        model=options.model,
        host=check_host(options.host_id),
        listen=options.listen,
        advertise=options.advertise,
        transport=options.transport,
        cluster_tls=options.cluster_tls,
        chunk_nbytes=options.chunk,
        readers=options.readers,
        lease_ttl_s=options.lease_ttl,
        data_port=options.data_port,
        rack=options.rack,
        pace=Pace(options.reads_per_holder, options.reads, options.read_timeout, limit),
    )


def _port(text: str) -> int:
    """Raises ValueError, which argparse tells."""
    if not (text.isascii() and text.isdigit() and int(text) < 1 << 16):
        raise ValueError(text)
    return int(text)


def _parser() -> argparse.ArgumentParser:
    defaults, pace = PeerSettings("", "", ""), Pace()
    store, tls = os.environ.get(STORE_ENV), os.environ.get(TLS_ENV)
    p = argparse.ArgumentParser(prog="hotswap peer", description="Carries versions between this host and others.")
    p.add_argument("--store", default=store, required=store is None, help=f"store URL (default: ${STORE_ENV})")
    p.add_argument("--model", required=True, help="served model name")
    p.add_argument("--host-id", default=os.environ.get(HOST_ENV, ""), help=f"name of this host (default: ${HOST_ENV})")
    p.add_argument(
        "--listen", default=defaults.listen, help="ADDRESS:PORT of the control channel (default: %(default)s)"
    )
    p.add_argument(
        "--advertise", metavar="HOST[:PORT]", help="where others reach it (default: the address listened on)"
    )
    p.add_argument(
        "--data-port", type=_port, default=os.environ.get(DATA_PORT_ENV, "0"), metavar="PORT",
        help=f"of the same address, for the data of the TCP transport; 0 is any (default: ${DATA_PORT_ENV}, or 0)",
    )  # fmt: skip
    p.add_argument("--rack", default=os.environ.get(RACK_ENV, ""), help=f"where the host is (default: ${RACK_ENV})")
    p.add_argument("--transport", choices=("auto", *NAMES), default=defaults.transport, help="what carries the bytes")
    p.add_argument(
        "--cluster-tls", type=Path, default=Path(tls) if tls else None, metavar="DIR",
        help=f"tls.crt, tls.key and ca.crt; needed beyond loopback (default: ${TLS_ENV})",
    )  # fmt: skip
    p.add_argument(
        "--chunk", type=int, default=defaults.chunk_nbytes, help="bytes read at once, where no manifest says"
    )
    p.add_argument("--readers", type=int, default=defaults.readers, help="hosts that may read here at a time")
    p.add_argument("--reads", type=int, default=pace.total, help="chunks read at a time")
    p.add_argument("--reads-per-holder", type=int, default=pace.per_holder, help="of them from one host")
    p.add_argument("--read-timeout", type=float, default=pace.read_timeout_s, help="for one chunk, seconds")
    p.add_argument("--limit-gbps", type=float, help="Gbit/s this host reads at most (default: no limit)")
    p.add_argument("--lease-ttl", type=float, default=defaults.lease_ttl_s, help="until a dead peer is forgotten, s")
    p.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    return p


if __name__ == "__main__":
    sys.exit(main())
