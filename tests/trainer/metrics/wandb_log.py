"""Records of a `.wandb` file: LevelDB's log format (blocks of 32 KiB, each piece with checksum, length, type)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.waiting import wait_until

BLOCK, FILE_HEADER, PIECE_HEADER = 32768, 7, 7
FULL, LAST = 1, 4


def records(path: Path) -> Iterator[Any]:
    """W&B's own protobuf messages."""
    from wandb.proto import wandb_internal_pb2

    for data in _messages(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        yield record


def written(path: Path, timeout_s: float = 60.0) -> list[Any]:
    """All records of a run that has ended: another process may still write them when the run's own has done with it."""

    def whole() -> list[Any]:
        found = list(records(path))
        return found if any(record.WhichOneof("record_type") == "exit" for record in found) else []

    return wait_until(whole, timeout_s, "the run's end")


def _messages(content: bytes) -> Iterator[bytes]:
    assert content[:4] == b":W&B"
    offset, message = FILE_HEADER, b""
    while offset + PIECE_HEADER <= len(content):
        if BLOCK - offset % BLOCK < PIECE_HEADER:  # too little is left in the block for a header
            offset += BLOCK - offset % BLOCK
            continue
        length, kind = int.from_bytes(content[offset + 4 : offset + 6], "little"), content[offset + 6]
        offset += PIECE_HEADER
        if offset + length > len(content):
            return  # it is being written
        message += content[offset : offset + length]
        offset += length
        if kind in (FULL, LAST):
            yield message
            message = b""
