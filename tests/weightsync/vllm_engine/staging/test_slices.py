"""Bytes that ranks read of a version, by vLLM's own loaders: with those alone they build all that they run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from loadtest.models.equality import publish
from loadtest.models.kinds import make_kind
from loadtest.models.vllm_worker import Worker, worker
from server.instance.hosts import Reads, joined_reads
from tests.weightsync.codes import refused
from tests.weightsync.vllm_engine.model.test_placement import assert_built, checkpoint_of, loaded, tensors_of
from weightsync import Publisher
from weightsync.control.records import VersionRecord
from weightsync.format.fingerprint import combine
from weightsync.format.manifest import Layout, Schema, TensorSpec
from weightsync.format.slices import Slices
from weightsync.peer.chunks import Head, manifest_of
from weightsync.publish.spread import chunks_of

pytestmark = pytest.mark.engine
CHUNK = 8 << 10


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightsync.format.manifest.CHUNK", CHUNK)


def schema_of(tensors: dict[str, torch.Tensor]) -> Schema:
    return Schema({n: TensorSpec(str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in tensors.items()})


def part_of(record: VersionRecord, slices: Slices, name: str, *, without: int = 0) -> tuple[VersionRecord, float]:
    """The version with a file that has just the chunks of `slices`, but for those in `without` (bits), and which part
    of the slot those are."""
    slot = Path(record.slot)
    raw = slot.read_bytes()
    head = Head.parse(manifest_of(memoryview(raw), record.manifest_digest), record.manifest_digest)
    assert head.shape is not None
    chunks, data = slices.chunks(len(raw), CHUNK) & ~without, bytearray(b"\xaa" * len(raw))
    for chunk in range(head.shape.chunks):
        if chunks >> chunk & 1:
            start, end = head.shape.bounds(chunk)
            data[start:end] = raw[start:end]
    head.write(memoryview(data), part=True)
    path = slot.with_name(f"slot-{name}")
    path.write_bytes(data)
    return replace(record, slot=str(path)), chunks.bit_count() / head.shape.chunks


def ranks(checkpoint: Path, world: int, stages: int, **options: Any) -> Iterator[Worker]:
    for stage in range(stages):
        for rank in range(world):
            with worker(checkpoint, rank=rank, world=world, stage=stage, stages=stages, **options) as w:
                yield w


def reads_of(schema: Schema, hosts: list[str], workers: Iterator[Worker]) -> Reads:
    """Of the workers on these hosts, by what each answers to `hotswap_reads`."""
    answers = []
    for w in workers:
        reads = w.stager.reads(schema)
        unread = sum(1 << n for n, name in enumerate(schema.tensors) if name in reads.unread)
        answers.append((reads.slices.to_text(), f"{unread:x}"))
    rows = [[n, spec.dtype, list(spec.shape)] for n, spec in schema.tensors.items()]
    joined = joined_reads(rows, hosts, answers)
    assert joined is not None
    return joined


@pytest.mark.parametrize(
    ("name", "world", "stages", "most"),
    [
        ("qwen2", 2, 1, 0.9),
        ("qwen3", 4, 1, 0.9),
        ("llama padded", 4, 1, 0.8),
        ("qwen2 tied", 2, 1, 0.9),
        ("llama", 1, 3, 0.7),
        ("qwen3 tied", 1, 2, 0.9),
        ("llama", 2, 3, 0.6),
    ],
)
def test_ranks_build_from_what_they_say_that_they_read(
    name: str, world: int, stages: int, most: float, tmp_path: Path, publisher: Publisher
) -> None:
    """Each on a host of its own; together they vouch for all bytes that were published, those that nothing reads too.

    qwen3 has one key-value head here: every rank holds a copy of it.
    """
    checkpoint = checkpoint_of(tmp_path, name, "bfloat16")
    tensors = tensors_of(checkpoint)
    if "tied" in name:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1  # which nothing reads
    record, schema = publish(publisher, tensors), schema_of(tensors)
    hosts = [f"h{n}" for n in range(world * stages)]
    reads = reads_of(schema, hosts, ranks(checkpoint, world, stages))
    assert reads.unread == (("lm_head.weight",) if "tied" in name else ())
    sums, parts = [], []
    for host, w in zip(hosts, ranks(checkpoint, world, stages), strict=True):
        part, share = part_of(record, reads.slices[host], host)
        generation = w.stage(part, reads.unread)
        if stages == 1:
            assert_built(w, generation.slot.data, loaded(w, tensors))
        sums.append(w.stager.report.sums)
        parts.append(share)
        generation.release()
    assert combine(sums) == record.fingerprint
    if world > 1:
        with refused("parts_mismatch", match="ranks hold"):
            combine(sums[:-1])
    assert max(parts[1:]) < most, parts
    assert sum(parts) > 0.8  # all but the header


def test_what_is_not_here_is_not_taken(tmp_path: Path, publisher: Publisher) -> None:
    """One chunk lacks: the staging is refused, whichever it is."""
    checkpoint = checkpoint_of(tmp_path, "qwen2", "bfloat16")
    tensors = tensors_of(checkpoint)
    record, schema = publish(publisher, tensors), schema_of(tensors)
    with worker(checkpoint, rank=1, world=2) as w:
        slices = w.stager.reads(schema).slices
        chunks = slices.chunks(Path(record.slot).stat().st_size, CHUNK)
        for chunk in (n for n in range(chunks.bit_length()) if chunks >> n & 1):
            part, _ = part_of(record, slices, "lacks", without=1 << chunk)
            with pytest.raises(AssertionError, match="digest_mismatch"):
                w.stage(part)
        w.stage(part_of(record, slices, "has")[0]).release()


@pytest.mark.parametrize("world", [1, 2])
def test_ranks_that_share_the_experts(world: int, tmp_path: Path, publisher: Publisher) -> None:
    """Expert parallel: a rank reads its own experts whole, and none of the others."""
    checkpoint = make_kind(tmp_path / "moe", "moe")
    tensors = tensors_of(checkpoint)
    record, schema = publish(publisher, tensors), schema_of(tensors)
    layout, hosts = Layout.of(schema), [f"h{n}" for n in range(world)]
    reads = reads_of(schema, hosts, ranks(checkpoint, world, 1, enable_expert_parallel=True))
    sums, seen = [], []
    experts = {name for name in tensors if ".experts." in name}
    for host, w in zip(hosts, ranks(checkpoint, world, 1, enable_expert_parallel=True), strict=True):
        part, _ = part_of(record, reads.slices[host], host)
        w.stage(part, reads.unread).release()
        sums.append(w.stager.report.sums)
        chunks = reads.slices[host].chunks(layout.total_nbytes, CHUNK)
        seen.append({name for name in experts if not chunks_of(schema, layout, [name]) & ~chunks})
    assert combine(sums) == record.fingerprint
    assert set.union(*seen) == experts
    assert all(len(names) < 0.8 * len(experts) for names in seen) == (world == 2)
