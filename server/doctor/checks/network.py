"""The network: ports, mutual TLS, RDMA, and the transports between hosts."""

from __future__ import annotations

import datetime
import errno
import os
import socket
import ssl
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.x509.oid import ExtendedKeyUsageOID

from server.doctor.registry import Finding, check, fail, ok, skip, warn
from server.doctor.world import World, is_loopback, is_ours, listener_on, ours
from weightsync.tls import ENVIRONMENT, ClusterTls

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
    return ok(f"{host}:{port} is free")


def _refused(host: str, port: int, option: str, error: OSError) -> Finding:
    advice = {
        errno.EACCES: f"Choose {option} above 1023, or allow it: sysctl net.ipv4.ip_unprivileged_port_start={port}",
        errno.EADDRNOTAVAIL: "Give --host an address of this host (`ip addr`)",
    }
    mend = advice.get(error.errno or 0, "Check --host and the port")
    return fail(f"{host}:{port}: {os.strerror(error.errno) if error.errno else error}", mend)


def _taken(host: str, port: int, option: str) -> Finding:
    process = listener_on(port)
    if process is None:
        return fail(f"{host}:{port} is taken", f"Choose another {option}, or find who listens: ss -ltnp")
    with process.oneshot():
        who = f"{process.name()} (process {process.pid})"
        if is_ours(process.cmdline()):
            return ok(f"{host}:{port} is ours: {who}")
    return fail(f"{host}:{port} is taken by {who}", f"Choose another {option}, or end that process")


@check("listeners", "processes of ours that listen beyond loopback, and whether with TLS")
def listeners(world: World) -> Iterator[Finding]:
    found = ours()
    if not found:
        yield skip("no process of ours runs here")
        return
    bare = [finding for process in found if (finding := _listens(process)) is not None]
    yield from bare or [ok(f"{len(found)} process(es) of ours: nothing listens beyond loopback without TLS")]


def _listens(process: psutil.Process) -> Finding | None:
    """What of it can be reached from other hosts and speaks no TLS."""
    try:
        command = process.cmdline()
        places = [c.laddr for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    except psutil.Error:
        return None
    bare = {p.port: p.ip for p in places if not is_loopback(p.ip) and not speaks_tls(p.ip, p.port)}
    if not bare:
        return None
    who = f"process {process.pid} ({' '.join(command[:4])})"
    text = f"{who} listens without TLS on " + ", ".join(f"{ip}:{port}" for port, ip in sorted(bare.items()))
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


SOON = datetime.timedelta(days=7)
RENEW = "Have it issued anew (cert-manager does so by itself); running processes read the new files"
NEEDED = {ExtendedKeyUsageOID.SERVER_AUTH: "server auth", ExtendedKeyUsageOID.CLIENT_AUTH: "client auth"}


@check("cluster-tls", "certificate, key and authority of the cluster: expiry, and that they belong together")
def cluster_tls(world: World) -> Iterator[Finding]:
    configured = world.cluster_tls or world.environ.get(ENVIRONMENT)
    if not configured:
        yield skip(f"no directory is named: pass --cluster-tls DIR, or set {ENVIRONMENT}; one host needs none")
        return
    yield from judge_certificates(Path(configured), datetime.datetime.now(datetime.UTC))


def judge_certificates(directory: Path, now: datetime.datetime) -> Iterator[Finding]:
    """`now` decides what has expired."""
    try:
        certificate = x509.load_pem_x509_certificate((directory / "tls.crt").read_bytes())
        key = serialization.load_pem_private_key((directory / "tls.key").read_bytes(), None)
        authorities = x509.load_pem_x509_certificates((directory / "ca.crt").read_bytes())
    except OSError as error:
        yield fail(f"{error.filename}: {error.strerror}", "Name a directory with tls.crt, tls.key and ca.crt")
        return
    except (ValueError, TypeError) as error:
        mend = "tls.crt, tls.key and ca.crt must be PEM, the key without a password"
        yield fail(f"{directory}: one of the files cannot be read: {error}", mend)
        return
    yield _lasts("tls.crt", certificate, now)
    yield from (finding for ca in authorities if (finding := _lasts("ca.crt", ca, now)).status != "ok")
    if key.public_key() != certificate.public_key():
        yield fail("tls.key is not the key of tls.crt", "Write both files from the same issue")
    if not any(_issued(certificate, authority) for authority in authorities):
        yield fail("tls.crt is not signed by ca.crt", "Have it issued by the cluster's authority, or renew ca.crt")
    yield from _names(certificate)
    yield from _readable_key(directory / "tls.key")


def _lasts(name: str, certificate: x509.Certificate, now: datetime.datetime) -> Finding:
    begin, until = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now < begin:
        return fail(f"{name} is valid from {begin:%Y-%m-%d %H:%M} UTC on", "Set the clock, or wait")
    if now >= until:
        return fail(f"{name} expired on {until:%Y-%m-%d %H:%M} UTC", RENEW)
    text = f"{name} is valid until {until:%Y-%m-%d %H:%M} UTC"
    return warn(text, RENEW) if until - now < SOON else ok(text)


def _issued(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _names(certificate: x509.Certificate) -> Iterator[Finding]:
    """Members are known by one name, whatever their address, and are servers and clients both."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        known = names.get_values_for_type(x509.DNSName)
    except x509.ExtensionNotFound:
        known = []
    if ClusterTls.NAME not in known:
        mend = f"Issue it with the DNS name {ClusterTls.NAME!r}, which all members expect"
        yield fail(f"tls.crt is for {', '.join(known) or 'no DNS name'}, not for {ClusterTls.NAME!r}", mend)
    try:
        usages = set(certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)
    except x509.ExtensionNotFound:
        return
    if missing := [text for usage, text in NEEDED.items() if usage not in usages]:
        yield fail(f"tls.crt may not be used for {' and '.join(missing)}", "Issue it for both: members do both")


def _readable_key(path: Path) -> Iterator[Finding]:
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        yield warn(f"{path} has mode {mode:03o}: others may read it", "chmod 600 (a secret's defaultMode: 0400)")


CLASS = "/sys/class/infiniband"
VERBS = "/sys/class/infiniband_verbs"


def devices(world: World) -> list[Path]:
    """The devices' directories in /sys, by name."""
    directory = world.path(CLASS)
    return sorted(directory.iterdir()) if directory.is_dir() else []


@check("rdma", "RDMA devices, the state of their ports, and access to them")
def rdma(world: World) -> Iterator[Finding]:
    found = devices(world)
    if not found:
        yield skip("no RDMA devices (/sys/class/infiniband): versions go between hosts over TCP")
    for device in found:
        yield _ports(device)
        yield _access(world, device.name)


def _ports(device: Path) -> Finding:
    ports = sorted((device / "ports").glob("*"))
    said = [(port.name, _word(port / "state"), _word(port / "link_layer"), _word(port / "rate")) for port in ports]
    text = f"{device.name}: " + ("; ".join(f"port {' '.join(words)}" for words in said) or "no ports")
    if any(state == "ACTIVE" for _, state, *_ in said):
        return ok(text)
    mend = "Look at cable and switch; InfiniBand needs a subnet manager (opensm), RoCE an address on its interface"
    return warn(text, f"{mend}. Until then it is not used")


def _word(path: Path) -> str:
    """`4: ACTIVE` as `ACTIVE`."""
    try:
        return path.read_text().strip().rpartition(": ")[2]
    except OSError:
        return "?"


def _access(world: World, device: str) -> Finding:
    for verbs in sorted(world.path(VERBS).glob("uverbs*")):
        if world.read(f"{VERBS}/{verbs.name}/ibdev") != device:
            continue
        node = world.path(f"/dev/infiniband/{verbs.name}")
        if not node.exists():
            return fail(f"{device}: no {node}", "Pass the device into the container (an RDMA device plug-in, --device)")
        if not os.access(node, os.R_OK | os.W_OK):
            return fail(f"{device}: {node} may not be opened by this user", "Allow it by a udev rule or its group")
        return ok(f"{device}: {node} may be opened")
    return fail(f"{device}: no uverbs device", "Load ib_uverbs (modprobe ib_uverbs)")


@check("transports", "what can carry versions between hosts")
def transports(world: World) -> Iterator[Finding]:
    from weightsync.transport import available

    yield from judge_transports(available())


def judge_transports(found: Mapping[str, str]) -> Iterator[Finding]:
    """By name, why it cannot be used; empty if it can."""
    usable = [name for name, why in found.items() if not why]
    missing = "; ".join(f"{name}: {why}" for name, why in found.items() if why)
    if not usable:
        yield warn(missing, "Install one of them (requirements/); on a single host none is needed")
        return
    yield ok(f"{', '.join(usable)} can be used")
    if missing:
        yield skip(f"not available: {missing}")
