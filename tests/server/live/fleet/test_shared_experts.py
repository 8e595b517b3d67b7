"""One instance whose two data-parallel ranks share experts: every swap is between two of their steps. Each rank has a
part of every expert, or with expert parallelism half of the experts.

vLLM's communicator and kernels for CPUs get what they lack for that from tests/started/experts.py. The version that
each rank runs travels with their exchange.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest

from loadtest.models.kinds import make_kind
from tests.live import VLLM_ARGS, LiveServer
from tests.started.experts import DIRECTORY
from tests.waiting import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.broad]
RANKS = (*VLLM_ARGS, "--data-parallel-size", "2")
WHOLE = (*RANKS, "--enable-expert-parallel")  # experts, each in one rank
LONG = {"prompt_token_ids": [3, 4, 5], "max_tokens": 400, "ignore_eos": True, "stream": True}
PROMPTS = [[5 + i, 6, 7 + 3 * i, 8] for i in range(4)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [make_kind(tmp_path_factory.mktemp("moe") / str(seed), "moe", seed=seed) for seed in (0, 1)]


@pytest.fixture(scope="module", params=[RANKS, WHOLE], ids=["cut", "whole"])
def ranks(request: pytest.FixtureRequest) -> tuple[str, ...]:
    given: tuple[str, ...] = request.param
    return given


@pytest.fixture(scope="module")
def exchanges(ranks: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The directory in which ranks say what they ran; theirs is the communicator that says it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(DIRECTORY, str(directory := tmp_path_factory.mktemp("exchanges")))
        yield directory


@pytest.fixture(scope="module")
def fresh(
    models: list[Path], ranks: tuple[str, ...], exchanges: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[list[int]]:
    """The answers of an instance that has run nothing but the second model."""
    with LiveServer(models[1], tmp_path_factory.mktemp("state"), ranks).running() as server:
        said = answers(server)
    for file in exchanges.iterdir():
        file.unlink()
    return said


@pytest.fixture(scope="module")
def shared(
    fresh: list[list[int]], models: list[Path], ranks: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveServer]:
    with LiveServer(models[0], tmp_path_factory.mktemp("state"), ranks).running() as server:
        server.push(models[1])
        server.rollback()
        yield server


def answers(server: LiveServer) -> list[list[int]]:
    return [server.generate(prompt, 24)["choices"][0]["token_ids"] for prompt in PROMPTS]


def ran(exchanges: Path) -> list[list[int]]:
    """The versions of each rank's exchanges, in order."""
    assert not (exchanges / "torn").exists(), (exchanges / "torn").read_text()
    return [[int(line) for line in file.read_text().split()] for file in sorted(exchanges.glob("[0-9]*"))]


def test_answers_are_those_of_a_fresh_engine_of_the_version(
    shared: LiveServer, models: list[Path], ranks: tuple[str, ...], exchanges: Path, fresh: list[list[int]]
) -> None:
    first, old = shared.active(), answers(shared)
    assert old != fresh
    second = shared.push(models[1])
    assert answers(shared) == fresh
    assert shared.rollback() == first
    assert answers(shared) == old
    assert shared.activate(second, mode="rolling").status_code == 200
    assert answers(shared) == fresh
    one, other = ran(exchanges)
    assert one == other
    assert one[-4:] == [first, second, first, second]
    if ranks == WHOLE:
        placed = sorted(json.loads(line) for line in (exchanges / "mapped").read_text().splitlines())
        assert placed == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_no_step_has_two_versions_under_load(shared: LiveServer, exchanges: Path) -> None:
    """Requests of several lengths: at most commits one rank has some while the other has none, or is in a prompt."""
    before = len(ran(exchanges)[0])

    def ask(i: int) -> list[int]:
        choice = shared.generate([9 + i, *range(5, 5 + 40 * (i % 5))], 20 + 60 * (i % 3))["choices"][0]
        return [span["version"] for span in choice["weight_versions"]]

    with ThreadPoolExecutor(12) as threads:
        spans = [threads.submit(ask, i) for i in range(60)]
        swaps, pending = 0, set(spans)
        while pending:
            shared.rollback()
            swaps += 1
            _, pending = wait(pending, return_when=FIRST_COMPLETED)
        crossed = [span.result() for span in spans]
    one, other = ran(exchanges)
    assert one == other
    assert len(one) - before >= min(swaps, 6), "exchanges between commits"
    assert any(len(versions) > 1 for versions in crossed)


def test_ranks_come_back_with_the_version_that_was_live(shared: LiveServer, models: list[Path]) -> None:
    before = answers(shared)
    victim = next(process for process in shared.tree() if "DP1" in " ".join(process.cmdline()))
    victim.kill()
    wait_until(lambda: not shared.instances(), 60, what="the instance ends with its rank")
    wait_until(shared.whole, 300, what="it serves again")
    assert answers(shared) == before
    shared.push(models[0])
    assert shared.rollback()
    assert answers(shared) == before


@pytest.mark.parametrize("state", ["STAGING", "COMMITTING"])
def test_a_rank_that_dies_in_a_swap_leaves_the_version_before(
    shared: LiveServer, models: list[Path], exchanges: Path, state: str
) -> None:
    """The rank does not answer any more, and the other waits for it: with the version, or at their common step."""
    target, other = shared.push(models[1]), answers(shared)
    before, said = shared.push(models[0]), answers(shared)
    assert said != other
    rank = next(process for process in shared.tree() if "DP1" in " ".join(process.cmdline()))
    finish: dict[str, Any] = {"headers": {"x-hotswap-policy": "finish"}, "json": LONG}
    with ThreadPoolExecutor(1) as threads, shared.client.stream("POST", "/generate", **finish) as stream:
        assert next(stream.iter_lines()) == "event: token"
        if state == "STAGING":
            rank.suspend()
            swap = threads.submit(shared.admin.post, "/admin/weights", json={"path": str(models[0])})
        else:
            swap = threads.submit(shared.activate, target, mode="rolling", drain_s=240)
        wait_until(lambda: shared.instance()["state"] == state, 60)
        rank.suspend()
        stream.close()
        rank.kill()
        wait_until(lambda: not shared.instances(), 60, what="the instance ends with its rank")
        wait_until(shared.whole, 300, what="it serves again")
        assert swap.result().status_code == 409, swap.result().text
    assert shared.active() == before
    assert answers(shared) == said
    assert not (exchanges / "torn").exists()
