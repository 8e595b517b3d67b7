"""Which file system a path is on."""

from __future__ import annotations

from pathlib import Path

from server.doctor.world import World


def file_system(world: World, path: Path) -> str | None:
    """Its type, such as "tmpfs" or "nfs4"; None if /proc/mounts cannot be read."""
    place, best = path.resolve(), (0, None)
    for line in (world.read("/proc/mounts") or "").splitlines():
        _, point, kind, *_ = line.split()
        where = Path(point.replace("\\040", " "))
        if place.is_relative_to(where) and len(where.parts) >= best[0]:
            best = (len(where.parts), kind)  # type: ignore[assignment]
    return best[1]
