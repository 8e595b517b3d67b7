"""Data-parallel ranks that share experts flip at one of their common steps, whenever each of them hears of the commit.

Ranks are threads here. Their loop is vLLM's, reduced to what counts steps; every step is a forward pass that all of
them take together, as the exchange of experts has it.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from weightsync.vllm_engine.engine_core import steps

INTERVAL = 4
RANKS = 3
LONGEST_S = 20.0


class Rank:
    """`DPEngineCoreProc`, as far as steps go. `passes`: the version that computed each of its forward passes."""

    engines_running, step_counter, dp_sync_interval = True, 0, INTERVAL

    def __init__(self, together: Together, rank: int) -> None:
        self.dp_group, self.rank, self.version = together, rank, 0
        self.passes = list[int]()
        self.answers = list[Future[dict[str, Any]]]()

    def commit(self, version: int) -> None:
        def flip() -> dict[str, Any]:
            self.version = version
            return {"rank": self.rank}

        self.answers.append(steps.at_common_step(self, version, flip))

    def step(self, unfinished: bool) -> None:
        self.dp_group.wait()
        self.passes.append(self.version)
        self.engines_running = _has_global_unfinished_reqs(self, unfinished)


def _original(rank: Any, unfinished: bool) -> bool:
    rank.step_counter += 1
    if rank.step_counter != 1 and rank.step_counter % INTERVAL != 0:
        return True
    return any(rank.dp_group.exchange(rank.rank, unfinished))


_has_global_unfinished_reqs = steps.meeting(_original)


class Together:
    """An exchange of what ranks tell each other, all at the same time."""

    def __init__(self, ranks: int) -> None:
        self._barrier, self._said = threading.Barrier(ranks, timeout=LONGEST_S), [None] * ranks

    def wait(self) -> None:
        self._barrier.wait()

    def exchange(self, rank: int, said: Any) -> list[Any]:
        self._said[rank] = said
        self._barrier.wait()
        heard = list(self._said)
        self._barrier.wait()
        return heard


@pytest.fixture
def exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    def agreed(core: Any, version: int) -> bool:
        heard = core.dp_group.exchange(core.rank, version)
        return version != steps.NOTHING and set(heard) == {version}

    monkeypatch.setattr(steps, "agreed", agreed)


def run(loop: Callable[[Rank], None]) -> list[Rank]:
    """One thread for each rank; what one raises is raised."""
    ranks = [Rank(together, n) for together in [Together(RANKS)] for n in range(RANKS)]
    failures = list[BaseException]()

    def guarded(rank: Rank) -> None:
        try:
            loop(rank)
        except BaseException as error:
            failures.append(error)
            rank.dp_group._barrier.abort()

    threads = [threading.Thread(target=guarded, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONGEST_S)
    if failures:
        raise failures[0]
    return ranks


@pytest.mark.usefixtures("exchanged")
@pytest.mark.parametrize("seed", range(20))
def test_no_step_has_two_versions(seed: int) -> None:
    """Commits reach the ranks at steps of their own, one after the other is done, as the instance sends them."""
    chance = random.Random(seed)
    heard = {version: [chance.randrange(3 * INTERVAL) for _ in range(RANKS)] for version in (1, 2, 3)}
    busy = [chance.random() < 0.5 for _ in range(RANKS)]

    def loop(rank: Rank) -> None:
        for version, after in heard.items():
            for _ in range(after[rank.rank]):
                rank.step(busy[rank.rank])
            rank.commit(version)
            rank.step(busy[rank.rank])
            while not rank.answers[-1].done():
                assert rank.engines_running, "a rank that was asked goes on until the others were"
                rank.step(busy[rank.rank])

    ranks = run(loop)
    assert len({tuple(rank.passes) for rank in ranks}) == 1
    assert [rank.version for rank in ranks] == [3] * RANKS
    assert [[answer.result() for answer in rank.answers] for rank in ranks] == [[{"rank": n}] * 3 for n in range(RANKS)]
    waited = [step for step, (one, other) in enumerate(zip(ranks[0].passes, ranks[0].passes[1:], strict=False), 1)
              if one != other]  # fmt: skip
    assert all(step == 1 or step % INTERVAL == 0 for step in waited), "flips are between steps that are common"


@pytest.mark.usefixtures("exchanged")
def test_idle_ranks_stop_after_the_commit() -> None:
    def loop(rank: Rank) -> None:
        rank.engines_running = False
        rank.commit(1)
        while rank.engines_running:
            rank.step(False)

    ranks = run(loop)
    assert [rank.passes for rank in ranks] == [[0]] * RANKS, "one empty batch, and the flip behind it"
    assert [rank.version for rank in ranks] == [1] * RANKS


@pytest.mark.usefixtures("exchanged")
def test_a_rank_whose_flip_fails_says_so_and_the_others_have_flipped() -> None:
    def refuse() -> dict[str, Any]:
        raise KeyError("version 1 is not staged")

    def loop(rank: Rank) -> None:
        if rank.rank == 1:
            rank.answers.append(steps.at_common_step(rank, 1, refuse))
        else:
            rank.commit(1)
        rank.step(False)

    ranks = run(loop)
    assert [rank.version for rank in ranks] == [1, 0, 1]
    assert [type(rank.answers[0].exception()) for rank in ranks] == [type(None), KeyError, type(None)]


def test_one_commit_waits_at_a_time() -> None:
    rank = Rank(Together(1), 0)
    rank.commit(1)
    with pytest.raises(RuntimeError, match="version 1 waits"):
        rank.commit(2)


@pytest.mark.parametrize(
    ("named", "agree"),
    [((7, 7), [True, True]), ((7, 8), [False, False]), ((steps.NOTHING, 0), [False, False]), ((0, 0), [True, True])],
)
def test_ranks_agree_over_vllms_group(named: tuple[int, int], agree: list[bool]) -> None:
    store, found = dist.HashStore(), [False, False]

    def one(rank: int) -> None:
        group = dist.ProcessGroupGloo(dist.PrefixStore("dp", store), rank, 2, timedelta(seconds=LONGEST_S))
        core: Any = type("Core", (), {"dp_group": group})
        found[rank] = steps.agreed(core, named[rank])

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONGEST_S)
    assert found == agree
