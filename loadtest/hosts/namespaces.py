"""Hosts made of network namespaces, with links to cut and to shape."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import socket
import string
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from loadtest.hosts.links import limit

NAMED = Path("/run/netns")
OURS = re.compile(r"ht(\d+)[a-z](\d+|s)")
_LETTERS = itertools.cycle(string.ascii_lowercase)


def ip(*words: str, check: bool = True) -> str:
    """Runs `ip`; what it printed."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def new_prefix() -> str:
    """The prefix of the names of one set of hosts."""
    return f"ht{os.getpid()}{next(_LETTERS)}"


def has_netem() -> bool:
    """Whether `tc` and this kernel can delay and lose packets. Asked of a namespace that is made for it."""
    if shutil.which("tc") is None:
        return False
    name = f"{new_prefix()}s"
    ip("netns", "add", name)
    try:
        trial = ["tc", "-n", name, "qdisc", "replace", "dev", "lo", "root", "netem", "delay", "1ms"]
        return subprocess.run(trial, capture_output=True, check=False).returncode == 0
    finally:
        ip("netns", "del", name)


def remove_leftovers() -> None:
    """Removes the hosts of processes that are dead."""
    for path in NAMED.glob("ht*"):
        found = OURS.fullmatch(path.name)
        if found is not None and not Path(f"/proc/{found[1]}").exists():
            remove(path.name.removesuffix(found[2]))


def remove(prefix: str) -> None:
    """The namespaces whose names begin so: their processes are ended first, since they would keep them."""
    names = [path.name for path in NAMED.glob(f"{prefix}*")]
    for pid in [int(pid) for name in names for pid in ip("netns", "pids", name, check=False).split()]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for name in names:
        ip("netns", "del", name, check=False)
    ip("link", "del", prefix, check=False)  # its other end has gone with the switch, usually


def free_network() -> str:
    """The first three numbers of a /24 that nobody here has a route to, of those set aside for tests of networks."""
    for number in random.sample(range(256), 256):
        if not ip("route", "show", f"198.18.{number}.0/24").strip():
            return f"198.18.{number}"
    raise RuntimeError("every network in 198.18.0.0/16 is in use")


ROOT = Path(__file__).parents[2]
TUN = Path("/dev/net/tun")
NO_IP = "there is no `ip`; run `make setup`, or install Debian's iproute2"


def obstacle() -> str | None:
    """Why no hosts can be made here; None if they can."""
    if os.geteuid() != 0:
        return "only root may make network namespaces and plug them together"
    if shutil.which("ip") is None:
        return NO_IP
    try:
        Hosts(1).close()
    except (RuntimeError, OSError) as error:
        return f"network namespaces cannot be made here: {error}"
    return None


class CannotShape(RuntimeError):
    """This machine has nothing that delays or loses what goes over a link."""

    def __init__(self) -> None:
        super().__init__(f"links cannot be shaped: this kernel has no netem (tc), and there is no {TUN}")


class Hosts:
    """`count` hosts, numbered from 0. `shaped`: `shape` will be called. Close it, or use it in a `with`."""

    def __init__(self, count: int, *, shaped: bool = False) -> None:
        remove_leftovers()
        self._prefix = new_prefix()
        self._count = count
        self._net = free_network()
        self._switch = f"{self._prefix}s"
        self._netem = shaped and has_netem()
        self._wire: subprocess.Popen[str] | None = None
        try:
            self._plug_in_this_process()
            for host in range(count):
                ip("netns", "add", self._name(host))
            if shaped and not self._netem and TUN.exists():
                self._wire = self._spanned_wire()
            for host in range(count):
                self._plug_in(host)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def address(self, host: int) -> str:
        return f"{self._net}.{host + 1}"

    def run(
        self, host: int, argv: Sequence[str | Path], *, env: Mapping[str, str] | None = None, **popen: Any
    ) -> subprocess.Popen[Any]:
        """Starts a program on a host; the process is the program itself. It ends with the hosts, at the latest."""
        command = ["ip", "netns", "exec", self._name(host), *map(str, argv)]
        return subprocess.Popen(command, env={**os.environ, **(env or {})}, cwd=ROOT, **popen)

    @property
    def can_shape(self) -> bool:
        return self._netem or self._wire is not None

    def cut(self, host: int) -> None:
        """Pull the cable: nothing goes in or out, and nobody is told."""
        ip("-n", self._switch, "link", "set", f"port{host}", "nomaster")

    def heal(self, host: int) -> None:
        ip("-n", self._switch, "link", "set", f"port{host}", "master", "br0")

    def shape(self, host: int, *, delay_ms: float = 0.0, loss: float = 0.0, mbit: float = 0.0) -> None:
        """Every frame from or to the host arrives `delay_ms` later, or not at all (`loss`: a share, 0 to 1).

        `mbit`: at most so many 10^6 bits a second in each direction; 0: no limit. Raises CannotShape.
        """
        if self._wire is not None:
            assert self._wire.stdin is not None
            order = {"host": host, "delay_s": delay_ms / 1e3, "loss": loss, "bytes_per_s": mbit * 1e6 / 8}
            print(json.dumps(order), file=self._wire.stdin, flush=True)
            self._answer()
            return
        if not self._netem:
            raise CannotShape
        settings = ["delay", f"{delay_ms}ms", "loss", f"{loss:.4%}"]
        settings += ["rate", f"{mbit}mbit"] if mbit else []
        for namespace, device in ((self._switch, f"port{host}"), (self._name(host), "eth0")):
            command = ["tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", "netem", *settings]
            subprocess.run(command, check=True, capture_output=True)

    def limit(self, host: int, gbit: float) -> None:
        """So much goes over the link of a host at most, each way, by the kernel's own means and without delay; for
        hosts that are not `shaped`. Raises LinkUnavailable."""
        for namespace, device in ((self._switch, f"port{host}"), (self._name(host), "eth0")):
            limit(namespace, device, gbit)

    def close(self) -> None:
        """Ends every process on the hosts, and removes all."""
        if self._wire is not None:
            self._wire.kill()
            self._wire.communicate()
        remove(self._prefix)

    # -- plugging

    def _name(self, host: int) -> str:
        return f"{self._prefix}{host}"

    def _plug_in_this_process(self) -> None:
        ip("netns", "add", self._switch)
        ip("-n", self._switch, "link", "add", "br0", "type", "bridge")
        ip("-n", self._switch, "link", "set", "br0", "up")
        ip("link", "add", self._prefix, "type", "veth", "peer", "name", "uplink", "netns", self._switch)
        ip("addr", "add", f"{self._net}.254/24", "dev", self._prefix)
        ip("link", "set", self._prefix, "up")
        ip("-n", self._switch, "link", "set", "uplink", "master", "br0", "up")

    def _plug_in(self, host: int) -> None:
        name, port = self._name(host), f"port{host}"
        if self._wire is None:
            ip("-n", self._switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
        ip("-n", self._switch, "link", "set", port, "master", "br0", "up")
        ip("-n", name, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
        ip("-n", name, "link", "set", "eth0", "up")
        ip("-n", name, "link", "set", "lo", "up")

    def _spanned_wire(self) -> subprocess.Popen[str]:
        """The process between pairs of TAP devices; when it has answered once, they are there."""
        names = [self._name(host) for host in range(self._count)]
        command = [sys.executable, "-m", "loadtest.hosts.wire", self._switch, *names]
        self._wire = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        self._answer()
        return self._wire

    def _answer(self) -> None:
        assert self._wire is not None
        assert self._wire.stdout is not None
        if self._wire.stdout.readline() != "done\n":
            raise RuntimeError("the wire between the hosts has ended; is there a /dev/net/tun?")


def reaches(address: str, port: int, timeout_s: float = 1.0) -> bool:
    """Whether this process can connect there now."""
    try:
        socket.create_connection((address, port), timeout_s).close()
    except OSError:
        return False
    return True


def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Waits for something another process brings about. Raises TimeoutError."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout_s:g} s in vain")
        time.sleep(0.02)


class Program:
    """A `python -m MODULE` on a host, that prints lines and may be asked."""

    def __init__(self, hosts: Hosts, host: int, module: str, *arguments: object) -> None:
        command = [sys.executable, "-m", module, *map(str, arguments)]
        self.process = hosts.run(host, command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def line(self) -> str:
        """The next line of the process, "" when it has ended."""
        assert self.process.stdout is not None
        return str(self.process.stdout.readline()).strip()

    def ask(self, question: str) -> Any:
        print(question, file=self.process.stdin, flush=True)
        return json.loads(self.line())

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
