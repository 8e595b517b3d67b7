"""What every transport refuses before a byte moves."""

from __future__ import annotations

from collections.abc import Sequence

from weightsync.errors import TransferFailed
from weightsync.transport.protocol import Buffer, Piece


def bytes_of(buffer: Buffer, *, writable: bool) -> memoryview:
    """The buffer as bytes. Raises ValueError when it is not contiguous, or read-only and to be written."""
    view = memoryview(buffer)
    if not view.c_contiguous:
        raise ValueError("only a contiguous buffer can be registered")
    if writable and view.readonly:
        raise ValueError("a region that is read into needs a writable buffer")
    return view.cast("B")


def check_pieces(peer: str, pieces: Sequence[Piece], local_nbytes: int, remote_nbytes: int) -> None:
    """Raises TransferFailed when a piece reaches beyond one of the regions."""
    for piece in pieces:
        if piece.local_offset + piece.nbytes > local_nbytes:
            raise TransferFailed(peer, f"{piece} reaches beyond the {local_nbytes:,} bytes of the region it goes to")
        if piece.remote_offset + piece.nbytes > remote_nbytes:
            raise TransferFailed(peer, f"{piece} reaches beyond the {remote_nbytes:,} bytes of the peer's region")
