"""What ranks on other hosts hold reaches the slot byte for byte, through a real transport; failures are typed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from weightsync import Collector, Publisher, Share, SlotReader
from weightsync.errors import (
    DigestMismatch,
    MissingTensor,
    PeerUnreachable,
    PublishError,
    ShapeMismatch,
    TransferFailed,
    TransportUnavailable,
    UnexpectedTensor,
)
from weightsync.publish.publisher import as_schema
from weightsync.publish.shares import Block
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
    """What one of two tensor parallel ranks has: half of what is cut, along two dimensions."""
    writer.write_slice("column", FULL["column"][4 * half : 4 * half + 4], 4 * half)
    writer.write_slice("row", FULL["row"][:, 4 * half : 4 * half + 4], 4 * half, dim=1)
    writer.write_slice("deep", FULL["deep"][:, 4 * half : 4 * half + 4], 4 * half, dim=1)


def of_another_host(share: Share) -> dict[str, Any]:
    halves(share, 1)
    for name in ("whole", "empty", "scalar"):
        share.write(name, FULL[name])
    return share.seal()


def test_a_version_of_two_hosts_is_whole(publisher: Publisher, here: Transport, there: Transport) -> None:
    """Blocks smaller than a tensor, of its size and larger; each is registered once for all versions."""
    for block_nbytes in (1, 64, 1 << 20):
        share, collector = Share(there, SCHEMA, block_nbytes=block_nbytes), Collector(here)
        regions = set()
        for step in range(3):
            draft = publisher.begin(SCHEMA, step=step)
            halves(draft, 0)
            offer = json.loads(json.dumps(of_another_host(share)))
            assert collector.collect(offer, draft) == sum(block["nbytes"] for block in offer["blocks"])
            draft.commit()
            assert contents(publisher) == {name: raw(tensor) for name, tensor in FULL.items()}
            regions.add(json.dumps([block["region"] for block in offer["blocks"]]))
        assert len(regions) == 1
        share.close()
        collector.close()


HOLDER = """
import json, sys
import numpy as np
from weightsync import Share
from weightsync.publish.publisher import as_schema
from weightsync.transport import open_transport
with open_transport(sys.argv[1], listen="127.0.0.1", tls=None) as transport:
    share = Share(transport, as_schema([("a", "float32", (1000, 1000)), ("b", "float32", (10, 10))]))
    share.write("a", np.arange(1000000, dtype=np.float32).reshape(1000, 1000))
    print(json.dumps(share.seal()), flush=True)
    sys.stdin.read()
"""


def test_another_process_holds_it_and_dies(publisher: Publisher, here: Transport) -> None:
    command = [sys.executable, "-c", HOLDER, "tcp"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        offer = json.loads(holder.stdout.readline())
        schema = [("a", "float32", (1000, 1000)), ("b", "float32", (10, 10))]
        collector = Collector(here)
        with publisher.begin(schema) as draft:
            assert collector.collect(offer, draft) == 4_000_000
            draft.write("b", np.ones((10, 10), np.float32))
            draft.commit()
        assert contents(publisher)["a"] == np.arange(1000000, dtype=np.float32).tobytes()
        holder.kill()
        holder.wait()
        with publisher.begin(schema) as draft, pytest.raises((PeerUnreachable, TransferFailed)):
            collector.collect(offer, draft)
    assert [version.state for version in publisher.versions()] == ["ready"]


def test_bytes_that_changed_on_the_way_are_refused_by_name(
    publisher: Publisher, here: Transport, there: Transport
) -> None:
    for name in ("whole", "column"):
        share = Share(there, SCHEMA)
        if name == "whole":
            share.write(name, FULL[name])
        else:
            share.write_slice(name, FULL[name][:4], 0)
        share._blocks[0].view[0] ^= 1
        with publisher.begin(SCHEMA) as draft, pytest.raises(DigestMismatch, match=name):
            Collector(here).collect(share.seal(), draft)


def test_what_nobody_collected_is_missing(publisher: Publisher, here: Transport, there: Transport) -> None:
    share = Share(there, SCHEMA)
    of_another_host(share)
    with publisher.begin(SCHEMA) as draft:
        assert Collector(here).collect(Share(there, SCHEMA).seal(), draft) == 0
        halves(draft, 0)
        with pytest.raises(MissingTensor):
            draft.commit()


def test_a_share_refuses_what_a_slot_refuses(there: Transport) -> None:
    share = Share(there, SCHEMA)
    with pytest.raises(UnexpectedTensor):
        share.write("what", np.zeros(3, np.float32))
    with pytest.raises(ShapeMismatch):
        share.write("column", np.zeros((4, 4), np.float32))
    with pytest.raises(ShapeMismatch):
        share.write_slice("column", np.zeros((5, 4), np.float32), 4)


def test_a_discarded_share_is_offered_to_nobody(there: Transport) -> None:
    share = Share(there, SCHEMA)
    share.write("whole", FULL["whole"])
    share.discard()
    share.write("scalar", FULL["scalar"])
    (block,) = share.seal()["blocks"]
    assert [(held["name"], held["offset"]) for held in block["held"]] == [("scalar", 0)]


def test_no_memory_and_no_offer_are_publish_errors(publisher: Publisher, here: Transport) -> None:
    with pytest.raises(PublishError, match="needs 1,152,921,504,606,846,976 bytes of memory"):
        Block(here, 1 << 60, writable=True)
    with publisher.begin(SCHEMA) as draft:
        with pytest.raises(PublishError, match="cannot be read"):
            Collector(here).collect({"endpoint": 3}, draft)
        held = {"name": "whole", "dtype": "int8", "shape": [300], "dim": -1, "start": 0, "offset": 1, "digest": ""}
        with pytest.raises(PublishError, match="'whole' reaches beyond"):
            Collector(here).collect({"endpoint": "", "blocks": [{"region": "", "nbytes": 300, "held": [held]}]}, draft)


def test_a_collector_that_once_got_no_memory_collects_again(
    publisher: Publisher, here: Transport, there: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory of before is given up for more, which there is not."""
    small, large, collector = Share(there, SCHEMA), Share(there, SCHEMA), Collector(here)
    small.write("scalar", FULL["scalar"])
    offer = of_another_host(large)
    with publisher.begin(SCHEMA) as draft:
        collector.collect(small.seal(), draft)
        with monkeypatch.context() as patch:
            patch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1))
            with pytest.raises(PublishError, match="are free"):
                collector.collect(offer, draft)
        collector.collect(offer, draft)
        halves(draft, 0)
        draft.commit()
    assert contents(publisher) == {name: raw(tensor) for name, tensor in FULL.items()}
    collector.close()


class Ended:
    """A region of a library whose process has ended, and does not start any more."""

    @property
    def descriptor(self) -> bytes:
        raise TransportUnavailable("nixl", "its process has ended", "Start it again")


def test_a_share_that_could_not_be_offered_is_forgotten(there: Transport) -> None:
    share = Share(there, SCHEMA)
    share.write("whole", FULL["whole"])
    region, share._blocks[0].region = share._blocks[0].region, Ended()  # type: ignore[assignment]
    with pytest.raises(TransportUnavailable):
        share.seal()
    share._blocks[0].region = region
    share.write("scalar", FULL["scalar"])
    assert [held["name"] for block in share.seal()["blocks"] for held in block["held"]] == ["scalar"]
