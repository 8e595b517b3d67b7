"""Every kind of model, staged, flipped, rolled back, flipped in vain, short of memory, put to sleep and woken: each
time all parameters and buffers are, to the bit, what vLLM makes of that version, and a captured graph sees them. So
are they on the second of two devices, and where memory of the device or pinned memory is short."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.gpu_emulated import standin
from tests.gpu_emulated.forks import forked
from tests.gpu_emulated.kinds import KINDS, versions_of
from tests.gpu_emulated.swaps import swap
from tests.gpu_emulated.worker import Worker, publishing
from weightsync.vllm_engine.device import cuda

MIB = 1 << 20


@pytest.mark.parametrize("streams", ["in-order", "adversarial"])
@pytest.mark.parametrize("way", ["copy", "remap"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_is_swapped(checkpoint: Callable[[str], Path], kind: str, way: str, streams: str) -> None:
    path = checkpoint(kind)
    assert forked(lambda: swap(path, way=way), late=streams == "adversarial", poison=1, mib=8 << 10) == []


@pytest.mark.parametrize("way", ["copy", "remap"])
def test_a_worker_on_the_second_device(checkpoint: Callable[[str], Path], way: str) -> None:
    path = checkpoint("dense")

    def work() -> list[object]:
        return [swap(path, way=way, device=1), standin.ask("used0"), standin.ask("used1") > 0]

    assert forked(work, devices=2, late=1, poison=1, mib=8 << 10) == [[], 0, True]


def flipped(worker: Worker, path: Path) -> list[str]:
    """Flip to each of three versions, and roll back once. Returns the differences found after each flip."""
    versions = versions_of(path)
    references = [worker.built(tensors) for tensors in versions]
    found = []
    with publishing(versions) as publish:
        records = []
        for index, reference in enumerate(references):
            records.append(publish(index))
            worker.flip(records[-1])
            found += worker.differences(reference)
        worker.commit(records[1])
        found += worker.differences(references[1])
    return found


@pytest.mark.parametrize("left", [64, 124, 200])
def test_a_worker_starts_with_little_memory_left(checkpoint: Callable[[str], Path], left: int) -> None:
    """Another process holds the rest of the device when buffers are reserved."""
    path = checkpoint("dense")

    def work() -> list[str]:
        worker = Worker(path, copies="3", left=left * MIB)
        standin.hold(0, 0)
        return flipped(worker, path)

    assert forked(work, late=1, poison=1, mib=4096) == []


def test_copies_are_counted_against_the_part_that_the_instance_was_given(checkpoint: Callable[[str], Path]) -> None:
    path = checkpoint("dense")

    def buffers(share: float) -> int:
        worker = Worker(path, copies="auto", share=share)
        pool = worker.engine._place._pool
        return len(pool._slabs) if pool is not None else 0

    all_of_it, half, little = (forked(lambda share=share: buffers(share), mib=512) for share in (0.9, 0.45, 0.002))
    assert (all_of_it, half, little) == (3, 3, 0)


def test_the_device_reads_slots_itself(checkpoint: Callable[[str], Path]) -> None:
    path = checkpoint("dense")

    def work() -> list[object]:
        worker = Worker(path)
        found = flipped(worker, path)
        maps = [*worker.engine._place._maps._maps.values()]
        return [found, len(maps) > 1, all(held._pinned and not held._refused for held in maps)]

    assert forked(work, late=1, poison=1, mib=4096) == [[], True, True]


def test_host_memory_that_cannot_be_pinned(checkpoint: Callable[[str], Path]) -> None:
    path = checkpoint("dense")
    assert forked(lambda: flipped(Worker(path, copies="1"), path), late=1, poison=1, pin=0, mib=4096) == []


@pytest.mark.parametrize("way", ["copy", "remap"])
def test_versions_go_to_the_host_in_pieces(checkpoint: Callable[[str], Path], way: str) -> None:
    """A copy of a step to the host may have to wait for one piece, and not for a version."""
    path, piece = checkpoint("dense"), 64 << 10

    def work() -> list[object]:
        cuda.PIECE_NBYTES = piece
        worker = Worker(path, way=way)
        versions = versions_of(path)
        with publishing(versions) as publish:
            worker.flip(publish(0))
            worker.flip(publish(1))
            standin.copied_to_host(0)
            worker.stage(publish(2))  # one of the others moves to the host for it
            return [worker.staged_on_device(), standin.ask("largest_to_host")]

    on_device, largest = forked(work, mib=4096)
    assert on_device
    assert 0 < largest <= piece
