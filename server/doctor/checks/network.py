"""The network between hosts: RDMA devices, and transports."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from server.doctor.registry import Finding, check, fail, ok, skip, warn
from server.doctor.world import World

CLASS = "/sys/class/infiniband"
VERBS = "/sys/class/infiniband_verbs"


def devices(world: World) -> list[Path]:
    """The devices' directories in /sys, by name."""
    directory = world.path(CLASS)
    return sorted(directory.iterdir()) if directory.is_dir() else []


@check("rdma", "RDMA devices, the state of their ports, and access to them")
def rdma(world: World) -> Iterator[Finding]:
    found = devices(world)
    if not found:
        yield skip("no RDMA devices (/sys/class/infiniband): versions go between hosts over TCP")
    for device in found:
        yield _ports(device)
        yield _access(world, device.name)


def _ports(device: Path) -> Finding:
    ports = sorted((device / "ports").glob("*"))
    said = [(port.name, _word(port / "state"), _word(port / "link_layer"), _word(port / "rate")) for port in ports]
    text = f"{device.name}: " + ("; ".join(f"port {' '.join(words)}" for words in said) or "no ports")
    if any(state == "ACTIVE" for _, state, *_ in said):
        return ok(text)
    mend = "Look at cable and switch; InfiniBand needs a subnet manager (opensm), RoCE an address on its interface"
    return warn(text, f"{mend}. Until then it is not used")


def _word(path: Path) -> str:
    """`4: ACTIVE` as `ACTIVE`."""
    try:
        return path.read_text().strip().rpartition(": ")[2]
    except OSError:
        return "?"


def _access(world: World, device: str) -> Finding:
    for verbs in sorted(world.path(VERBS).glob("uverbs*")):
        if world.read(f"{VERBS}/{verbs.name}/ibdev") != device:
            continue
        node = world.path(f"/dev/infiniband/{verbs.name}")
        if not node.exists():
            return fail(f"{device}: no {node}", "Pass the device into the container (an RDMA device plug-in, --device)")
        if not os.access(node, os.R_OK | os.W_OK):
            return fail(f"{device}: {node} may not be opened by this user", "Allow it by a udev rule or its group")
        return ok(f"{device}: {node} may be opened")
    return fail(f"{device}: no uverbs device", "Load ib_uverbs (modprobe ib_uverbs)")


@check("transports", "what can carry versions between hosts")
def transports(world: World) -> Iterator[Finding]:
    from weightsync.transport import available

    yield from judge_transports(available())


def judge_transports(found: Mapping[str, str]) -> Iterator[Finding]:
    """By name, why it cannot be used; empty if it can."""
    usable = [name for name, why in found.items() if not why]
    missing = "; ".join(f"{name}: {why}" for name, why in found.items() if why)
    if not usable:
        yield warn(missing, "Install one of them (requirements/); on a single host none is needed")
        return
    yield ok(f"{', '.join(usable)} can be used")
    if missing:
        yield skip(f"not available: {missing}")
