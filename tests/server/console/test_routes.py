"""Routes that the console asks: past swaps, throughput, and what a trainer reports."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest

from server.gateway.fleet.instance import Signals
from server.gateway.models.history import KEPT_POINTS, KEPT_SAMPLES, Throughput, TrainingLog
from tests.server.asking import AUTH, call
from tests.server.console.play import put_swaps
from tests.server.gateway.harness import KEYS, MODEL, RunningGateway, post, running_gateway
from tests.waiting import eventually
from weightsync.store import open_store


async def ask(gateway: RunningGateway, path: str) -> dict[str, Any]:
    status, body = await call(gateway, "GET", path)
    assert status == 200, body
    return body


async def report(gateway: RunningGateway, body: object) -> tuple[int, dict[str, Any]]:
    return await call(gateway, "POST", "/admin/training/metrics", body)


# swaps


async def test_past_swaps_are_told_with_what_each_cost(gateway: RunningGateway) -> None:
    assert await ask(gateway, "/admin/swaps") == {"model": MODEL, "swaps": []}
    put_swaps(gateway)
    newest, oldest = (await ask(gateway, "/admin/swaps"))["swaps"]
    assert (oldest["stall_ms"], oldest["step_loss"], oldest["verified"]) == (0.75, 0.12, True)
    assert oldest["prepare_ms"] == pytest.approx(250)
    assert oldest["commit_ms"] == pytest.approx(50)
    assert [flip["instance"] for flip in oldest["flips"]] == ["a", "b"]
    assert (newest["outcome"], newest["reason"], newest["tensor"]) == ("aborted", "a byte <b>flipped</b>", "t.w")
    assert newest["prepare_ms"] == pytest.approx(500)
    assert (newest["commit_ms"], newest["stall_ms"]) == (None, None)


# training


async def test_what_a_trainer_reports_is_in_the_series(gateway: RunningGateway) -> None:
    status, told = await report(
        gateway, {"step": 1, "reward": 0.25, "loss": 2, "version": 7, "reward/exact_match": 0.5}
    )
    assert status == 200
    point = told["point"]
    assert point.pop("time") > 1e9
    assert point == {"step": 1, "reward": 0.25, "loss": 2, "version": 7, "reward/exact_match": 0.5}
    (found,) = (await ask(gateway, "/admin/series"))["training"]
    assert (found["step"], found["reward"]) == (1, 0.25)


@pytest.mark.parametrize(
    ("body", "hint"),
    [
        ({"reward": 1.0, "loss": 1.0}, "step"),
        ({"step": -1, "reward": 1.0}, "step"),
        ({"step": 1.5, "reward": 1.0}, "step"),
        ({"step": 2**60, "reward": 1.0}, "step"),
        ({"step": 1, "reward": "high"}, "reward"),
        ({"step": 1, "reward": None}, "reward"),
        ({"step": 1, "reward": [1]}, "reward"),
        ({"step": 1, "time": 5}, "time"),
        ({"step": 1}, ""),
        ({"step": 1, "a b": 1}, "a b"),
        ({"step": 1, "x" * 65: 1}, "x"),
        ({"step": 1} | {f"m{i}": i for i in range(64)}, "64"),
        ([1, 2], ""),
        ("step", ""),
    ],
    ids=str,
)
async def test_what_is_no_point_is_refused(gateway: RunningGateway, body: object, hint: str) -> None:
    status, told = await report(gateway, body)
    assert (status, told["error"]["code"]) == (400, "invalid_parameter")
    assert hint in str(told)
    assert (await ask(gateway, "/admin/series"))["training"] == []


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
async def test_a_number_that_is_none_is_refused(gateway: RunningGateway, number: str) -> None:
    body = f'{{"step": 1, "reward": {number}}}'.encode()
    answer = await gateway.ask(post("/admin/training/metrics", body, AUTH), admin=True)
    assert answer.status == 400


async def test_gateways_share_the_training_and_a_new_one_knows_it(gateway: RunningGateway, tmp_path: Path) -> None:
    await report(gateway, {"step": 1, "reward": 0.5})
    url = f"sqlite://{tmp_path / 'store.db'}"
    with running_gateway(tmp_path, store=url) as other:
        await eventually(lambda: [p["step"] for p in other.gateway.default.training.points] == [1])
        await report(gateway, {"step": 2, "reward": 0.6})
        await eventually(lambda: [p["step"] for p in other.gateway.default.training.points] == [1, 2])


async def test_a_run_that_goes_back_supersedes_what_came_after(tmp_path: Path) -> None:
    log = TrainingLog(open_store(f"sqlite://{tmp_path / 's.db'}"), MODEL)
    for step in (1, 2, 3, 4, 5):
        await log.add({"step": step, "loss": float(step)})
    for step in (3, 4):  # from the checkpoint of step 2
        await log.add({"step": step, "loss": 0.5})
    assert [(p["step"], p["loss"]) for p in log.points] == [(1, 1.0), (2, 2.0), (3, 0.5), (4, 0.5)]
    await log.add({"step": 0, "loss": 9.0})  # a new run
    await log.add({"step": 0, "accuracy": 0.5})
    (point,) = log.points
    assert (point["step"], point["loss"], point["accuracy"]) == (0, 9.0, 0.5), "what is told of one step twice"


async def test_the_log_of_the_training_is_bounded(tmp_path: Path) -> None:
    store = open_store(f"sqlite://{tmp_path / 's.db'}")
    log = TrainingLog(store, MODEL)
    for step in range(KEPT_POINTS + 20):
        await log.add({"step": step, "loss": 0.0})
    assert [p["step"] for p in log.points] == list(range(20, KEPT_POINTS + 20))
    assert len((await store.list(KEYS.training))[0]) == KEPT_POINTS


async def test_points_that_cannot_be_read_hide_no_others(tmp_path: Path) -> None:
    store = open_store(f"sqlite://{tmp_path / 's.db'}")
    for slot, value in enumerate((b"[]", b"nonsense", b'{"step": 1}', b'{"step": 1, "time": "now"}')):
        await store.put(KEYS.training_point(slot), value)
    await store.put(f"{KEYS.training}other/000001", b'{"step": 9, "time": 1}')
    await store.put(KEYS.training_point(7), b'{"step": 7, "time": 1, "loss": 2}')
    log = TrainingLog(store, MODEL)
    following = asyncio.create_task(log.run())
    await eventually(lambda: bool(log.points))
    following.cancel()
    assert log.points == [{"step": 7, "time": 1, "loss": 2}]


# throughput


class Instance:
    def __init__(self, signals: Signals | None, inflight: int = 0) -> None:
        self.signals, self.inflight = signals, inflight


def signals(at: float, generated: float, prompt: float = 0.0, **more: float) -> Signals:
    return Signals(generation_tokens=generated, prompt_tokens=prompt, read_at=at, **more)


def test_throughput_is_the_sum_of_what_the_counters_grew_by() -> None:
    ring = Throughput()
    a, b = Instance(signals(10.0, 1000), 2), Instance(signals(10.5, 500), 1)
    ring.sample({"a": a, "b": b}, 100.0)
    a.signals, b.signals = signals(12.0, 1100, 40, num_requests_running=3), signals(12.5, 600, num_requests_waiting=2)
    ring.sample({"a": a, "b": b}, 102.0)
    first, second = ring.samples
    assert first.generation_tokens_per_s == 0  # nothing to compare with
    assert (second.generation_tokens_per_s, second.prompt_tokens_per_s) == (100.0, 20.0)
    assert (second.running, second.waiting, second.in_flight) == (3, 2, 3)
    ring.sample({"a": a, "b": b}, 104.0)  # no scrape since: the rates stand
    assert ring.samples[-1].generation_tokens_per_s == 100.0


def test_a_counter_that_began_anew_and_an_instance_that_is_away_count_as_nothing() -> None:
    ring = Throughput()
    a = Instance(signals(10.0, 1000))
    ring.sample({"a": a}, 1.0)
    a.signals = signals(12.0, 5)
    ring.sample({"a": a}, 2.0)
    assert ring.samples[-1].generation_tokens_per_s == 0
    a.signals = None
    ring.sample({"a": a}, 3.0)
    a.signals = signals(20.0, 5000)
    ring.sample({"a": a}, 4.0)
    assert ring.samples[-1].generation_tokens_per_s == 0  # what it did meanwhile was in no known time
    ring.sample({}, 5.0)
    assert all(math.isfinite(s.generation_tokens_per_s) for s in ring.samples)


def test_the_ring_is_bounded() -> None:
    ring = Throughput()
    for second in range(KEPT_SAMPLES + 10):
        ring.sample({}, float(second))
    assert (len(ring.samples), ring.samples[0].time) == (KEPT_SAMPLES, 10.0)


async def test_throughput_is_sampled_while_the_gateway_runs(gateway: RunningGateway) -> None:
    await eventually(lambda: len(gateway.gateway.default.throughput.samples) > 0, 30)
    sample = (await ask(gateway, "/admin/series"))["throughput"][-1]
    assert set(sample) == {
        "time", "generation_tokens_per_s", "prompt_tokens_per_s", "running", "waiting", "in_flight"
    }  # fmt: skip
