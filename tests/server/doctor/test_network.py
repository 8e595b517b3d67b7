"""Ports really taken, by strangers and by ours; listeners with and without TLS; certificates of every kind."""

from __future__ import annotations

import ssl
import subprocess
import sys
from asyncio import to_thread
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest
from cryptography.x509.oid import ExtendedKeyUsageOID

from server.doctor.checks.ports import speaks_tls
from server.doctor.processes import is_ours
from server.doctor.registry import Status
from server.doctor.world import World
from server.ports import free_port
from tests.cluster_tls import Authority
from tests.etcd import Tls
from tests.server.doctor.worlds import findings, only, statuses
from tests.server.gateway.upstream import upstream
from weightsync.tls import ENVIRONMENT, is_loopback

STARTS = ()  # `up` starts nothing here
LISTENS = """
import socket, sys
port = int(sys.argv[3]) if "--port" in sys.argv else 0
listener = socket.create_server((sys.argv[1], port))
print(listener.getsockname()[1], flush=True)
input()
"""


@contextmanager
def listening(place: Path, module: str, host: str, *arguments: str) -> Iterator[int]:
    """A process that is called `python -m MODULE` and listens there; its port."""
    code = place / f"{module.replace('.', '/')}.py"
    code.parent.mkdir(parents=True, exist_ok=True)
    code.write_text(LISTENS)
    command = [sys.executable, "-m", module, host, *arguments]
    with subprocess.Popen(command, cwd=place, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.kill()


def test_a_port_is_free_or_its_process_is_named(tmp_path: Path) -> None:
    assert statuses(findings("ports", World(port=free_port(), admin_port=free_port()))) == ["ok", "ok"]
    with listening(tmp_path, "stranger", "127.0.0.1") as port:
        found = only(findings("ports", World(port=port)), "fail")
        assert "python" in found.found
        assert "process " in found.found
        assert "--admin-port" in findings("ports", World(port=0, admin_port=port))[1].mend
    with listening(tmp_path, "server.gateway", "127.0.0.1") as port:
        assert "ours" in only(findings("ports", World(port=port)), "ok").found
    assert "ip addr" in only(findings("ports", World(host="192.0.2.1")), "fail").mend, "an address of another host"


@pytest.fixture
def only_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what this test starts is looked at, no server that other tests share or that other people run."""
    children = psutil.Process().children
    before = set(children(recursive=True))
    monkeypatch.setattr(psutil, "process_iter", lambda: [p for p in children(recursive=True) if p not in before])


@pytest.mark.usefixtures("only_children")
def test_what_listens_beyond_loopback_without_tls_is_found(tmp_path: Path) -> None:
    only(findings("listeners", World()), "skip")
    with ExitStack() as stack:
        stack.enter_context(listening(tmp_path, "stranger", "0.0.0.0"))
        only(findings("listeners", World()), "skip")
        stack.enter_context(listening(tmp_path, "weightsync.peer", "127.0.0.1"))
        only(findings("listeners", World()), "ok")
        port = stack.enter_context(listening(tmp_path, "server.gateway", "0.0.0.0"))
        found = only(findings("listeners", World()), "fail")
        assert f"0.0.0.0:{port}" in found.found
        assert "server.gateway" in found.found


@pytest.mark.usefixtures("only_children")
def test_the_public_port_without_tls_is_a_warning(tmp_path: Path) -> None:
    with listening(tmp_path, "server.gateway", "0.0.0.0", "--port", str(free_port())):
        assert "--ssl-certfile" in only(findings("listeners", World()), "warn").mend


@pytest.mark.parametrize("ask", [False, True])
async def test_a_tls_listener_is_known_by_its_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ask: bool
) -> None:
    """Also by one that wants a certificate of each client."""
    monkeypatch.setattr("server.doctor.checks.ports.PROBE_TIMEOUT_S", 60.0)
    tls = Tls(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tls.server_cert, tls.server_key)
    if ask:
        context.load_verify_locations(tls.ca)
        context.verify_mode = ssl.CERT_REQUIRED
    async with upstream(tls=context) as up:
        assert await to_thread(speaks_tls, "0.0.0.0", up.port)


def test_addresses_and_command_lines() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.3.2.1", "::1", "[::1]", "localhost", "::ffff:127.0.0.1")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "etcd-0.etcd", "fe80::1%eth0")))
    assert is_ours(["python", "-m", "server.cli", "instance"])
    assert is_ours(["/venv/bin/python", "/venv/bin/hotswap", "up"])
    assert not is_ours(["vi", "server/gateway/config.py"])


# certificates: expired, early, of another authority, with another key or name

LONG = (-1, 90)  # days


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"), days=(-400, 365))


@pytest.mark.parametrize(
    ("first", "last", "expected", "said"),
    [
        (-1, 90, "ok", "valid until"),
        (-90, 3, "warn", "valid until"),
        (-90, -1, "fail", "expired on"),
        (1, 90, "fail", "valid from"),
    ],
)
def test_how_long_a_certificate_lasts(
    tmp_path: Path, authority: Authority, first: int, last: int, expected: Status, said: str
) -> None:
    authority.mount(tmp_path, days=(first, last))
    assert said in only(findings("cluster-tls", World(environ={ENVIRONMENT: str(tmp_path)})), expected).found


def test_an_expired_authority(tmp_path: Path) -> None:
    expired = Authority(tmp_path / "authority", days=(-400, -2))
    found = findings("cluster-tls", World(cluster_tls=expired.mount(tmp_path / "member", days=LONG)))
    assert (statuses(found), "ca.crt expired" in found[1].found) == (["ok", "fail"], True)


def test_files_that_do_not_belong_together(tmp_path: Path, authority: Authority) -> None:
    authority.mount(tmp_path / "a", days=LONG)
    (tmp_path / "a" / "tls.key").write_bytes((authority.mount(tmp_path / "b") / "tls.key").read_bytes())
    (tmp_path / "a" / "ca.crt").write_bytes(Authority(tmp_path / "other", days=LONG).ca.read_bytes())
    found = findings("cluster-tls", World(cluster_tls=tmp_path / "a"))
    assert statuses(found) == ["ok", "fail", "fail"]
    assert "is not the key" in found[1].found
    assert "is not signed" in found[2].found


def test_while_an_authority_is_replaced_ca_crt_holds_two(tmp_path: Path, authority: Authority) -> None:
    authority.mount(tmp_path, days=LONG)
    new = Authority(tmp_path / "new", days=LONG)
    (tmp_path / "ca.crt").write_bytes(new.ca.read_bytes() + authority.ca.read_bytes())
    only(findings("cluster-tls", World(cluster_tls=tmp_path)), "ok")


def test_names_and_usages(tmp_path: Path, authority: Authority) -> None:
    authority.mount(tmp_path, "pod-1", days=LONG, usages=(ExtendedKeyUsageOID.SERVER_AUTH,))
    found = findings("cluster-tls", World(cluster_tls=tmp_path))
    assert statuses(found) == ["ok", "fail", "fail"]
    assert "pod-1" in found[1].found
    assert "client auth" in found[2].found


def test_a_key_that_others_may_read(tmp_path: Path, authority: Authority) -> None:
    (authority.mount(tmp_path, days=LONG) / "tls.key").chmod(0o644)
    found = findings("cluster-tls", World(cluster_tls=tmp_path))
    assert (statuses(found), "chmod 600" in found[1].mend) == (["ok", "warn"], True)


def test_files_that_are_missing_or_something_else(tmp_path: Path, authority: Authority) -> None:
    only(findings("cluster-tls", World(environ={})), "skip")
    assert "ca.crt" in only(findings("cluster-tls", World(cluster_tls=tmp_path)), "fail").mend
    (authority.mount(tmp_path) / "tls.key").write_text("no key")
    assert "PEM" in only(findings("cluster-tls", World(cluster_tls=tmp_path)), "fail").mend
