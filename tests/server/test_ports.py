"""Ports for processes that are told theirs before they start."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from server import ports


def test_no_outgoing_connection_can_come_to_have_it() -> None:
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    given = [ports.free_port() for _ in range(50)]
    assert len(set(given)) == len(given)
    assert all(ports.is_free("127.0.0.1", port) for port in given)
    assert max(given) < first or first < 11_000


@pytest.mark.parametrize("said", ["1024 65535", "", "none"])
def test_a_kernel_that_says_nothing_of_use(said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "range"
    file.write_text(said)
    monkeypatch.setattr(ports, "_RANGE", file)
    assert 10_000 <= ports.free_port() < 65_536


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2", ""])
def test_no_other_process_is_given_it_and_any_server_listens_there(address: str) -> None:
    port = ports.free_port()
    look = f"from server import ports; print(ports.free_port(wanted={port}), ports.is_free('127.0.0.1', {port}))"
    given, free = subprocess.check_output([sys.executable, "-c", look], text=True).split()
    assert int(given) != port
    assert free == "True"
    with socket.create_server((address, port)), pytest.raises(OSError, match="in use"):
        socket.create_server((address, port))


def test_what_is_held_takes_few_descriptors() -> None:
    for _ in range(200):
        ports.free_port()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(200):
        ports.free_port()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_port_that_is_taken_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = listener.getsockname()[1]
        assert not ports.is_free("127.0.0.1", taken)
        monkeypatch.setattr(ports, "_FIRST", taken)
        monkeypatch.setattr(ports, "_outgoing", lambda: taken + 1)
        assert ports.free_port() != taken
    assert not ports.is_free("127.0.0.1", 70_000)
    with pytest.raises(OSError, match="assign"):
        ports.free_port("192.0.2.1")


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:{}"),
        ("localhost", "http://localhost:{}"),
        ("0.0.0.0", "http://127.0.0.1:{}"),
        ("", "http://127.0.0.1:{}"),
        ("::1", "http://[::1]:{}"),
        ("::", "http://[::1]:{}"),
    ],
)
def test_the_url_of_a_listener_reaches_it(host: str, url: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listener:
        port = listener.getsockname()[1]
        found = ports.url_of(host, port)
        assert found == url.format(port)
        with socket.create_connection((urlsplit(found).hostname, urlsplit(found).port), 30):
            pass
    assert ports.url_of("2001:db8::7", 1, "https") == "https://[2001:db8::7]:1"
