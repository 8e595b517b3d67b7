"""Hosts: the one that a slot lies on, and where the ranks of one host meet.

A slot's name in a record is the plain path on the one host, `//HOST/PATH` among several. HOTSWAP_HOST names the host
of a process. Without it there is one host, whose slots and arena need no name.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from weightsync.control.records import ARENA_KEY
from weightsync.errors import RecordError, bad_host_name

HOST_ENV = "HOTSWAP_HOST"
HOST_PATTERN = r"[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?"
_HOST = re.compile(HOST_PATTERN)
_NAMED = re.compile(f"//(?P<host>{HOST_PATTERN})(?P<path>/.*)")


def this_host() -> str:
    """The name of this process's host, "" for the one host. Raises PeerError."""
    return check_host(os.environ.get(HOST_ENV, ""))


def check_host(host: str) -> str:
    """`host` itself. Raises PeerError unless it is "" or a name that a slot may have."""
    if host and not _HOST.fullmatch(host):
        raise bad_host_name(host)
    return host


def slot_name(path: Path | str, host: str) -> str:
    """The name that records give the slot at the absolute `path` on `host`. Raises PeerError."""
    rooted = "/" + str(path).lstrip("/") if str(path).startswith("/") else str(path)  # `//` is where a host begins
    return f"//{host}{rooted}" if check_host(host) else rooted


def host_of(slot: str) -> str:
    """The host a slot lies on, "" for the one host. Raises RecordError."""
    return _split(slot)[0]


def local_path(slot: str, host: str) -> Path | None:
    """Where the slot is on `host`; None if it lies on another one. Raises RecordError."""
    path = local_name(slot, host)
    return Path(path) if path is not None else None


def local_name(slot: str, host: str) -> str | None:
    """`local_path` as a text, of which a thousand take no time."""
    owner, path = _split(slot)
    return path if owner == host else None


def arena_key(host: str) -> str:
    """Where the store says which directory a host's slots are in."""
    return f"arenas/{host}" if host else ARENA_KEY


def _split(slot: str) -> tuple[str, str]:
    if not slot.startswith("//"):
        return "", slot
    named = _NAMED.fullmatch(slot)
    if named is None:
        raise RecordError("slot name", f"{slot!r} is neither a path nor //HOST/PATH")
    return named["host"], named["path"]


LOOPBACK_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def keep_to_loopback() -> None:
    """Ranks that share a host meet on loopback: Gloo and NCCL would listen, for anybody, where the host's name leads.

    Call it before a process group is made. It holds for this process and those it starts; the environment goes first.
    """
    for name in LOOPBACK_VARIABLES:
        os.environ.setdefault(name, "lo")
