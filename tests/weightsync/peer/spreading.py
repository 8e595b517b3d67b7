"""Versions that ranks of two hosts write together, for the tests of what becomes of them."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import weightsync.format.manifest
from tests.weightsync.peer.hosts import CHUNK, MODEL
from weightsync import Publisher
from weightsync.format.manifest import Schema
from weightsync.peer.shelf import Regions, lock_of
from weightsync.publish.draft import Draft
from weightsync.publish.publisher import as_schema
from weightsync.publish.spread import Gatherer, HostShare
from weightsync.transport import Transport, open_transport

ROWS = 96 << 10 >> 8  # of a tensor of one and a half chunks, each of 256 bytes


def model(layers: int = 12, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {f"layer.{n:02d}": rng.standard_normal((ROWS, 64), np.float32) for n in range(layers)}


def schema_of(tensors: Mapping[str, np.ndarray]) -> Schema:
    return as_schema([(name, str(tensor.dtype), tensor.shape) for name, tensor in tensors.items()])


class Ranks:
    """The ranks of one host and their slot there."""

    def __init__(self, directory: Path, draft: Draft, ranks: list[int]) -> None:
        lock_of(directory, MODEL).touch()  # a peer of this host has been there, or will be
        kept = draft._publisher.kept()
        self.share = HostShare(directory, MODEL, draft.version, draft.schema, kept)
        self.writers = [weightsync.join(self.share.ticket, rank) for rank in ranks]

    def settle(self, transport: Transport, regions: Regions) -> tuple[Any, Any]:
        return self.share.settle([writer.seal() for writer in self.writers], regions, transport.endpoint)


def write(writer: Any, tensors: Mapping[str, np.ndarray], names: list[str]) -> None:
    for name in names:
        writer.write(name, tensors[name])


def accepted(
    publisher: Publisher, transport: Transport, directory: Path, tensors: Mapping[str, np.ndarray]
) -> tuple[Draft, int, HostShare]:
    """Write the second half of `tensors` on host b, whose slots are in `directory`: all but the commit. The draft, the
    bytes that were gathered, and the share."""
    names, regions = sorted(tensors), Regions(transport)
    draft = publisher.begin(schema_of(tensors))
    ranks = Ranks(directory, draft, [1])
    write(draft, tensors, names[: len(names) // 2])
    write(ranks.writers[0], tensors, names[len(names) // 2 :])
    part, offer = ranks.settle(transport, regions)
    gathered = Gatherer(transport, regions).gather(offer, draft)
    ranks.share.accept(draft.spread([], {"b": part}))
    return draft, gathered, ranks.share


def spread(
    publisher: Publisher, transport: Transport, directory: Path, tensors: Mapping[str, np.ndarray]
) -> tuple[int, int, HostShare]:
    """Publish the second half of `tensors` on host b: the version, the bytes that were gathered, and the share."""
    draft, gathered, share = accepted(publisher, transport, directory, tensors)
    return draft.commit(), gathered, share


def die(directory: Path, written: str) -> None:
    """Write a version as `accepted` does, or just the bytes of it, and kill this process."""
    weightsync.format.manifest.CHUNK = CHUNK
    publisher = Publisher(model=MODEL, lease_ttl_s=4)
    tensors = model(seed=99)
    if written == "accepted":
        with open_transport("tcp", listen="127.0.0.1", tls=None) as transport:
            held: Any = accepted(publisher, transport, directory, tensors)
            os.kill(os.getpid(), signal.SIGKILL)
    draft = publisher.begin(schema_of(tensors))
    held = Ranks(directory, draft, [1])
    write(held.writers[0], tensors, sorted(tensors))
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    die(Path(sys.argv[1]), sys.argv[2])
