"""Ports really taken, by strangers and by ours; listeners with and without TLS."""

from __future__ import annotations

import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import psutil
import pytest

from server.doctor.checks.ports import speaks_tls
from server.doctor.processes import is_ours
from server.doctor.world import World, is_loopback
from server.ports import free_port
from tests.etcd import Tls
from tests.server.doctor.worlds import findings, only, statuses

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


def test_free_ports() -> None:
    first, second = free_port(), free_port()
    assert statuses(findings("ports", World(port=first))) == ["ok"]
    assert statuses(findings("ports", World(port=first, admin_port=second))) == ["ok", "ok"]


def test_a_port_that_is_taken_names_who_has_it(tmp_path: Path) -> None:
    with listening(tmp_path, "stranger", "127.0.0.1") as port:
        found = only(findings("ports", World(port=port)), "fail")
        assert "python" in found.found
        assert "process " in found.found
        assert "--admin-port" in findings("ports", World(port=0, admin_port=port))[1].mend
    with listening(tmp_path, "server.gateway", "127.0.0.1") as port:
        assert "ours" in only(findings("ports", World(port=port)), "ok").found


def test_an_address_of_another_host_is_told() -> None:
    assert "ip addr" in only(findings("ports", World(host="192.0.2.1")), "fail").mend


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


@contextmanager
def tls_server(tmp_path: Path, *, ask: bool) -> Iterator[int]:
    """Wants a certificate of each client if `ask`."""
    tls = Tls(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tls.server_cert, tls.server_key)
    if ask:
        context.load_verify_locations(tls.ca)
        context.verify_mode = ssl.CERT_REQUIRED

    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server.server_port
        server.shutdown()


@pytest.mark.parametrize("ask", [False, True])
def test_a_tls_listener_is_known_by_its_answer(tmp_path: Path, ask: bool) -> None:
    with tls_server(tmp_path, ask=ask) as port:
        assert speaks_tls("0.0.0.0", port)


def test_addresses_and_command_lines() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.3.2.1", "::1", "[::1]", "localhost", "::ffff:127.0.0.1")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "etcd-0.etcd", "fe80::1%eth0")))
    assert is_ours(["python", "-m", "server.cli", "instance"])
    assert is_ours(["/venv/bin/python", "/venv/bin/hotswap", "up"])
    assert not is_ours(["vi", "server/gateway/config.py"])
