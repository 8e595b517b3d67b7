"""Two network namespaces on this machine with a shaped link between them (veth and `tc tbf`); needs root."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

PROBE_BYTES = 256 << 20
SEND = f"""
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as s:
    chunk = bytes(1 << 20)
    for _ in range({PROBE_BYTES} >> 20):
        s.sendall(chunk)
    s.shutdown(socket.SHUT_WR)
    s.recv(1)
"""
TAKE = """
import socket, sys, time
with socket.create_server((sys.argv[1], 0)) as listener:
    print(listener.getsockname()[1], flush=True)
    peer, _ = listener.accept()
    buffer, done, started = bytearray(1 << 20), 0, time.perf_counter()
    while n := peer.recv_into(buffer):
        done += n
    seconds = time.perf_counter() - started
    peer.close()
print(done * 8 / seconds / 1e9, flush=True)
"""


class LinkUnavailable(Exception):
    """Namespaces or traffic shaping cannot be had here; the message says why."""


@dataclass(frozen=True)
class Link:
    """`near` and `far` are namespaces; `far_address` is where the far end is reached from the near one."""

    near: str
    far: str
    far_address: str
    gbit: float | None

    def command(self, end: str, *arguments: str) -> list[str]:
        """A command line that runs `arguments` in the namespace `end`."""
        return ["ip", "netns", "exec", end, *arguments]

    def measure(self) -> float:
        """Gbit/s of one plain TCP connection from near to far."""
        take = self.command(self.far, sys.executable, "-c", TAKE, self.far_address)
        with subprocess.Popen(take, stdout=subprocess.PIPE, text=True) as receiver:
            assert receiver.stdout is not None
            port = receiver.stdout.readline().strip()
            subprocess.run(self.command(self.near, sys.executable, "-c", SEND, self.far_address, port), check=True)
            return float(receiver.stdout.readline())


@contextlib.contextmanager
def shaped_link(gbit: float | None) -> Iterator[Link]:
    """A link that carries `gbit` Gbit/s each way (None: as fast as it goes). Raises LinkUnavailable."""
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        raise LinkUnavailable("network namespaces need root, `ip` and `tc` (package iproute2)")
    tag = f"hs{os.getpid()}"
    near, far, subnet = f"{tag}a", f"{tag}b", f"10.231.{os.getpid() % 250}"
    try:
        for end in (near, far):
            _run("ip", "netns", "add", end)
            _run("ip", "-n", end, "link", "set", "lo", "up")
        _run("ip", "link", "add", near, "netns", near, "type", "veth", "peer", "name", far, "netns", far)
        for number, end in enumerate((near, far), start=1):
            _run("ip", "-n", end, "address", "add", f"{subnet}.{number}/24", "dev", end)
            _run("ip", "-n", end, "link", "set", end, "up")
            if gbit is not None:
                limit(end, end, gbit)
        yield Link(near, far, f"{subnet}.2", gbit)
    finally:
        for end in (near, far):
            subprocess.run(["ip", "netns", "del", end], check=False, capture_output=True)


def limit(namespace: str, device: str, gbit: float) -> None:
    """Traffic that leaves by `device` of `namespace` does not exceed `gbit` Gbit/s. Raises LinkUnavailable."""
    burst = int(max(256e3, gbit * 1e9 / 8 / 250))  # what passes in a tick of the coarsest kernel timer
    bucket = ["tbf", "rate", f"{gbit:g}gbit", "burst", str(burst), "latency", "20ms"]
    _run("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", *bucket)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LinkUnavailable(f"`{' '.join(command)}` failed: {done.stderr.strip()}")


def wait_listening(link: Link, port: int, timeout_s: float = 30.0) -> None:
    """Until somebody listens on `port` of the far end; asked from the near one. Raises TimeoutError."""
    probe = f"import socket; socket.create_connection(({link.far_address!r}, {port}), 0.5).close()"
    deadline = time.monotonic() + timeout_s
    while subprocess.run(
        link.command(link.near, sys.executable, "-c", probe), check=False, capture_output=True
    ).returncode:
        if time.monotonic() > deadline:
            raise TimeoutError(f"nobody listens on {link.far_address}:{port} after {timeout_s:g} s")
        time.sleep(0.1)
