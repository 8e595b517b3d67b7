"""Names of namespaces and links, what the machine can do with them, and the end of those that dead processes left.

Names begin with `ht`, the process id and a letter, so that what a killed process left can be told and removed. Links
that belong to a namespace go with it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import re
import shutil
import signal
import string
import subprocess
from pathlib import Path

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
    """What the names of one set of hosts begin with."""
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
