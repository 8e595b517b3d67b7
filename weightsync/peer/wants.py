"""Which slots a host should have, the most urgent first, from the records alone."""

from __future__ import annotations

from weightsync.board import Board
from weightsync.peer.copies import pieces
from weightsync.records import PartRecord, VersionRecord
from weightsync.swap.state import in_flight


def ready_versions(board: Board) -> list[VersionRecord]:
    """Those whose copies are worth keeping."""
    return [version for version in board.versions if version.state == "ready"]


def wanted_slots(board: Board) -> list[PartRecord]:
    """The slots of the version that is being swapped in, of the one asked for, the active one and the one before."""
    found: dict[str, PartRecord] = {}
    for number in wanted_versions(board):
        version = board.version(number)
        if version is not None and version.state == "ready":
            for part in pieces(version):
                found.setdefault(part.manifest_digest, part)
    return list(found.values())


def wanted_versions(board: Board) -> list[int]:
    """What instances may have to stage, the most urgent first."""
    swap, target, active = board.swap, board.target, board.active
    numbers: list[int | None] = []
    if swap is not None and in_flight(swap):
        numbers.append(swap.target)
    if target is not None and (swap is None or swap.id != target.id):
        numbers.append(target.version)
    if active is not None:
        numbers += [active.version, active.previous]
    return list(dict.fromkeys(number for number in numbers if number is not None))
