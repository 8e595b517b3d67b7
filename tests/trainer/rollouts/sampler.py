"""A sampler whose answers come when the test says so."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future

from tests.trainer.rollouts.trajectories import answer
from trainer.data.records import Record
from trainer.rewards.scorer import Score
from trainer.rollouts.schedules import Draw, Feed, Rollout, Schedule
from trainer.staleness import StepsOfVersions
from trainer.trajectory import Group, VersionSpan


class Records:
    """Endless enough; the prompt is the index."""

    def __init__(self, count: int = 1000) -> None:
        self.held_out: list[Record] = []
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Record:
        return Record(index, f"{index}=", "0", (index,), ())


def group(prompt: int, version: int, rewards: tuple[float, ...] = (0.0, 1.0)) -> Group:
    """Samples of one token each, written by `version`."""
    sample = answer((7,), (-0.5,), "stop", (VersionSpan(version, 0, 1),))
    return Group((prompt,), (sample,) * len(rewards), tuple(Score(reward, {"r": reward}) for reward in rewards))


class EveryStep(StepsOfVersions):
    """Every step is published, as the version of its number; the server has the sampler's."""

    def __init__(self, sampler: Sampler) -> None:
        super().__init__()
        self._sampler = sampler

    def __getitem__(self, version: int) -> int:
        return version

    @property
    def served(self) -> int:
        return self._sampler.version


def published(schedule: Schedule, sampler: Sampler) -> Schedule:
    """The schedule of a run that publishes every step."""
    schedule.steps = EveryStep(sampler)
    return schedule


class Sampler:
    """What a schedule starts. `version` is what the server runs; `sent` is in order; `finish` answers a draw."""

    def __init__(self) -> None:
        self.version = 0
        self.sent: list[Draw] = []
        self._open: dict[int, tuple[Future[Group], int]] = {}
        self._lock = threading.Condition()

    def __call__(self, draw: Draw) -> Future[Group]:
        future: Future[Group] = Future()
        with self._lock:
            self.sent.append(draw)
            self._open[draw.number] = (future, self.version)
            self._lock.notify_all()
        return future

    @property
    def in_flight(self) -> list[int]:
        return sorted(self._open)

    def soon(self, action: Callable[[], object]) -> threading.Thread:
        """Do it on a thread, so that the schedule may wait for it."""
        thread = threading.Thread(target=action)
        thread.start()
        return thread

    def finish(self, *numbers: int, rewards: tuple[float, ...] = (0.0, 1.0)) -> None:
        """When all of them have been sent off."""
        self._wait_for(*numbers)
        for number in numbers:
            with self._lock:
                future, version = self._open.pop(number)
            future.set_result(group(number, version, rewards))

    def fail(self, number: int, error: Exception) -> None:
        self._wait_for(number)
        self._open.pop(number)[0].set_exception(error)

    def _wait_for(self, *numbers: int) -> None:
        with self._lock:
            assert self._lock.wait_for(lambda: self._open.keys() >= set(numbers), timeout=60), (
                f"{numbers} were not sent"
            )


def useful(group: Group) -> bool:
    """DAPO's filter."""
    return len(set(group.rewards)) > 1


def everything(group: Group) -> bool:
    return True


Make = Callable[[Feed, Sampler], Schedule]


def numbers(rollouts: Iterator[Rollout]) -> list[int]:
    return [rollout.draw.number for rollout in rollouts]
