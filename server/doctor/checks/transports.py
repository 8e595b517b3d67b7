"""What carries versions between hosts here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from server.doctor.finding import Finding, ok, skip, warn
from server.doctor.registry import check
from server.doctor.world import World


@check("transports", "what can carry versions between hosts")
def transports(world: World) -> Iterator[Finding]:
    from weightsync.transport import available

    yield from judge(available())


def judge(found: Mapping[str, str]) -> Iterator[Finding]:
    """By name, why it cannot be used; empty if it can."""
    usable = [name for name, why in found.items() if not why]
    missing = "; ".join(f"{name}: {why}" for name, why in found.items() if why)
    if not usable:
        yield warn(missing, "Install one of them (requirements/); on a single host none is needed")
        return
    yield ok(f"{', '.join(usable)} can be used")
    if missing:
        yield skip(f"not available: {missing}")
