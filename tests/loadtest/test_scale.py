"""The simulated cluster: bytes are neither made nor lost, nothing is faster than its links, and it can be repeated."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from loadtest.cli import app
from loadtest.scale import records, store
from loadtest.scale.bench import BASELINES, simulated, standard
from loadtest.scale.network import MIB, Network, Scenario, ScenarioError, Station, Way
from loadtest.scale.swarm import SwarmStuck, distribute
from tests.etcd import require
from weightsync.peer.holders import OPEN_AT_ONCE, REFRESH_S
from weightsync.peer.settings import Pace, PeerSettings

STARTS = ()  # `up` starts nothing here
SMALL = Scenario(hosts=24, params=1e9, chunk_nbytes=16 * MIB, rack=8, poll_s=0.02)
CASES = {
    "trees": SMALL,
    "swarm": replace(SMALL, way="swarm"),
    "shards": replace(SMALL, hosts_per_instance=4),
    "many sources": replace(SMALL, hosts_per_instance=4, sources=6, way="swarm"),
    "uplinks": replace(SMALL, oversubscription=8.0),
    "busy": replace(SMALL, readers=2),
    "told at once": replace(SMALL, poll_s=0.0, way="swarm"),
    "odd sizes": replace(SMALL, params=1e8 + 1),
} | {way: replace(SMALL, way=way, poll_s=0.0) for way in BASELINES}

distributed = functools.cache(distribute)  # for what several tests look at


@pytest.mark.parametrize("scenario", CASES.values(), ids=CASES)
def test_every_host_gets_each_of_its_bytes_once_and_somebody_sent_it(scenario: Scenario) -> None:
    found = distributed(scenario)
    assert found.in_nbytes == [scenario.host_nbytes] * scenario.hosts
    assert sum(found.out_nbytes) == sum(found.in_nbytes)
    assert len(found.done_s) == scenario.hosts
    assert found.source_nbytes >= scenario.host_nbytes * scenario.hosts_per_instance
    assert found.crossed_nbytes >= found.source_nbytes  # sources have racks of their own
    # Nothing is faster than its links.
    assert found.done_s[0] >= scenario.host_nbytes / scenario.nic
    assert found.done_s[-1] >= scenario.lower_bound_s
    assert max(found.out_nbytes) / scenario.nic <= found.done_s[-1]
    if scenario.oversubscription:
        uplinks = scenario.rack * scenario.nic / scenario.oversubscription
        racks = -(-scenario.hosts // scenario.rack) + 1
        assert found.crossed_nbytes / (racks * uplinks) <= found.done_s[-1]


def test_the_same_seed_gives_the_same_outcome_and_another_seed_another() -> None:
    first, again, other = (distribute(replace(SMALL, seed=seed)) for seed in (1, 1, 2))
    assert (first.done_s, first.out_nbytes) == (again.done_s, again.out_nbytes)
    assert first.out_nbytes != other.out_nbytes


def test_the_planner_beats_a_star_by_far_and_comes_near_a_chain() -> None:
    swarm, star, chain = (distributed(CASES[name]).done_s[-1] for name in ("told at once", "star", "chain"))
    assert swarm < star / 6
    assert swarm < 3 * chain
    assert chain < 1.5 * SMALL.lower_bound_s


def test_baselines_send_what_their_shape_says() -> None:
    need = SMALL.host_nbytes
    star, tree, chain = (distributed(CASES[way]).out_nbytes for way in BASELINES)
    assert star == [SMALL.hosts * need] + [0] * SMALL.hosts
    assert tree[0] == need
    assert max(tree) == 2 * need
    assert chain == [need] * SMALL.hosts + [0]


LONG = replace(SMALL, params=32e9, chunk_nbytes=64 * MIB, poll_s=0.2)  # many polls


def test_trees_are_faster_than_a_swarm_and_take_less_of_the_source() -> None:
    trees, swarm, chain = (distribute(replace(LONG, way=way)) for way in ("trees", "swarm", "chain"))
    assert trees.done_s[-1] < swarm.done_s[-1]
    assert trees.done_s[-1] < LONG.lower_bound_s + 3 * LONG.poll_s
    assert chain.source_nbytes <= trees.source_nbytes < swarm.source_nbytes
    assert trees.crossed_nbytes < swarm.crossed_nbytes


FAULTS: list[dict[str, Any]] = [{"dying": 2}, {"dying": 2, "notice_s": 0.5}, {"slow": 2}]


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_the_source_of_trees_sends_little_more_when_hosts_fail(fault: dict[str, Any]) -> None:
    scenario = replace(LONG, chunk_nbytes=256 * MIB, **fault)
    assert distribute(scenario).source_nbytes < 1.3 * scenario.host_nbytes


@pytest.mark.parametrize("fault", FAULTS, ids=str)
@pytest.mark.parametrize("way", ["trees", "swarm"])
def test_all_others_have_everything_when_hosts_fail(fault: dict[str, Any], way: Way) -> None:
    scenario = replace(LONG, chunk_nbytes=128 * MIB, way=way, **fault)
    found = distribute(scenario)
    assert len(found.done_s) >= LONG.hosts - 2
    assert found.done_s[-1] < 3 * LONG.lower_bound_s + 2 * fault.get("notice_s", 0.0) + 5 * LONG.poll_s
    assert sum(n >= scenario.host_nbytes for n in found.in_nbytes) >= LONG.hosts - 2


def test_receivers_that_can_open_nobody_are_found_out() -> None:
    with pytest.raises(SwarmStuck, match="readers"):
        distribute(replace(SMALL, hosts=2, params=1e7, readers=0))


def test_the_figures_of_a_receiver_are_those_of_a_peer() -> None:
    peer = PeerSettings.readers
    found = SMALL.holders, Scenario.poll_s, SMALL.per_holder, SMALL.total, SMALL.readers
    assert found == (OPEN_AT_ONCE, REFRESH_S, Pace.per_holder, Pace.total, peer)


def test_larger_chunks_change_little() -> None:
    sized = (replace(SMALL, params=16e9, chunk_nbytes=size * MIB, poll_s=0.2) for size in (64, 256))
    fine, coarse = (distribute(scenario).done_s[-1] for scenario in sized)
    assert coarse == pytest.approx(fine, rel=0.35)


def test_a_station_carries_no_more_than_its_rate_and_passes_on_before_the_last_byte() -> None:
    station = Station(100.0)
    assert station.passed(100, 1.0, 100.0) == 1.0  # it came in at the same rate
    assert station.passed(100, 1.0, 100.0) == 2.0  # its turn comes after
    assert station.passed(100, 9.0, 50.0) == 9.0  # as slowly as it comes
    assert station.passed(100, 9.0, float("inf")) == 10.0
    assert station.nbytes == 400


def test_only_limited_uplinks_are_stations() -> None:
    assert len(Network(SMALL).path(0, 1)) == 2
    limited = Network(CASES["uplinks"])
    assert len(limited.path(0, 1)) == 4
    assert len(limited.path(1, 2)) == 2
    assert (limited.distance(0, 1), limited.distance(1, 8), limited.distance(8, 9)) == (1, 0, 1)


WRONG: list[dict[str, Any]] = [{"hosts": 0}, {"way": "star", "sources": 2}, {"dying": 24}, {"way": "chain", "dying": 1}]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_a_scenario_that_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ScenarioError, match="choose"):
        replace(SMALL, **wrong)


def test_the_standard_cases_can_be_made() -> None:
    groups = standard()
    assert sum(len(cases) for cases in groups.values()) > 15
    assert all(scenario.chunks < 3000 for cases in groups.values() for scenario in cases.values())


def test_figures_of_a_case() -> None:
    found = simulated(CASES["shards"])
    assert found["first_s"] <= found["median_s"] <= found["last_s"]
    assert found["receiver_in_nbytes"] == found["host_nbytes"] == CASES["shards"].host_nbytes
    assert found["memory_in_a_swap_nbytes"] == 3 * found["host_nbytes"]
    assert json.loads(json.dumps(found)) == found


def test_a_swap_writes_three_records_an_instance_and_ten_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real flow makes the writes that docs/scale.md tells. A process that lost its lease would write more."""
    for name, ttl in (("Coordinator", "leader_ttl_s"), ("Participant", "lease_ttl_s")):
        monkeypatch.setattr(records, name, functools.partial(getattr(records, name), **{ttl: 60.0}))
    flow = records.measure()
    assert (flow.each.root_writes, flow.each.swap_writes) == (3, 0)
    assert flow.fixed.swap_writes + flow.fixed.root_writes + flow.fixed.other_writes == 10
    assert flow.kinds["instances"] == 3 * records.SIZES[-1]
    assert flow.each.other_writes == 0


def test_events_of_the_models_records_grow_with_the_fleet_and_those_of_copies_with_its_square() -> None:
    flow = records.Flow(records.Written(8, 800, 2, 200, 1, 100), records.Written(0, 50, 3, 900, 0, 100), {})
    small, large = (records.at_scale(flow, n, n) for n in (100, 1000))
    assert 9 < large["root_events"] / small["root_events"] < 11
    assert small["writes"] == 10 + 1 + 3 * 100 + 3 * 100
    assert small["root_events"] == 8 * (100 + 100 + 4 + 1) + 302 * (4 + 1)
    assert small["copy_events"] == 100 * 100 + 100 * 99 / 2
    assert large["compared_by_commit"] == small["compared_by_commit"] < store.TXN_LIMIT


@pytest.mark.broad
def test_real_agents_on_a_real_etcd(tmp_path: Path) -> None:
    """The events of a swap grow with the agents, not with their square."""
    require()
    file = tmp_path / "f.json"
    asked = ["scale", "--live", "--agents", "8", "--agents", "24", "--json", str(file)]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 0, result.output
    few, many = (json.loads(file.read_text())["live"]["fleets"][n] for n in ("8", "24"))
    assert many["events"] < 4 * few["events"]
    assert many["etcd_cpu_s"] >= 0


def test_what_a_real_etcd_does(monkeypatch: pytest.MonkeyPatch) -> None:
    require()
    monkeypatch.setattr("loadtest.hosts.etcd.START_TIMEOUT_S", 120.0)
    found = store.measure(writes=200, watchers=3)
    assert found["largest_txn_compares"] == store.TXN_LIMIT
    assert min(found["writes_per_s"], found["events_per_s"]) > 0


def test_a_look_of_the_coordinator_is_timed() -> None:
    assert min(store.follower(count, 50).look_us for count in (4, 400)) > 0


@pytest.mark.broad
def test_the_command_simulates_what_it_is_asked(tmp_path: Path) -> None:
    asked = ["scale", "--hosts", "8", "--params", "1e9", "--chunk-mib", "64", "--json", str(tmp_path / "f.json")]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "f.json").read_text())
    cases = found["fan_out"]["as asked"]
    assert set(cases) == {"trees", "swarm", *BASELINES}
    assert all(case["scenario"]["hosts"] == 8 for case in cases.values())
    assert found["store"]["fleets"]["8"]["writes"] == 10 + 3 * 8 + 3 * 8


def test_the_command_refuses_what_cannot_be() -> None:
    result = CliRunner().invoke(app, ["scale", "--hosts", "5", "--hosts-per-instance", "2"])
    assert result.exit_code == 2
    assert "multiple" in result.output
