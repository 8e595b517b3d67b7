"""Cables that delay, lose and throttle, for kernels without netem: `python -m loadtest.hosts.wire SWITCH HOST...`.

Each cable is two TAP devices, `eth0` in the namespace HOST and `portN` in SWITCH, and this process carries frames
from one to the other. TAP devices have no offloads, so the kernel hands over whole frames with their checksums.
Orders come as JSON lines on stdin: {"host": N, "delay_s", "loss", "bytes_per_s"}; each is answered with `done`.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import json
import os
import random
import select
import struct
import subprocess
import sys
import time
from dataclasses import dataclass, field

TUNSETIFF = 0x400454CA
IFF_TAP, IFF_NO_PI = 0x0002, 0x1000
FRAME = 65_536
HELD = 1000  # frames, as many as netem holds


@dataclass
class Direction:
    """From one device to another. Frames keep their order."""

    source: int
    sink: int
    random: random.Random
    delay_s: float = 0.0
    loss: float = 0.0
    bytes_per_s: float = 0.0
    free_at: float = 0.0  # when the last frame has been put on the wire
    held: collections.deque[tuple[float, bytes]] = field(default_factory=collections.deque)

    def take(self, now: float) -> None:
        """Everything that waits at the source."""
        with contextlib.suppress(BlockingIOError):
            while True:
                frame = os.read(self.source, FRAME)
                if self.random.random() < self.loss or len(self.held) >= HELD:
                    continue
                began = max(now, self.free_at)
                self.free_at = began + (len(frame) / self.bytes_per_s if self.bytes_per_s else 0.0)
                self.held.append((self.free_at + self.delay_s, frame))

    def give(self, now: float) -> None:
        """Everything whose time has come."""
        while self.held and self.held[0][0] <= now:
            with contextlib.suppress(OSError):  # the device is down, or its queue full: lost
                os.write(self.sink, self.held[0][1])
            self.held.popleft()


def tap(namespace: str, name: str) -> int:
    """A TAP device of that name in that namespace; its descriptor."""
    made = f"hst{os.getpid() % 10**6}{name[:1]}{name[-1:]}"
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH22x", made.encode(), IFF_TAP | IFF_NO_PI))
    subprocess.run(["ip", "link", "set", made, "netns", namespace, "name", name], check=True)
    return descriptor


def main(switch: str, hosts: list[str]) -> None:
    cables = []
    for number, host in enumerate(hosts):
        inside, outside = tap(host, "eth0"), tap(switch, f"port{number}")
        ways = ((inside, outside), (outside, inside))
        cables.append([Direction(*way, random.Random(f"{number} {index}")) for index, way in enumerate(ways)])
    directions = [direction for cable in cables for direction in cable]
    print("done", flush=True)
    poll = select.epoll()
    by_source = {direction.source: direction for direction in directions}
    for descriptor in (*by_source, 0):
        poll.register(descriptor, select.EPOLLIN)
    while True:
        due = min((d.held[0][0] for d in directions if d.held), default=None)
        ready = poll.poll(None if due is None else max(0.0, due - time.monotonic()))
        for descriptor, _ in ready:
            if descriptor in by_source:
                by_source[descriptor].take(time.monotonic())
            elif not obey(cables):
                return
        for direction in directions:
            direction.give(time.monotonic())


def obey(cables: list[list[Direction]]) -> bool:
    """One order. False when there will be no more."""
    line = sys.stdin.readline()
    if not line:
        return False
    order = json.loads(line)
    for direction in cables[order["host"]]:
        direction.delay_s, direction.loss = order["delay_s"], order["loss"]
        direction.bytes_per_s = order["bytes_per_s"]
    print("done", flush=True)
    return True


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
