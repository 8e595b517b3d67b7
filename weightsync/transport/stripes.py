"""How one read is spread over several connections."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from weightsync.transport.protocol import Piece

MIN_STRIPE = 1 << 20  # bytes; less is not worth a connection of its own


def stripes(pieces: Sequence[Piece], count: int) -> list[list[Piece]]:
    """The same bytes in at most `count` lists of equal size, the last one shorter, none made below MIN_STRIPE."""
    total = sum(piece.nbytes for piece in pieces)
    size = max(MIN_STRIPE, -(-total // count))
    parts: list[list[Piece]] = []
    room = 0
    for piece in _cut_at(pieces, size):
        if room < piece.nbytes or not parts:
            parts.append([])
            room = size
        parts[-1].append(piece)
        room -= piece.nbytes
    return parts


def _cut_at(pieces: Sequence[Piece], size: int) -> Iterable[Piece]:
    """The same bytes, cut where a stripe of `size` bytes is full; empty pieces fall away."""
    room = size
    for piece in pieces:
        done = 0
        while done < piece.nbytes:
            taken = min(room, piece.nbytes - done)
            yield Piece(piece.local_offset + done, piece.remote_offset + done, taken)
            done += taken
            room = room - taken or size
