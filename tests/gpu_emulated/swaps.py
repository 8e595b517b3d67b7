"""The steps that a worker goes through with each kind of model, and the faults found after each one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from tests.gpu_emulated import standin
from tests.gpu_emulated.kinds import versions_of
from tests.gpu_emulated.worker import Worker, publishing, sleep, wake
from weightsync.control.records import VersionRecord
from weightsync.vllm_engine.model.processing import Change

Steps = Iterator[tuple[str, list[str]]]
Publish = Callable[[int], VersionRecord]


LEFT = 96 << 20
"""Bytes of a full device: enough for a layer that is made while a version is staged, and less than a buffer leaves."""


class FlipFailed(Exception):
    """Raised by a commit that was made to fail."""


class _Refuses(dict[str, Any]):
    def __setitem__(self, key: str, value: Any) -> None:
        raise FlipFailed("this flip fails when its tensors have been flipped")


def swap(checkpoint: Path, *, way: str = "copy", device: int = 0) -> list[str]:
    """Everything that a worker is asked to do, one after the other: the steps after which something was wrong."""
    worker = Worker(checkpoint, way=way, device=device, sleeps=way == "copy")
    versions = versions_of(checkpoint)
    references = [worker.built(tensors) for tensors in versions]
    swaps = Swaps(worker, references)
    addresses = {name: p.data_ptr() for name, p in worker.model.named_parameters()}
    found = []
    with publishing(versions) as publish:
        for done in (swaps.flips, swaps.failed_flips, swaps.memory_runs_out, swaps.sleep_and_wake):
            found += [f"{step}: {len(wrong)} wrong, {wrong[:3]}" for step, wrong in done(publish) if wrong]
    moved = [name for name, p in worker.model.named_parameters() if p.data_ptr() != addresses[name]]
    found += [f"moved: {moved}"] if moved else []
    if kernels := standin.ask("kernels"):
        found.append(f"{kernels} kernels were launched that compute nothing here")
    return found


class Swaps:
    """`references`: the models that vLLM makes of the versions.

    A version is published under a new number each time, and only while no version with its bytes is held: such a one
    would not be staged again.
    """

    def __init__(self, worker: Worker, references: list[torch.nn.Module]) -> None:
        self._worker, self._references = worker, references
        self._index: dict[int, int] = {}  # of the tensors, by version
        self._runs: VersionRecord | None = None

    def _stage(self, publish: Publish, index: int) -> VersionRecord:
        record = publish(index)
        self._index[record.version] = index
        self._worker.stage(record)
        return record

    def _commit(self, record: VersionRecord) -> list[str]:
        """Commit `record`. Returns the differences from it afterwards."""
        self._worker.commit(record)
        self._runs = record
        return self._wrong()

    def _wrong(self) -> list[str]:
        """The differences from the version that runs; a next version that is equal to it counts as one, too."""
        assert self._runs is not None
        index = self._index[self._runs.version]
        other = self._references[(index + 1) % len(self._references)]
        alike = [] if self._worker.differences(other) else ["the next version is equal"]
        return [*self._worker.differences(self._references[index]), *alike]

    def flips(self, publish: Publish) -> Steps:
        """The first version and the second one, and back and forth between them."""
        first = self._stage(publish, 0)
        yield "staged", [] if self._worker.differences(self._references[0]) else ["it runs before its commit"]
        yield "first", self._commit(first)
        second = self._stage(publish, 1)
        self._worker.step.replay()
        self._worker.commit(second)
        yield "a step before the second", self._worker.step.unlike(self._references[0])
        for name, record in (("second", second), ("rollback", first), ("forth", second), ("back", first)):
            yield name, self._commit(record)

    def failed_flips(self, publish: Publish) -> Steps:
        """Flips that fail when their tensors have been flipped: the version before runs on, and no memory is lost."""
        for attempt in range(3):
            record = self._stage(publish, 2)
            yield f"staging {attempt}", [] if self._worker.staged_on_device() else ["it waits on the host"]
            self._worker.staged.flips.changes.append(Change("broken", _Refuses(), "broken", 1))
            try:
                self._worker.commit(record)
            except FlipFailed:
                yield f"failed flip {attempt}", self._wrong()
            else:
                yield f"failed flip {attempt}", ["it did not fail"]
        yield "flip after failed ones", self._commit(self._stage(publish, 2))

    def memory_runs_out(self, publish: Publish) -> Steps:
        """While another process has the device, versions wait on the host; afterwards they are staged there again."""
        device = self._worker.device.index
        self._worker.engine.vacate()
        standin.hold_all_but(device, LEFT)
        full = self._stage(publish, 1)
        yield "staging on a full device", ["it waits there"] if self._worker.staged_on_device() else []
        self._worker.commit(full)
        standin.hold(device, 0)
        yield "flip on a full device", self._commit(full)
        after = self._stage(publish, 0)
        yield "staging with memory again", [] if self._worker.staged_on_device() else ["it waits on the host"]
        yield "flip with memory again", self._commit(after)
        yield "rollback to what was staged on a full device", self._commit(full)

    def sleep_and_wake(self, publish: Publish) -> Steps:
        """Device memory goes back and is taken again; versions go on from host memory."""
        record = self._stage(publish, 2)
        yield "flip before sleep", self._commit(record)
        awake = self._worker.used()
        asleep = self._slept()
        yield "sleep", [] if asleep < awake else [f"{asleep} of {awake} bytes stay taken"]
        yield "wake", self._wrong()
        yield "flip after sleep", self._commit(self._stage(publish, 0))
        yield "rollback after sleep", self._commit(record)

    def _slept(self) -> int:
        """Bytes of the device that were taken meanwhile. Where vLLM's allocator does not hold the weights they stay."""
        if not self._worker.sleeps:
            self._worker.engine.vacate()
            return self._worker.used()
        sleep(self._worker)
        taken = self._worker.used()
        wake()
        return taken
