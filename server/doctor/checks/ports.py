"""Ports: free to listen on, and what of ours already listens where others reach it."""

from __future__ import annotations

import errno
import os
import socket
import ssl
from collections.abc import Iterator

import psutil

from server.doctor.processes import is_ours, listener_on, ours
from server.doctor.registry import Finding, check, fail, ok, skip, warn
from server.doctor.world import World
from server.ports import authority
from weightsync.tls import is_loopback

PROBE_TIMEOUT_S = 2.0
DEFAULT_PORT = "8000"


@check("ports", "whether the gateway's ports can be listened on")
def ports(world: World) -> Iterator[Finding]:
    yield _try(world.host, world.port, "--port")
    if world.admin_port is not None:
        yield _try("127.0.0.1", world.admin_port, "--admin-port")


def _try(host: str, port: int, option: str) -> Finding:
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        return _taken(host, port, option) if error.errno == errno.EADDRINUSE else _refused(host, port, option, error)
    return ok(f"{authority(host, port)} is free")


def _refused(host: str, port: int, option: str, error: OSError) -> Finding:
    advice = {
        errno.EACCES: f"Choose {option} above 1023, or allow it: sysctl net.ipv4.ip_unprivileged_port_start={port}",
        errno.EADDRNOTAVAIL: "Give --host an address of this host (`ip addr`)",
    }
    mend = advice.get(error.errno or 0, "Check --host and the port")
    return fail(f"{authority(host, port)}: {os.strerror(error.errno) if error.errno else error}", mend)


def _taken(host: str, port: int, option: str) -> Finding:
    process = listener_on(port)
    if process is None:
        return fail(f"{authority(host, port)} is taken", f"Choose another {option}, or find who listens: ss -ltnp")
    with process.oneshot():
        who = f"{process.name()} (process {process.pid})"
        if is_ours(process.cmdline()):
            return ok(f"{authority(host, port)} is ours: {who}")
    return fail(f"{authority(host, port)} is taken by {who}", f"Choose another {option}, or end that process")


@check("listeners", "processes of ours that listen beyond loopback, and whether with TLS")
def listeners(world: World) -> Iterator[Finding]:
    found = ours()
    if not found:
        yield skip("no process of ours runs here")
        return
    bare = [finding for process in found if (finding := _listens(process)) is not None]
    yield from bare or [ok(f"{len(found)} process(es) of ours: nothing listens beyond loopback without TLS")]


def _listens(process: psutil.Process) -> Finding | None:
    """The process's ports that can be reached from other hosts and speak no TLS, as a finding."""
    try:
        command = process.cmdline()
        places = [c.laddr for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    except psutil.Error:
        return None
    bare = {p.port: p.ip for p in places if not is_loopback(p.ip) and not speaks_tls(p.ip, p.port)}
    if not bare:
        return None
    who = f"process {process.pid} ({' '.join(command[:4])})"
    text = f"{who} listens without TLS on " + ", ".join(authority(ip, port) for port, ip in sorted(bare.items()))
    if set(bare) == {_public_port(command)}:
        return warn(text, "Keys pass in the clear: --ssl-certfile and --ssl-keyfile, or a proxy with TLS before it")
    if not is_ours(command):
        return warn(text, "Keep these ports from other hosts (a firewall, a NetworkPolicy, GLOO_SOCKET_IFNAME=lo)")
    return fail(text, "Let it listen on 127.0.0.1, or give it certificates: --cluster-tls DIR or HOTSWAP_CLUSTER_TLS")


def _public_port(command: list[str]) -> int | None:
    """Of a gateway, the one that clients use; None of other processes."""
    if not any("gateway" in word for word in command[:4]):
        return None
    words = [part for word in command for part in word.split("=", 1)]
    value = words[words.index("--port") + 1] if "--port" in words[:-1] else DEFAULT_PORT
    return int(value) if value.isdigit() else None


def speaks_tls(host: str, port: int) -> bool:
    """Whether who listens there answers a TLS greeting, be it to ask for a certificate. True if nobody listens."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    target = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - somebody else's
    try:
        with socket.create_connection((target, port), PROBE_TIMEOUT_S) as connection:
            context.wrap_socket(connection).close()
    except ConnectionRefusedError:
        return True
    except ssl.SSLError as error:
        return "ALERT" in (error.reason or "")
    except OSError:
        return False
    return True
