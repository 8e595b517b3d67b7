"""Where a published slot is on this worker's own host, for an instance whose workers are on several.

The leader has waited until every host has a copy (`server/instance/hosts.py`) and says where each was. What counts is
the digest of the manifest: a copy that has moved meanwhile is found in the arena of this host all the same.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from weightsync.control.hosts import HOST_ENV, this_host
from weightsync.errors import CopyUnavailable, ManifestError, SlotBusy
from weightsync.memory.receiver import SlotReader

from .bundle import PartOrder


def on_this_host(order: PartOrder) -> PartOrder:
    """`order` with the path of its slot here; itself on the one host. Raises CopyUnavailable, HostNameError."""
    if not order.places:
        return order
    host = this_host()
    place = order.places.get(host)
    if place is None:
        known = ", ".join(sorted(order.places))
        raise CopyUnavailable(order.version, host, f"its leader knows {known} alone: set {HOST_ENV} before the start")
    return replace(order, slot=str(_found(Path(place), order, host)))


def _found(place: Path, order: PartOrder, host: str) -> Path:
    """`place`, or the slot beside it that holds what was asked for. Raises CopyUnavailable."""
    for path in [place, *sorted(place.parent.glob("slot-*"))]:
        if _holds(path, order.manifest_digest):
            return path
    raise CopyUnavailable(
        order.version,
        host,
        f"no slot in {place.parent} has the manifest {order.manifest_digest} any more; see the log of `hotswap peer` "
        "there, and activate the version again",
    )


def _holds(path: Path, digest: str) -> bool:
    try:
        SlotReader.open(path, manifest_digest=digest, populate=False).close()
    except (ManifestError, SlotBusy, OSError):
        return False
    return True
