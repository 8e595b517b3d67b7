"""Deliberate errors in Hotswap's code for devices: each has to be noticed, and the same work without it goes well."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu_emulated import standin
from tests.gpu_emulated.forks import ProcessDied, WorkFailed, forked
from tests.gpu_emulated.kinds import versions_of
from tests.gpu_emulated.worker import Worker, publishing
from weightsync.memory.pinned import PinnedMap
from weightsync.vllm_engine.device import cuda, remap
from weightsync.vllm_engine.device.generation import Generation

MOST_LEFT = 32 << 20  # of a device that is too full for another buffer
Error = Callable[[], None]
Work = Callable[[Path], list[str]]


# what is done ---------------------------------------------------------------------------------------------------------


def flips(path: Path, way: str = "copy") -> list[str]:
    """To one version, another and back; steps that were queued before the second commit run on the first."""
    worker, versions = Worker(path, way=way), versions_of(path)
    references = [worker.built(tensors) for tensors in versions[:2]]
    with publishing(versions) as publish:
        first = publish(0)
        worker.flip(first)
        found = worker.differences(references[0])
        second = publish(1)
        worker.stage(second)
        worker.step.replay()
        worker.commit(second)
        found += [*worker.step.unlike(references[0]), *worker.differences(references[1])]
        worker.commit(first)
        return [*found, *worker.differences(references[0])]


def through_the_ring(path: Path) -> list[str]:
    """Where the device cannot read slots itself."""
    PinnedMap.copy = lambda *_: False  # type: ignore[method-assign]
    return flips(path)


def remaps(path: Path) -> list[str]:
    return flips(path, "remap")


def gives_back(path: Path) -> list[str]:
    """The buffer of a version is given back right behind its commit, and the next version is staged there."""
    worker, versions = Worker(path), versions_of(path)
    reference = worker.built(versions[1])
    with publishing(versions) as publish:
        worker.flip(publish(0))
        second = publish(1)
        worker.stage(second)
        committed = worker.staged
        worker.commit(second)
        committed.release()
        worker.stage(publish(2))
        return worker.differences(reference)


def exchanges(path: Path) -> list[str]:
    """A version that waits on the host is committed while the device is full."""
    worker, versions = Worker(path, way="remap"), versions_of(path)
    references = [worker.built(tensors) for tensors in versions[:2]]
    with publishing(versions) as publish:
        worker.flip(publish(0))
        worker.engine.vacate()
        standin.hold_all_but(0, MOST_LEFT)
        second = publish(1)
        worker.stage(second)
        found = ["it waits on the device"] if worker.staged_on_device() else []
        worker.used()
        standin.hold_all_but(0, 0)
        worker.commit(second)
        standin.hold(0, 0)
        return [*found, *worker.differences(references[1])]


def cancels(path: Path) -> list[str]:
    """A staging is told to stop when pieces of it are on their way: none is left behind."""
    worker, versions = Worker(path), versions_of(path)
    copies, copied = worker.engine._place.copy, 0

    def copy(target: torch.Tensor, source: Any) -> None:
        nonlocal copied
        copies(target, source)
        copied += 1
        if copied == 3:
            worker.engine._stager.stop()

    with publishing(versions) as publish:
        worker.flip(publish(0))
        worker.engine._place.copy = copy
        worker.begin(publish(1))
        worker.engine.drain_pending()
        stopped = worker.engine.report().error is not None
        left = standin.ask("queued")
        return [f"{left} pieces are left"] * bool(left) + ["it was not stopped"] * (not stopped)


# errors ---------------------------------------------------------------------------------------------------------------


def none() -> None:
    """The code as it is."""


def ring_without_waits() -> None:
    """A piece of the ring is filled again before its copy has run."""
    copy = cuda.Ring._copy

    def hurried(self: Any, target: Any, source: Any) -> None:
        self._done = [None] * cuda.PIECES
        copy(self, target, source)

    cuda.Ring._copy = hurried  # type: ignore[method-assign]


def buffer_given_back_early() -> None:
    """A buffer is free for the next version as soon as its own is complete."""
    seal = cuda.DeviceBuffer.seal

    def early(self: Any, key: str, notes: Any) -> None:
        seal(self, key, notes)
        self.pool._held = [held for held in self.pool._held if held is not self]

    cuda.DeviceBuffer.seal = early  # type: ignore[method-assign]


def commit_without_wait() -> None:
    """A commit returns before its copies have run."""

    def hurried(self: Any) -> float:
        lives, staged = zip(*self.flips.tensors, strict=True)
        with torch.no_grad():
            torch._foreach_copy_([live.data for live in lives], list(staged), non_blocking=True)
        return 0.0

    cuda.CopyGeneration._copy = hurried  # type: ignore[method-assign]


def live_tensors_that_move() -> None:
    """A commit points live tensors at the buffer, as on a CPU: graphs go on with the old addresses."""
    cuda.CopyGeneration.commit = Generation.commit  # type: ignore[method-assign]


def remapping_without_wait() -> None:
    """Other memory is mapped under steps that the device has queued."""
    show = remap.RemapPool.show

    def hurried(self: Any, buffer: Any) -> Any:
        driver, self._driver = self._driver, Impatient(self._driver)
        try:
            return show(self, buffer)
        finally:
            self._driver = driver

    remap.RemapPool.show = hurried  # type: ignore[method-assign]


class Impatient:
    """A driver that does not wait."""

    def __init__(self, driver: Any) -> None:
        self._of = driver

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name)

    def wait(self) -> None:
        pass


def scratch_that_is_refused() -> None:
    """An exchange asks for its scratch when it needs it, which is when nothing is left."""
    exchange = remap.RemapPool._exchange

    def late(self: Any, buffer: Any) -> None:
        nbytes, self._former = self._former.numel(), None
        torch.cuda.empty_cache()
        standin.hold_all_but(0, 0)
        self._former = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
        exchange(self, buffer)

    remap.RemapPool._exchange = late  # type: ignore[method-assign]


def staging_without_wait() -> None:
    """A staging ends without a wait for its stream, and so does what it reads of the slot."""

    @contextlib.contextmanager
    def reading(self: Any, reader: Any) -> Iterator[None]:
        self._slot = self._maps.of(reader.mapping)
        yield
        self._slot = None

    cuda.Cuda.reading = reading  # type: ignore[method-assign]
    cuda.Cuda.staging = lambda self: torch.cuda.stream(self._stream)  # type: ignore


ERRORS: list[tuple[Work, Error]] = [
    (through_the_ring, ring_without_waits),
    (flips, live_tensors_that_move),
    (flips, buffer_given_back_early),
    (gives_back, commit_without_wait),
    (remaps, remapping_without_wait),
    (exchanges, scratch_that_is_refused),
    (cancels, staging_without_wait),
]


def done(work: Work, path: Path, error: Error) -> list[str]:
    """Do `work` with this error, on a stand-in that runs late and poisons memory. Returns what was noticed."""

    def wrongly() -> list[str]:
        error()
        return work(path)

    try:
        found: list[str] = forked(wrongly, late=1, poison=1, mib=4 << 10)
    except (ProcessDied, WorkFailed) as failure:
        return [str(failure)]
    return found


@pytest.mark.parametrize(("work", "error"), ERRORS, ids=lambda x: x.__name__)
def test_an_error_is_noticed(checkpoint: Callable[[str], Path], work: Work, error: Error) -> None:
    assert done(work, checkpoint("dense"), error)


@pytest.mark.parametrize("work", dict.fromkeys(work for work, _ in ERRORS), ids=lambda x: x.__name__)
def test_the_same_work_goes_well_without_it(checkpoint: Callable[[str], Path], work: Work) -> None:
    assert done(work, checkpoint("dense"), none) == []
