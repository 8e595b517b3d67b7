"""A host without a peer writes into memory, which reaches the slot byte for byte, over a real transport; failures are
typed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch

import weightsync
from tests.weightsync.codes import refused
from weightsync import Publisher, SlotReader
from weightsync.errors import PublishError, SlotBusy, TransferError
from weightsync.peer.shelf import Regions
from weightsync.publish.publisher import as_schema
from weightsync.publish.spread import Gatherer, HostShare, MemorySlot
from weightsync.transport import Transport, open_transport

SCHEMA = as_schema(
    [
        ("column", "float32", (8, 4)),
        ("row", "float32", (4, 8)),
        ("deep", "bfloat16", (3, 8, 5)),
        ("whole", "int8", (300,)),
        ("empty", "float32", (0, 4)),
        ("scalar", "float32", ()),
    ]
)
FULL: dict[str, Any] = {
    "column": np.arange(32, dtype=np.float32).reshape(8, 4),
    "row": np.arange(32, 64, dtype=np.float32).reshape(4, 8),
    "deep": torch.arange(120).reshape(3, 8, 5).to(torch.bfloat16),
    "whole": np.arange(300).astype(np.int8),
    "empty": np.zeros((0, 4), np.float32),
    "scalar": np.array(2.5, np.float32),
}


@pytest.fixture
def here() -> Iterator[Transport]:
    with open_transport("tcp", listen="127.0.0.1", tls=None) as transport:
        yield transport


@pytest.fixture
def there() -> Iterator[Transport]:
    with open_transport("tcp", listen="127.0.0.1", tls=None) as transport:
        yield transport


def raw(tensor: Any) -> bytes:
    return bytes(tensor.view(torch.int16).numpy() if isinstance(tensor, torch.Tensor) else tensor.tobytes())


def contents(publisher: Publisher) -> dict[str, bytes]:
    """The bytes of every tensor of the last version, verified."""
    record = publisher.versions()[-1]
    with SlotReader.open(record.slot, manifest_digest=record.manifest_digest) as reader:
        reader.verify_all()
        return {name: bytes(reader.buffer(name)) for name in reader.manifest.tensors}


def halves(writer: Any, half: int) -> None:
    """The tensors of one of two tensor parallel ranks: half of what is cut, along two dimensions."""
    writer.write_slice("column", FULL["column"][4 * half : 4 * half + 4], 4 * half)
    writer.write_slice("row", FULL["row"][:, 4 * half : 4 * half + 4], 4 * half, dim=1)
    writer.write_slice("deep", FULL["deep"][:, 4 * half : 4 * half + 4], 4 * half, dim=1)


@pytest.fixture
def memory() -> Iterator[MemorySlot]:
    slot = MemorySlot(SCHEMA)
    yield slot
    slot.close()


def of_another_host(share: HostShare) -> list[Any]:
    """The parts that two ranks there have sealed."""
    one, other = (weightsync.join(share.ticket, rank) for rank in (1, 2))
    halves(one, 1)
    for name in ("whole", "empty", "scalar"):
        other.write(name, FULL[name])
    return [one.seal(), other.seal()]


def test_a_version_of_two_hosts_is_whole(
    publisher: Publisher, memory: MemorySlot, here: Transport, there: Transport
) -> None:
    """The memory is registered once for all versions."""
    gatherer, regions, registered = Gatherer(here, Regions(here)), Regions(there), set()
    for step in range(3):
        draft = publisher.begin(SCHEMA, step=step)
        halves(draft, 0)
        share = HostShare(memory, "m", draft.version, SCHEMA, [])
        part, offer = share.settle(of_another_host(share), regions, there.endpoint)
        share.close()
        part, offer = json.loads(json.dumps([part, offer]))
        theirs = sum(FULL[name].nbytes for name in ("whole", "scalar"))
        cut = sum(FULL[name].nbytes for name in ("column", "row", "deep")) // 2
        assert gatherer.gather(offer, draft) == theirs + cut
        assert int(part["stay"], 16) == 0
        draft.commit(part)
        assert contents(publisher) == {name: raw(tensor) for name, tensor in FULL.items()}
        registered.add(offer["region"])
    assert len(registered) == 1


HOLDER = """
import json, sys
import numpy as np, weightsync
from weightsync.peer.shelf import Regions
from weightsync.publish.publisher import as_schema
from weightsync.publish.spread import HostShare, MemorySlot
from weightsync.transport import open_transport
with open_transport(sys.argv[1], listen="127.0.0.1", tls=None) as transport:
    schema = as_schema([("a", "float32", (1000, 1000)), ("b", "float32", (10, 10))])
    share = HostShare(MemorySlot(schema), "m", 1, schema, [])
    writer = weightsync.join(share.ticket, 1)
    writer.write("a", np.arange(1000000, dtype=np.float32).reshape(1000, 1000))
    print(json.dumps(share.settle([writer.seal()], Regions(transport), transport.endpoint)), flush=True)
    sys.stdin.read()
"""


def test_another_process_holds_it_and_dies(publisher: Publisher, here: Transport) -> None:
    command = [sys.executable, "-c", HOLDER, "tcp"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        part, offer = json.loads(holder.stdout.readline())
        schema = [("a", "float32", (1000, 1000)), ("b", "float32", (10, 10))]
        gatherer = Gatherer(here, Regions(here))
        with publisher.begin(schema) as draft:
            assert gatherer.gather(offer, draft) == 4_000_000
            draft.write("b", np.ones((10, 10), np.float32))
            draft.commit(part)
        assert contents(publisher)["a"] == np.arange(1000000, dtype=np.float32).tobytes()
        holder.kill()
        holder.wait()
        with publisher.begin(schema) as draft, pytest.raises(TransferError) as caught:
            gatherer.gather(offer, draft)
        assert caught.value.code in ("peer_unreachable", "transfer_failed")
    assert [version.state for version in publisher.versions()] == ["ready"]


def test_what_nobody_gathered_is_missing(publisher: Publisher, memory: MemorySlot, there: Transport) -> None:
    with publisher.begin(SCHEMA) as draft:
        share = HostShare(memory, "m", draft.version, SCHEMA, [])
        with pytest.raises(SlotBusy, match="still writes the version before"):
            HostShare(memory, "m", draft.version, SCHEMA, [])
        part, _ = share.settle([weightsync.join(share.ticket, 1).seal()], Regions(there), there.endpoint)
        halves(draft, 0)
        with refused("missing_tensor"):
            draft.commit(part)


def test_only_what_is_written_takes_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    schema = as_schema([("a", "int8", (64 << 20,)), ("b", "int8", (1000,))])
    memory = MemorySlot(schema)
    share = HostShare(memory, "m", 1, schema, [])
    writer = weightsync.join(share.ticket, 1)
    writer.write("b", np.ones(1000, np.int8))
    assert os.fstat(writer.lock.fd).st_blocks * 512 < 1 << 20
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    writer.write("b", np.ones(1000, np.int8))
    with pytest.raises(PublishError, match="'a' needs 67,108,864 bytes of memory, 1,000 are free"):
        writer.write("a", np.ones(64 << 20, np.int8))
    writer.release()
    share.close()
    memory.close()
