"""A real etcd on loopback, for tests: killed, restarted, frozen; with TLS and users where wanted."""

from __future__ import annotations

import contextlib
import datetime
import http.client
import ipaddress
import os
import shutil
import signal
import ssl
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from server.ports import free_port

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # as in weightsync/store/etcd_members.py: tests fork

from functools import partial

import grpc
from aetcd import rpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from loadtest.hosts.etcd import MISSING, binary
from tests.lacking import lacking
from tests.waiting import wait_until

MIN_LEASE_S = 1.0  # what a single member makes of a shorter one
TODAY, BOTH = (-1, 1), (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH)  # of certificates
HASTE = ("--heartbeat-interval=20", "--election-timeout=200")  # milliseconds; by default 100 and 1000


def require() -> str:
    """Skips the test where there is no etcd; in CI that is a failure."""
    return str(binary() or lacking(MISSING))


class Etcd:
    """A cluster of `members` processes. Its data are in memory, so that a write does not wait for a disk. A single
    member leads, and ends leases, sooner than etcd's defaults say; several would lose their leader on a busy machine.
    """

    def __init__(self, members: int = 1, *, tls: Tls | None = None, flags: tuple[str, ...] = ()) -> None:
        self._binary, self._tls, self._flags = require(), tls, (HASTE if members == 1 else ()) + flags
        self._scheme = "https" if tls else "http"
        self.directory = Path(tempfile.mkdtemp(prefix="hotswap-etcd-", dir="/dev/shm"))
        self._ports = [free_port() for _ in range(2 * members)]
        self.hosts = [f"127.0.0.1:{port}" for port in self._ports[:members]]
        self._processes: list[subprocess.Popen[bytes] | None] = [None] * members
        self._root_password = ""
        self.start()

    def url(self, namespace: str = "", **options: object) -> str:
        query = "&".join(f"{name}={value}" for name, value in options.items())
        return f"etcd://{','.join(self.hosts)}/{namespace}" + (f"?{query}" if query else "")

    def start(self) -> None:
        """Start the members that are not running, and wait until all of them answer.

        They listen before that: on a busy machine by more than the time that a store gives a call.
        """
        for index, process in enumerate(self._processes):
            if process is None:
                self._processes[index] = self._spawn(index)
        log = self.directory / "log"
        for host, process in zip(self.hosts, self._processes, strict=True):
            wait_until(partial(self._answers, host), 120, lambda: log.read_text()[-2000:], process)

    def _answers(self, host: str) -> bool:
        if self._tls is None:
            connection = http.client.HTTPConnection(host, timeout=10)
        else:
            connection = http.client.HTTPSConnection(host, timeout=10, context=self._tls.client())
        with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        return False

    def _spawn(self, index: int) -> subprocess.Popen[bytes]:
        peers = [f"http://127.0.0.1:{port}" for port in self._ports[len(self.hosts) :]]
        client = f"{self._scheme}://{self.hosts[index]}"
        arguments = {
            "name": f"m{index}",
            "data-dir": str(self.directory / f"m{index}"),
            "listen-client-urls": client,
            "advertise-client-urls": client,
            "listen-peer-urls": peers[index],
            "initial-advertise-peer-urls": peers[index],
            "initial-cluster": ",".join(f"m{i}={peer}" for i, peer in enumerate(peers)),
            "logger": "zap",
            "log-level": "error",
        }
        command = [self._binary, "--unsafe-no-fsync", *(f"--{name}={value}" for name, value in arguments.items())]
        command += self._flags
        with (self.directory / "log").open("ab") as log:
            return subprocess.Popen(command + (self._tls.server_flags() if self._tls else []), stdout=log, stderr=log)

    def kill(self, *which: int) -> None:
        for index in which or range(len(self._processes)):
            if (process := self._processes[index]) is not None:
                process.kill()
                process.wait()
                self._processes[index] = None

    def restart(self) -> None:
        self.kill()
        self.start()

    def lose_data(self, *flags: str) -> None:
        """Kill, and start with nothing, and with these flags besides."""
        self.kill()
        self._flags += flags
        for data in self.directory.glob("m*"):
            shutil.rmtree(data)
        self.start()

    def freeze(self, *which: int) -> None:
        """Returns when all their threads stand still."""
        self._signal(signal.SIGSTOP, *which)
        for index in which or range(len(self._processes)):
            if (process := self._processes[index]) is not None:
                os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)

    def thaw(self, *which: int) -> None:
        self._signal(signal.SIGCONT, *which)

    def _signal(self, number: signal.Signals, *which: int) -> None:
        for index in which or range(len(self._processes)):
            if (process := self._processes[index]) is not None:
                process.send_signal(number)

    def compact(self, revision: int) -> None:
        self.ask("KV", "Compact", rpc.CompactionRequest(revision=revision, physical=True))

    def require_users(self, **passwords: str) -> None:
        """Turn authentication on; `root` must be one of the users. Each may use the prefix `name/`, root everything."""
        for name, password in passwords.items():
            self.ask("Auth", "UserAdd", rpc.AuthUserAddRequest(name=name, password=password))
            self.ask("Auth", "RoleAdd", rpc.AuthRoleAddRequest(name=name))
            start, end = f"{name}/".encode(), f"{name}0".encode()
            granted = rpc.Permission(permType=rpc.Permission.READWRITE, key=start, range_end=end)
            self.ask("Auth", "RoleGrantPermission", rpc.AuthRoleGrantPermissionRequest(name=name, perm=granted))
            self.ask("Auth", "UserGrantRole", rpc.AuthUserGrantRoleRequest(user=name, role=name))
        self.ask("Auth", "AuthEnable", rpc.AuthEnableRequest())
        self._root_password = passwords["root"]

    def change_password(self, user: str, password: str) -> None:
        self.ask("Auth", "UserChangePassword", rpc.AuthUserChangePasswordRequest(name=user, password=password))

    def ask(self, service: str, method: str, request: Any) -> Any:
        """An administrator's request, without TLS."""
        with grpc.insecure_channel(self.hosts[0]) as channel:
            metadata = ()
            if self._root_password:
                login = rpc.AuthenticateRequest(name="root", password=self._root_password)
                metadata = (("token", rpc.AuthStub(channel).Authenticate(login, timeout=30).token),)
            stub = getattr(rpc, f"{service}Stub")(channel)
            return getattr(stub, method)(request, timeout=30, metadata=metadata)

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self.directory)


class Tls:
    """An authority, a server certificate for 127.0.0.1 and a client certificate, in PEM files under `directory`.

    `issue` makes more of them: certificate and key, in files named after `name`. All are valid from the first to the
    last of some `days`, counted from now.
    """

    def __init__(self, directory: Path, *, client_certificates: bool = False, days: tuple[int, int] = TODAY) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._client_certificates = client_certificates
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._directory = directory
        self.ca = directory / "ca.pem"
        self.ca.write_bytes(_pem(_certificate("authority", self._key, self._key, days, ())))
        self.server_cert, self.server_key = self.issue("server")
        self.cert, self.key = self.issue("client")

    def issue(
        self, name: str, days: tuple[int, int] = TODAY, usages: tuple[x509.ObjectIdentifier, ...] = BOTH
    ) -> tuple[Path, Path]:
        key = ec.generate_private_key(ec.SECP256R1())
        cert_path, key_path = self._directory / f"{name}.pem", self._directory / f"{name}-key.pem"
        cert_path.write_bytes(_pem(_certificate(name, key, self._key, days, usages)))
        encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
        key_path.write_bytes(key.private_bytes(encoding, form, serialization.NoEncryption()))
        key_path.chmod(0o600)
        return cert_path, key_path

    def client(self) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self.ca)
        context.load_cert_chain(self.cert, self.key)
        return context

    def server_flags(self) -> list[str]:
        flags = [f"--cert-file={self.server_cert}", f"--key-file={self.server_key}"]
        return flags + ([f"--trusted-ca-file={self.ca}", "--client-cert-auth"] if self._client_certificates else [])


def _certificate(
    name: str, key: ec.EllipticCurvePrivateKey, signer: ec.EllipticCurvePrivateKey, days: tuple[int, int],
    usages: tuple[x509.ObjectIdentifier, ...],
) -> x509.Certificate:  # fmt: skip
    """For 127.0.0.1 and, as a DNS name, for `name`; without usages, an authority's."""
    first, last = (datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=day) for day in days)
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "authority")]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(first)
        .not_valid_after(last)
        .add_extension(x509.BasicConstraints(ca=not usages, path_length=None), critical=True)
    )
    if usages:
        names = [x509.IPAddress(ipaddress.ip_address("127.0.0.1")), x509.DNSName(name)]
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
    return builder.sign(signer, hashes.SHA256())


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
