"""The hosts themselves: who reaches whom, over what links, and that nothing of them stays."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtest.hosts.namespaces import NAMED, ROOT, Hosts, ip, reaches, remove_leftovers, until

PORT = 5000
TAKES = """
import socket
server, datagrams = socket.create_server(("", 5000)), socket.socket(type=socket.SOCK_DGRAM)
datagrams.bind(("", 5000))
print("listens", flush=True)
while True:
    connection, _ = server.accept()
    nbytes = 0
    while piece := connection.recv(1 << 20):
        nbytes += len(piece)
    datagrams.setblocking(False)
    count = 0
    try:
        while datagrams.recv(100):
            count += 1
    except BlockingIOError:
        pass
    connection.sendall(b"%d %d" % (nbytes, count))
    connection.close()
"""


@pytest.fixture
def server(hosts: Hosts) -> Iterator[str]:
    """On host 1: takes what is sent, and says how many bytes and datagrams came. Its address."""
    process = hosts.run(1, [sys.executable, "-c", TAKES], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"listens\n"
    yield hosts.address(1)
    process.kill()
    process.communicate()


def send(address: str, nbytes: int, datagrams: int = 0) -> tuple[int, int, float]:
    """Bytes and datagrams that arrived, and the seconds it took."""
    began = time.monotonic()
    with socket.create_connection((address, PORT), 30) as stream, socket.socket(type=socket.SOCK_DGRAM) as sender:
        for _ in range(datagrams):
            sender.sendto(b"x", (address, PORT))
        stream.sendall(bytes(nbytes))
        stream.shutdown(socket.SHUT_WR)
        arrived, counted = map(int, stream.recv(100).split())
    return arrived, counted, time.monotonic() - began


def test_a_host_that_is_cut_off_is_not_reached_until_it_is_healed(hosts: Hosts, server: str) -> None:
    until(lambda: reaches(server, PORT))  # on a busy machine a frame may take its time
    hosts.cut(1)
    assert not reaches(server, PORT)
    hosts.heal(1)
    until(lambda: reaches(server, PORT))


def test_hosts_reach_each_other(hosts: Hosts, server: str) -> None:
    code = f"import socket; print(socket.create_connection(('{server}', {PORT})).getsockname()[0])"
    process = hosts.run(2, [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.communicate()[0].strip() == hosts.address(2)


def test_a_shaped_link_takes_its_time(hosts: Hosts, server: str) -> None:
    hosts.shape(1, delay_ms=50)
    arrived, _, seconds = send(server, 1)
    assert (arrived, seconds >= 0.2) == (1, True)  # two round trips at least, to connect and to be answered
    hosts.shape(1, mbit=80)
    arrived, _, seconds = send(server, 4_000_000)
    assert (arrived, seconds >= 0.4) == (4_000_000, True)


def test_a_bad_link_loses_datagrams_and_no_byte_of_a_stream(hosts: Hosts, server: str) -> None:
    assert send(server, 1, datagrams=200)[:2] == (1, 200)
    hosts.shape(1, loss=0.1)
    arrived, datagrams, _ = send(server, 100_000, datagrams=200)
    assert arrived == 100_000
    assert 100 < datagrams < 200


CRASHES = """
import os
from loadtest.hosts.namespaces import NAMED, Hosts
hosts = Hosts(2)
process = hosts.run(0, ["sh", "-c", "echo; exec sleep 600"], stdout=-1, stderr=-3)
process.stdout.readline()  # it is on the host now
print(hosts._prefix, process.pid, *sorted(path.name for path in NAMED.glob(f"{hosts._prefix}*")), flush=True)
os._exit(1)
"""


@pytest.mark.usefixtures("hosts")
def test_what_a_killed_process_left_is_removed_and_what_lives_stays() -> None:
    """Any process that makes hosts removes such leftovers: another one may do so at any moment of this test."""
    with Hosts(1) as living:
        done = subprocess.run([sys.executable, "-c", CRASHES], capture_output=True, text=True, cwd=ROOT, check=False)
        prefix, pid, *names = done.stdout.split()
        assert names == [f"{prefix}{end}" for end in "01s"]
        remove_leftovers()
        assert not list(NAMED.glob(f"{prefix}*"))
        until(lambda: prefix not in ip("link"))
        until(lambda: not _runs(int(pid)))
        assert living.run(0, ["true"]).wait() == 0


def _runs(pid: int) -> bool:
    """Not if it has ended, even if nobody has asked how: it was somebody else's child."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() != b""
    except OSError:
        return False
