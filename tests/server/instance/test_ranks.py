"""A swap hears every data-parallel rank of an instance: a double of vLLM's client, with engine cores that differ."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from server.errors import ConfigError
from server.instance.engine import Engine, StagingFailed
from server.instance.hosts import RankFailed, Tethers
from tests.waiting import eventually
from weightsync.control.records import VersionRecord

VERSION = VersionRecord(2, "ready", "/arena/base", 1, "d", None, None, "p", 1, 0.0, "", 1)
OTHER_SUMS = {"w": [[2, 2, 0, 2, 0, 2, 99]]}
WAIT_S = 30.0


def report(**fields: Any) -> dict[str, Any]:
    sums = {"w": [[2, 2, 0, 2, 0, 2, 7]]}
    return {"running": False, "error": None, "stage_ms": 1.0, "sums": sums, "parts": {}, "version": 2} | fields


class Core:
    """One engine core with one worker: what it reports, one after the other (the last for ever), and how it flips."""

    def __init__(self, *reports: dict[str, Any], flip: Callable[[], dict[str, float]] | None = None) -> None:
        self.reports, self.calls = list(reports) or [report()], list[str]()
        self.flip = flip or (lambda: {"flip_ms": 1.0, "commit_ms": 2.0, "crossed": {}})

    async def call(self, utility: str, *args: Any) -> Any:
        await asyncio.sleep(0)
        method = args[0] if utility == "collective_rpc" else utility
        self.calls.append(method)
        if method == "hotswap_commit":
            return self.flip()
        if method == "hotswap_drop":
            cancelled = {"code": "staging_cancelled", "message": "", "tensor": None}
            self.reports = [*self.reports[:1], report(error=cancelled)]
        if method in ("hotswap_stage", "hotswap_report"):
            return [self.reports.pop(0) if len(self.reports) > 1 else self.reports[0]]
        return [None] if method == "hotswap_device" else [""]


def engine_of(*cores: Core, moe: bool = False) -> Engine:
    ranks = {str(rank).encode(): core for rank, core in enumerate(cores)}

    async def call(method: str, *args: Any, engine: bytes) -> Any:
        return await ranks[engine].call(method, *args)

    parallel = SimpleNamespace(nnodes=1, data_parallel_size=len(cores))
    client = SimpleNamespace(
        errored=False,
        model_config=SimpleNamespace(get_vocab_size=lambda: 8),
        generate=None,
        encode=None,
        vllm_config=SimpleNamespace(parallel_config=parallel, model_config=SimpleNamespace(is_moe=moe)),
        engine_core=SimpleNamespace(core_engines=list(ranks), _call_utility_async=call),
    )
    return Engine(client, Tethers())


async def test_a_version_is_staged_when_every_rank_has_staged_it() -> None:
    slow = Core(report(running=True), report(running=True), report(stage_ms=9.0))
    engine = engine_of(Core(), slow)
    await engine.prepare([], {})
    assert engine.hosts == ("", "")
    assert (await engine.stage(VERSION, WAIT_S))["stage_ms"] == 9.0
    assert slow.calls[3:] == ["hotswap_stage", "hotswap_report", "hotswap_report"]


async def test_a_rank_that_refuses_a_version_is_named() -> None:
    error = {"code": "digest_mismatch", "message": "its bytes changed", "tensor": "w"}
    with pytest.raises(StagingFailed, match=r"^data-parallel rank 1: its bytes changed") as caught:
        await engine_of(Core(), Core(report(running=True), report(error=error))).stage(VERSION, WAIT_S)
    assert (caught.value.code, caught.value.tensor) == ("digest_mismatch", "w")


async def test_ranks_must_have_built_the_same_weights() -> None:
    with pytest.raises(StagingFailed, match="data-parallel rank 1: it built other weights"):
        await engine_of(Core(), Core(report(sums=OTHER_SUMS))).stage(VERSION, WAIT_S)


async def test_what_all_ranks_made_of_the_weights_is_one_digest() -> None:
    one, other = report(built="l0:aa"), report(built="l1:bb")
    found = [
        (await engine_of(*(Core(r) for r in ranks)).stage(VERSION, WAIT_S))["built"]
        for ranks in ([one, other], [one, other], [one, report(built="l1:cc")], [report(), report()])
    ]
    assert found[0] == found[1]
    assert found[0].partition(":")[0] == found[2].partition(":")[0], "the same layouts"
    assert found[0] != found[2]
    assert found[3] == "", "nothing was made"


async def test_every_rank_gives_memory_back_before_the_engine_sleeps() -> None:
    cores = Core(), Core()
    engine = engine_of(*cores)

    async def sleep(level: int) -> None:
        assert [core.calls for core in cores] == [["hotswap_vacate"], ["hotswap_vacate"]]
        for core in cores:
            core.calls.append(f"sleep {level}")

    engine.client.sleep = sleep
    await engine.sleep()
    assert [core.calls[-1] for core in cores] == ["sleep 1", "sleep 1"]


async def test_a_commit_is_one_only_when_every_rank_has_flipped() -> None:
    def fail() -> dict[str, float]:
        raise RuntimeError("version 2 is not staged")

    flips = Core(flip=lambda: {"flip_ms": 5.0, "commit_ms": 1.0, "crossed": {}})
    engine = engine_of(flips, Core())
    assert await engine.commit(2, 7) == {"flip_ms": 5.0, "commit_ms": 2.0}
    assert engine.active == (2, 7)
    engine = engine_of(Core(), Core(flip=fail))
    with pytest.raises(RankFailed, match=r"^data-parallel rank 1: version 2 is not staged"):
        await engine.commit(2, 7)
    assert engine.active is None


async def test_a_version_is_dropped_by_every_rank() -> None:
    cores = Core(), Core()
    await engine_of(*cores).drop(2, previous=True)
    assert [core.calls for core in cores] == [["hotswap_drop"], ["hotswap_drop"]]


@pytest.mark.parametrize("turns", range(8))
async def test_a_staging_that_is_cancelled_ends_when_every_rank_has_stopped(turns: int) -> None:
    """At whatever point it is cancelled, no rank is told to stage after it was told to stop."""
    cores = [Core(report(running=True)), Core(report(running=True))]
    staging = asyncio.create_task(engine_of(*cores).stage(VERSION, WAIT_S))
    for _ in range(1 + turns):
        await asyncio.sleep(0)
    staging.cancel()
    with pytest.raises(asyncio.CancelledError):
        await staging
    for core in cores:
        assert core.calls.count("hotswap_drop") == 1
        assert "hotswap_stage" not in core.calls[core.calls.index("hotswap_drop") :]
        assert core.calls[-1] == "hotswap_report"
        assert not core.reports[0]["running"]


async def test_a_worker_that_hangs_does_not_keep_a_cancelled_staging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.instance.engine.STOP_TIMEOUT_S", 0.05)
    core = Core(report(running=True))
    staging = asyncio.create_task(engine_of(core).stage(VERSION, WAIT_S))
    await eventually(lambda: "hotswap_stage" in core.calls)
    monkeypatch.setattr(core, "call", lambda *_: asyncio.Event().wait())
    staging.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(staging, WAIT_S)


async def test_a_staging_that_takes_too_long_is_stopped() -> None:
    cores = [Core(), Core(report(running=True))]
    with pytest.raises(StagingFailed, match="longer than 0 s"):
        await engine_of(*cores).stage(VERSION, 0.02)
    assert all("hotswap_drop" in core.calls for core in cores)


async def test_ranks_that_compute_a_batch_together_are_refused() -> None:
    """Each flips between batches of its own: one batch would be computed by two versions."""
    await engine_of(Core(), moe=True).prepare([], {})
    with pytest.raises(ConfigError, match="an instance for each rank"):
        await engine_of(Core(), Core(), moe=True).prepare([], {})
