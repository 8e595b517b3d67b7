"""Benchmarks of swaps, rollbacks, restarts and upgrades, and of two checkouts by turns: what they make of what clients
saw, the Service, answers as clients read them, and the chart's times."""

from __future__ import annotations

import asyncio
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson
import pytest
import yaml

from loadtest.measure import pairs
from loadtest.measure.gaps import Gaps
from loadtest.measure.pairs import Checkout, Ratio
from loadtest.serving import restarts
from loadtest.serving.restarts import PHASES, TARGET_S, Found
from loadtest.swaps import adapters, sessions
from loadtest.swaps import against as swaps
from loadtest.swaps.rollback import evidence_at, policy
from loadtest.swaps.sessions import Turns
from loadtest.swaps.stall import Windows, cpu_ms_per_token, stall_ms
from loadtest.training.rl_step import against as steps
from loadtest.upgrade import bench, clients, releases
from loadtest.upgrade.bench import Step, Swap, Upgrade, failures, summed_up
from loadtest.upgrade.clients import KINDS, Answer, Client, Endpoint, Failed, Seen, Service
from server.errors import CliError
from tests.server.gateway.upstream import Link, Received, upstream
from tests.waiting import eventually

STARTS = ("server.gateway", "server.cli instance", "vllm.entrypoints", "weightsync.push")  # for scripts/reach.py


def test_a_swap_is_compared_with_what_was_before_and_after_it() -> None:
    """Steps grow with the answers; a median over all quiet windows would count the growth as a stall."""
    windows = Windows(quiet=[(0, 3), (5, 8), (10, 13)], swapping=[(3, 5), (8, 10)])
    gaps = Gaps(np.array([1.0, 4.0, 6.0, 9.0, 11.0]), np.array([0.10, 0.13, 0.12, 0.14, 0.14]))
    assert stall_ms(gaps, windows) == pytest.approx(1e3 * (0.02 + 0.01) / 2)
    assert gaps.largest((3.5, 9.5), 2) == [(5.5, 140.0), (0.5, 130.0)]
    waits = Gaps(gaps.ends[:4], gaps.lengths[:4])  # in the last window no stream has its second token
    assert stall_ms(waits, windows) == pytest.approx(1e3 * (0.02 + 0.02) / 2)


def test_the_cpu_of_a_token_is_of_the_windows_that_are_asked_for() -> None:
    windows = Windows(quiet=[(0, 2), (4, 6)], engine_cpu_s=[0.5, 2.5])
    gaps = Gaps(np.array([0.5, 1.0, 4.5, 5.0, 5.5]), np.full(5, 0.1))
    assert cpu_ms_per_token(gaps, windows) == pytest.approx(600)
    assert cpu_ms_per_token(gaps, windows, 1) == pytest.approx(250)


def test_the_evidence_is_there_with_the_answer_that_makes_it_enough() -> None:
    """Answers before the step do not count."""
    text = policy()
    answers = [(0.01 * n, 1 + n % 2) for n in range(2, 200)]
    at = evidence_at(answers, 2, text)
    known = [each for each in answers if each[0] <= at]
    assert 10 < len(known) < 60
    with pytest.raises(RuntimeError, match="no evidence"):
        evidence_at(known[:-1], 2, text)
    early = [(n / 1000, 1) for n in range(1000)]
    step = [(2 + 0.01 * n, 1 + n % 2) for n in range(200)]
    assert evidence_at(early + step, 2, text) == evidence_at(step[1:], 2, text)


def test_the_target_of_a_restart_is_stock_without_its_imports() -> None:
    first, second = (dict(zip(PHASES, ends, strict=True)) for ends in ((0.1, 2, 4, 4, 5), (0.3, 3, 4, 5, 7)))
    found = restarts.figures_of(Found([first, second], [20.0, 22.0], [6.0, 8.0]))
    assert (found["restart_s"], found["target_s"], found["within_target"]) == (6.0, 21.0 - 7.0 + TARGET_S, True)
    assert found["phases_s"] == pytest.approx(
        {"process": 0.2, "engine": 2.3, "weights": 1.5, "warm-up": 0.5, "first token": 1.5}
    )
    late = restarts.figures_of(Found([first, second], [9.0], [6.0]))
    assert (late["target_s"], late["within_target"]) == (3.0 + TARGET_S, False)


@pytest.mark.broad
@pytest.mark.engine
@pytest.mark.timeout(900)  # stock vLLM starts twice, and nothing of it is warm
def test_an_instance_that_is_killed_answers_again(tmp_path: Path) -> None:
    restarts.run(tmp_path / "found.json", kills=1, small=True, runs=tmp_path)
    (ends,) = orjson.loads((tmp_path / "found.json").read_bytes())["turns"]["restarts"]
    assert list(ends) == [*PHASES]
    assert list(ends.values()) == sorted(ends.values())


def test_a_ratio_is_of_neighbours() -> None:
    found = Ratio.of([(1.0, 2.0), (10.0, 20.0), (4.0, 4.0)])
    assert (found.median, found.this, found.other) == (0.5, 4.0, 4.0)


def test_sides_take_turns_and_a_round_that_warms_up_does_not_count() -> None:
    visited: list[str] = []

    def visit(side: str) -> dict[str, float]:
        visited.append(side)
        return {"ms": 1000.0 if len(visited) <= 2 else 2.0 if side == "this" else 8.0}

    found = pairs.by_turns(("this", "other"), [visit], 3)
    assert visited == ["other", "this", "this", "other", "other", "this", "this", "other"]
    assert (found["ms"].median, found["ms"].pairs) == (0.25, 3)
    visited.clear()
    assert pairs.by_turns(("this", "other"), [visit], 2, warm_up=0)["ms"].pairs == 2
    assert len(visited) == 4


def test_a_directory_that_is_no_checkout_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CliError, match="is no checkout"):
        pairs.checkouts(tmp_path)


def test_a_server_that_ends_is_told_with_its_log(tmp_path: Path) -> None:
    here = Checkout("this checkout", pairs.HERE)
    missing = pairs.serving(here, tmp_path / "state", Path("./no-such-model"), "toy", [])
    with pytest.raises(CliError, match="is no directory"), missing:
        pass


@pytest.mark.engine
@pytest.mark.broad
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("measure", "figures"),
    [
        (swaps.run, {"longest gap with a swap, ms", "staging, ms", "CPU of the engine, ms a token"}),
        (steps.run, {"async, s a step", "async, training, ms"}),
    ],
)
def test_this_checkout_beside_itself(
    measure: Callable[..., dict[str, Ratio]], figures: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swaps, "SWAPS", 1)
    monkeypatch.setattr(steps, "SCHEDULES", ("async",))
    monkeypatch.chdir(tmp_path)
    ratios = measure(pairs.HERE, tmp_path / "found.json", pairs=2, small=True)
    assert figures <= ratios.keys()
    assert all(ratio.pairs == 2 and ratio.low > 0 for ratio in ratios.values())
    written = orjson.loads((tmp_path / "found.json").read_bytes())["figures"]
    assert {name: value["median"] for name, value in written.items()} == {n: r.median for n, r in ratios.items()}


# upgrades

PROBE = r"readinessProbe:\n.*\n\s*periodSeconds: (\d+)\n\s*timeoutSeconds: (\d+)\n\s*failureThreshold: (\d+)"


def test_the_times_are_those_of_the_chart() -> None:
    values = yaml.safe_load((bench.CHART / "values.yaml").read_text())
    assert values["gateway"]["leave"] == bench.LEAVE_S
    gateway = (bench.CHART / "templates" / "gateway.yaml").read_text()
    probe = re.search(PROBE, gateway)
    assert probe is not None
    assert [float(n) for n in probe.groups()] == [clients.PERIOD_S, clients.TIMEOUT_S, clients.FAILURES]
    assert f"minReadySeconds: {bench.SETTLED_S['gateway']:g}\n" in gateway
    grace = re.search(r"terminationGracePeriodSeconds: {{ add \$g.leave (\d+) (\d+) }}", gateway)
    assert grace is not None
    assert bench.LEAVE_S + sum(map(float, grace.groups())) == bench.GRACE_S["gateway"]
    assert f"minReadySeconds: {bench.SETTLED_S['instance']:g} " in (bench.CHART / "templates/rollout.yaml").read_text()
    grace = re.search(r"\$grace := add \$r.drain (\d+) }}", (bench.CHART / "templates" / "_rollout.tpl").read_text())
    assert grace is not None
    assert values["rollout"]["drain"] + float(grace[1]) == bench.GRACE_S["instance"]


def test_a_gateway_is_ready_after_one_probe_and_unready_after_two() -> None:
    endpoint, seen = Endpoint(1), []
    for well in (False, True, False, True, False, False, False, True):
        endpoint.probed(well)
        seen.append(endpoint.ready)
    assert seen == [False, True, True, True, True, False, False, True]


async def test_connections_go_to_ready_gateways_alone_and_stay_while_they_are_open() -> None:
    balanced, seen, stop, asked = Service(), Seen(), asyncio.Event(), list[str]()
    leaving = False

    def gateway(name: str) -> Any:
        async def answer(link: Link, received: Received) -> None:
            asked.append(name)
            length = int(orjson.loads(received.body)["max_tokens"])
            choice = {"token_ids": [101] * length, "weight_versions": [{"version": 5, "start": 0, "end": length}]}
            extra = b"connection: close\r\n" if leaving else b""
            await link.json(orjson.dumps({"choices": [choice]}), extra=extra)
            if name == "b":
                stop.set()

        return answer

    async def more(of: str, than: int) -> None:
        await eventually(lambda: asked.count(of) > than, 60)

    with pytest.raises(OSError, match="no gateway is ready"):
        await balanced.resolve("gateway")
    async with upstream(gateway("a")) as a, upstream(gateway("b")) as b:
        balanced.show("a", a.port)
        client = asyncio.create_task(Client("whole", 0, seen, 100, 4).run(balanced, stop))
        await more("a", 2)
        balanced.show("b", b.port)
        balanced.show("a", None)
        await more("a", asked.count("a") + 3)
        assert (balanced.connections, "b" in asked) == (1, False)
        leaving = True
        await client
    assert (a.connections, b.connections, balanced.connections) == (1, 1, 2)
    assert seen.tally.answers == seen.requests["whole"] == len(asked)
    assert seen.tally.wrong == seen.tally.mislabelled == 0
    assert seen.failures == []


def event(**payload: Any) -> bytes:
    return b"data: " + orjson.dumps(payload) + b"\n"


def test_streams_of_both_routes_are_read() -> None:
    spans = [{"version": 1, "start": 0, "end": 2}, {"version": 2, "start": 2, "end": 3}]
    answer = Answer()
    lines = [
        b": ping\n", event(object="x", choices=[{"token_ids": [5, 5], "weight_versions": spans[:1]}]), b"\n",
        event(object="x", choices=[{"token_ids": [6], "weight_versions": spans, "resumed_at": [2]}]),
        event(object="x", choices=[]), b"data: [DONE]\n",
    ]  # fmt: skip
    assert [answer.line(line) for line in lines] == [False, True, False, True, False, False]
    assert answer == Answer([5, 5, 6], spans, [2], over=True)

    answer = Answer()
    answer.line(b"event: token\n")
    assert answer.line(event(token_ids=[5, 5], weight_version=1))
    assert answer.line(event(token_ids=[6], weight_version=2, weight_versions=spans))
    assert not answer.over
    assert not answer.line(event(id="g", choices=[{"weight_versions": spans}]))
    assert answer == Answer([5, 5, 6], spans, [], over=True)
    with pytest.raises(Failed, match="upstream_died"):
        answer.line(event(error={"code": "upstream_died"}))


def test_what_was_seen_is_laid_over_what_was_done() -> None:
    seen = Seen(requests=dict.fromkeys(KINDS, 3), resumed=1, versions={1}, connections=4)
    seen.failures.append((13.0, "whole", "Failed()"))
    seen.tally.failed = 1
    arrivals = [None, 10.0, 10.1, 12.0, 12.5, None, 15.0, 15.2]
    upgrade = Upgrade(None, None, None)  # type: ignore[arg-type]
    upgrade.quiet = [(9.0, 10.5)]
    upgrade.steps = [Step("gateway-0", (11.0, 12.1), 1.0, 1.0), Step("instance-0", (12.2, 13.0), 1.0, 1.0)]
    told = {"arrivals": [arrivals], "tally": vars(seen.tally)}
    told |= {name: getattr(seen, name) for name in ("requests", "failures", "resumed", "versions", "connections")}
    upgrade.swaps = SimpleNamespace(done=[Swap("rolling", "it", (15.0, 16.0), "")])  # type: ignore[assignment]
    report = summed_up(told, upgrade, 7.04)
    assert {name: round(found["max"]) for name, found in report["gap_ms"].items()} == {
        "nothing": 1900, "gateways replaced": 1900, "instances replaced": 500, "swaps": 200,
    }  # fmt: skip
    assert report["failures"] == [{"at_s": 4.0, "kind": "whole", "what": "Failed()"}]
    assert report["steps"][0]["window"] == [2.0, 3.1]
    assert failures(report) == 1
    assert failures(report | {"failed": 0, "checked": report["checked"] | {"wrong": 2}}) == 2


def test_a_release_is_what_its_processes_import(tmp_path: Path) -> None:
    old = releases.checked_out("HEAD", tmp_path)
    assert old == releases.checked_out("HEAD", tmp_path)  # unpacked once
    env = {**os.environ, **old.environment}
    command = [sys.executable, "-c", "import weightsync; print(weightsync.__file__)"]
    done = subprocess.run(command, cwd=releases.ROOT, env=env, capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()) == old.root / "weightsync" / "__init__.py"
    with pytest.raises(CliError, match="there is no revision 'nowhere'"):
        releases.checked_out("nowhere", tmp_path)


def crossing(*answers: dict[str, Any]) -> tuple[releases.Crossing, list[str]]:
    said, told = list(answers), list[str]()

    def ask(what: str, _timeout_s: float) -> dict[str, Any]:
        told.append(what)
        return said.pop(0)

    site = SimpleNamespace(push=lambda release, version: "", store="")
    publishing = SimpleNamespace(ask=ask, release=Checkout("old", Path()))
    old, new = Checkout("old", Path()), Checkout("new", Path())
    return releases.Crossing(site, None, old, new, lambda _: None, publishing), told  # type: ignore[arg-type]


def test_only_a_rolling_swap_may_be_refused_between_two_releases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(releases, "_next", lambda _: 7)
    no, yes = {"error": "...", "code": "swap_aborted"}, {"version": 7}
    one, told = crossing(yes, yes, no)
    one.exercise()
    assert told == ["together", "rollback", "rolling"]
    assert [(done.what, done.outcome, done.must) for done in one.done] == [
        ("together", "", True), ("rollback", "", True), ("push", "", True), ("rolling", "swap_aborted: ...", False),
    ]  # fmt: skip
    seen = {"requests": dict.fromkeys(KINDS, 1), "resumed": 0, "versions": [1], "failures": []}
    seen["tally"] = vars(Seen().tally)
    assert releases.failures(releases._summed_up(seen, one, time.monotonic())) == 0
    two, _ = crossing(yes, no, no)
    two.state = "all are new"
    two.exercise()
    assert releases.failures(releases._summed_up(seen, two, time.monotonic())) == 2
    lost = seen | {"tally": vars(Seen().tally) | {"failed": 3}}
    assert releases.failures(releases._summed_up(lost, one, time.monotonic())) == 3


# conversations


def test_the_divergence_of_what_was_sampled() -> None:
    """k1 is the mean of log p - log q, and k3 of q / p - 1 - log (q / p); neither is of the first turn."""
    of = Turns(queried=100, found=25, first_token_s=[0.1, 0.4, 0.2], differences=[0.0, math.log(0.5)], versions=2)
    figures = of.figures()
    assert figures["computed_tokens"] == 75
    assert (figures["first_token_median_s"], figures["first_token_longest_s"]) == (0.2, 0.4)
    assert figures["k1"] == pytest.approx(math.log(2) / 2, abs=1e-6)
    assert figures["k3"] == pytest.approx((math.log(2) - 0.5) / 2, abs=1e-6)


@pytest.mark.engine
@pytest.mark.broad
@pytest.mark.timeout(600)
def test_sessions_compute_less_and_tell_which_versions_they_reuse() -> None:
    found = sessions.run(None, small=True)["kv"]
    assert found["version"]["computed_tokens"] == found["version"]["prompt_tokens"]
    assert (found["version"]["k3"], found["version"]["versions_of_a_prompt"]) == (0.0, 1)
    for way in ("session", "any"):
        assert found[way]["computed_tokens"] < found["version"]["computed_tokens"] / 2
        assert found[way]["versions_of_a_prompt"] == 3
        assert found[way]["k3"] > 0


@pytest.mark.engine
@pytest.mark.broad
@pytest.mark.timeout(600)
def test_editions_are_published_beside_streams_and_none_is_lost() -> None:
    found = adapters.run(None, small=True)
    assert (found["lost"], found["registered"]) == (0, 50)
    assert found["record_bytes"] < 512
    assert all(found["gap_ms"][kind]["p99"] > 0 for kind in ("quiet", "elsewhere", "publishing"))
    assert 0 < found["publish_ms"]["median"] < found["publish_to_token_ms"]["median"]
