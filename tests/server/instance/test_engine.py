"""An instance's engine: a swap hears every worker, a worker that refuses is named, and adapters follow the commits.

A double of vLLM's client stands for the engine cores.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from server.errors import ConfigError
from server.instance.engine import FIRST_ID, Adapters
from tests.server.instance.engines import Core, engine_of, report, version
from tests.waiting import eventually
from tests.weightsync.codes import refused
from weightsync.control.records import DeviceRecord, PartRecord, VersionRecord

VERSION = version()
OTHER_SUMS = {"w": [[2, 2, 0, 2, 0, 2, 99]]}
WAIT_S = 30.0


async def test_a_version_is_staged_when_every_rank_has_staged_it() -> None:
    slow = Core(report(running=True), report(running=True), report(stage_ms=9.0))
    engine = engine_of(Core(), slow)
    await engine.prepare([], {})
    assert engine.hosts == ("", "")
    assert (await engine.stage(VERSION, WAIT_S))["stage_ms"] == 9.0
    assert slow.calls[3:] == ["hotswap_stage", "hotswap_report", "hotswap_report"]


async def test_a_rank_that_refuses_a_version_is_named() -> None:
    error = {"code": "digest_mismatch", "message": "its bytes changed", "tensor": "w"}
    with refused("digest_mismatch", r"^data-parallel rank 1: its bytes changed") as caught:
        await engine_of(Core(), Core(report(running=True), report(error=error))).stage(VERSION, WAIT_S)
    assert caught.value.tensor == "w"


async def test_ranks_must_have_built_the_same_weights() -> None:
    with refused("staging_failed", "data-parallel rank 1: it built other weights"):
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
    other = Core()
    engine = engine_of(flips, other)
    assert await engine.commit(2, 7, withdrawn=True) == {"flip_ms": 5.0, "commit_ms": 2.0}
    assert flips.commits == other.commits == [(2, True)]
    assert engine.active == (2, 7)
    engine = engine_of(Core(), Core(flip=fail))
    with refused("engine_call_failed", r"^data-parallel rank 1: version 2 is not staged"):
        await engine.commit(2, 7, withdrawn=False)
    assert engine.active is None


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
    with refused("staging_failed", "longer than 0 s"):
        await engine_of(*cores).stage(VERSION, 0.02)
    assert all("hotswap_drop" in core.calls for core in cores)


DRAFT = SimpleNamespace(method="draft_model", draft_model_config=SimpleNamespace(is_moe=True))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"data_parallel_external_lb": True}, "Start all ranks in one instance"),
        ({"data_parallel_hybrid_lb": True}, "Start all ranks in one instance"),
        ({"draft": DRAFT}, "take a dense one"),
    ],
)
async def test_ranks_that_share_experts_are_refused_where_they_cannot_flip_together(
    options: dict[str, Any], said: str
) -> None:
    await engine_of(Core(), moe=True, **options).prepare([], {})
    await engine_of(Core(), Core(), **options).prepare([], {})
    with pytest.raises(ConfigError, match=said):
        await engine_of(Core(), Core(), moe=True, **options).prepare([], {})


@pytest.mark.parametrize("method", ["draft_model", "mtp"])
async def test_ranks_that_share_experts_take_a_dense_draft_and_a_head(method: str) -> None:
    draft = SimpleNamespace(method=method, draft_model_config=SimpleNamespace(is_moe=method == "mtp"))
    await engine_of(Core(), Core(), moe=True, draft=draft).prepare([], {})


async def test_a_pause_that_ends_waits_for_the_commit() -> None:
    """Ranks that share experts answer each together, and must hear of them in one order."""
    engine, order, begun, goes_on = engine_of(Core()), list[str](), asyncio.Event(), asyncio.Event()

    async def resume() -> None:
        order.append("resume")

    async def commit(*_: Any) -> list[Any]:
        begun.set()
        await goes_on.wait()
        order.append("commit")
        return [{"flip_ms": 1.0, "commit_ms": 1.0}]

    engine.client.resume_generation, engine._ranks.call = resume, commit  # type: ignore[method-assign]
    committing = asyncio.create_task(engine.commit(2, 1, withdrawn=False))
    await begun.wait()
    resuming = asyncio.create_task(engine.resume())
    await eventually(lambda: engine._in_turn.locked())
    goes_on.set()
    await asyncio.gather(committing, resuming)
    assert order == ["commit", "resume"]


async def test_ranks_that_share_experts_have_built_a_version_together() -> None:
    """A tensor of two rows: each has one of them, or both have the same."""
    rows = [report(sums={"w": [[2, 2, row, row + 1, 0, 2, 7]]}) for row in (0, 1)]
    found = (await engine_of(*(Core(row) for row in rows), moe=True).stage(VERSION, WAIT_S))["fingerprint"]
    whole = report(sums={"w": [[2, 2, 0, 2, 0, 2, 14]]})
    assert found == (await engine_of(Core(whole)).stage(VERSION, WAIT_S))["fingerprint"]
    with refused("parts_mismatch"):
        await engine_of(Core(rows[0]), Core(rows[0]), moe=True).stage(VERSION, WAIT_S)


# several hosts


@pytest.mark.parametrize(
    ("hosts", "devices"),
    [(("", ""), ()), (("a", "b"), (DeviceRecord("GPU-0", 7, "a"), DeviceRecord("GPU-1", 7, "b")))],
)
async def test_places_and_gpus_are_told_with_their_host_if_there_are_several(
    hosts: tuple[str, ...], devices: tuple[DeviceRecord, ...]
) -> None:
    core, staged = Core(hosts=hosts), with_parts(2, "lora/x")
    engine = engine_of(core)
    await engine.prepare([], {})
    assert engine.devices == devices
    await engine.stage(staged, WAIT_S, dict.fromkeys(hosts, staged))
    (order,) = core.orders
    assert ("places" in order) == ("places" in order["parts"][0]) == ("a" in hosts)


async def test_a_worker_that_refuses_a_version_is_named_with_its_host() -> None:
    error = {"code": "digest_mismatch", "message": "its bytes changed", "tensor": "t"}
    engine = engine_of(Core([report(), report(error=error)], hosts=("a", "b")))
    await engine.prepare([], {})
    with refused("digest_mismatch", "rank 1 on host b: its bytes changed") as caught:
        await engine.stage(VERSION, WAIT_S, {"a": VERSION, "b": VERSION})
    assert caught.value.tensor == "t"


# adapters


def with_parts(number: int, *parts: str) -> VersionRecord:
    records = tuple(PartRecord(name, number, f"slot-{name}-{number}", f"digest-{number}", 1) for name in parts)
    return version(number, parts=records)


def commit(adapters: Adapters, number: int) -> None:
    adapters.withdraw(number)
    adapters.offer(number)


def test_names_follow_the_commits() -> None:
    table: dict[str, Any] = {"own": "an adapter that vLLM was started with"}
    adapters = Adapters()
    adapters.bind(table)
    adapters.orders(with_parts(1, "lora/x", "draft"))
    assert set(table) == {"own"}, "offered before its commit"
    commit(adapters, 1)
    assert set(table) == {"own", "x"}
    adapters.orders(with_parts(2, "lora/y"))
    adapters.withdraw(2)
    assert set(table) == {"own"}, "new requests still got an adapter that the next version does not have"
    adapters.offer(2)
    assert set(table) == {"own", "y"}
    commit(adapters, 1)
    assert set(table) == {"own", "x"}
    assert adapters.find("x").lora_path == "hotswap:lora/x"
    assert adapters.find("y") is adapters.find(None) is None


def test_a_name_keeps_its_id() -> None:
    """Requests in flight refer to it."""
    adapters = Adapters()
    first = {o["name"]: o for o in adapters.orders(with_parts(1, "draft", "lora/x", "lora/y"))}
    again = {o["name"]: o for o in adapters.orders(with_parts(2, "lora/y", "lora/z"))}
    assert first["lora/y"]["lora_id"] == again["lora/y"]["lora_id"]
    ids = [first["lora/x"]["lora_id"], first["lora/y"]["lora_id"], again["lora/z"]["lora_id"]]
    assert len(set(ids)) == 3
    assert min(ids) >= FIRST_ID
    assert first["draft"]["lora_id"] == 0
    commit(adapters, 2)
    assert adapters.find("z").lora_int_id == again["lora/z"]["lora_id"]


def test_a_table_that_is_bound_late_has_what_was_offered() -> None:
    adapters = Adapters()
    adapters.orders(with_parts(1, "lora/x"))
    commit(adapters, 1)
    table: dict[str, Any] = {}
    adapters.bind(table)
    assert set(table) == {"x"}


def test_no_adapter_takes_the_name_of_the_model() -> None:
    table: dict[str, Any] = {}
    adapters = Adapters()
    adapters.bind(table, ["tiny"])
    adapters.orders(with_parts(1, "lora/tiny", "lora/x"))
    commit(adapters, 1)
    assert set(table) == {"x"}
    assert adapters.find("tiny") is None
    commit(adapters, 2)
    assert not table
