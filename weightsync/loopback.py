"""Ranks that share a host meet on loopback: Gloo and NCCL would listen, for anybody, where the host's name leads."""

from __future__ import annotations

import os

VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def keep_to_loopback() -> None:
    """For this process and those it starts, before they make a process group; what the environment says goes first."""
    for name in VARIABLES:
        os.environ.setdefault(name, "lo")
