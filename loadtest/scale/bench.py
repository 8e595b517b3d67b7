"""The standard cases, and the table of what came of them."""

from __future__ import annotations

import json as jsonlib
import statistics
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import loadtest.scale.records as records
import loadtest.scale.store as store
from loadtest.measure.run import with_machine
from loadtest.scale.network import MIB, Outcome, Scenario, Way
from loadtest.scale.swarm import distribute

GIB = 1 << 30
BASELINES: tuple[Way, ...] = ("star", "tree", "chain")

FEW = Scenario(hosts=8, params=8e9, nic_gbit=100)
SOME = Scenario(hosts=64, params=70e9, chunk_nbytes=128 * MIB)
MANY = Scenario(hosts=1000, params=1e12, hosts_per_instance=4, chunk_nbytes=GIB)
WHOLE = replace(MANY, hosts=256, hosts_per_instance=1)
PARTS = replace(MANY, sources=32, way="swarm")
FAILING = 50  # one host of so many
LEASE_S = 5.0  # after which a host that was cut off is missed


def standard() -> dict[str, dict[str, Scenario]]:
    """By group and name."""
    fewer = replace(MANY, hosts=128)
    return {
        "8 hosts, 8 B parameters, 100 Gbit/s": all_ways(FEW),
        "the same 8 with one that fails": failing(FEW),
        "64 hosts, 70 B parameters, 400 Gbit/s": all_ways(SOME),
        "the same 64 with one that fails": failing(SOME),
        "1,000 hosts, 1 T parameters, four hosts an instance, one publisher": all_ways(MANY),
        "the same 1,000 with 20 that fail": {n: case for n, case in failing(MANY).items() if n.startswith("trees")},
        "the same, published by 32 hosts": {
            "swarm": PARTS,
            "swarm, wide": _wide(PARTS),
            "swarm, wide, uplinks 4:1": replace(_wide(PARTS), oversubscription=4.0),
        },
        "256 hosts that need all of 1 T parameters, one publisher": _both(WHOLE),
        "chunk size: 128 hosts, 1 T parameters, four hosts an instance, one publisher": {
            f"trees, {size} MiB": replace(fewer, chunk_nbytes=size * MIB) for size in (512, 1024, 2048, 4096)
        },
    }


def all_ways(scenario: Scenario) -> dict[str, Scenario]:
    """The planner and, where there is one source, what it is compared with; those hear of new chunks at once."""
    if scenario.sources > 1:
        return {"swarm": replace(scenario, way="swarm")}
    baselines = {way: replace(scenario, way=way, poll_s=0.0) for way in BASELINES}
    return _both(scenario) | baselines


def _both(scenario: Scenario) -> dict[str, Scenario]:
    """The scenario as peers do it, and as it would be without the trees."""
    return {"trees": scenario, "swarm": replace(scenario, way="swarm")}


def failing(scenario: Scenario) -> dict[str, Scenario]:
    """With processes that die, hosts that are cut off and missed when their lease ends, and hosts with slow links."""
    some = max(1, scenario.hosts // FAILING)
    found = {}
    for name, case in _both(scenario).items():
        found[f"{name}, killed"] = replace(case, dying=some, notice_s=scenario.latency_s)
        found[f"{name}, cut off"] = replace(case, dying=some, notice_s=LEASE_S)
        found[f"{name}, slow"] = replace(case, slow=some)
    return found


def _wide(scenario: Scenario) -> Scenario:
    """Twice the holders and reads, and room for them."""
    return replace(scenario, holders=12, total=16, readers=24)


FLEETS = (10, 100, 1000)
SLOTS_IN_A_SWAP = 3  # the active version, the one before, the one that comes


def run(json: Path | None, only: Scenario | None = None) -> dict[str, Any]:
    """Simulate the standard cases, or `only` one in all ways; print the tables, write the figures to `json`."""
    out, groups = Console(), {"as asked": all_ways(only)} if only is not None else standard()
    found: dict[str, Any] = {"fan_out": {}}
    for group, cases in groups.items():
        found["fan_out"][group] = figures = {name: simulated(scenario) for name, scenario in cases.items()}
        _print_fan_out(out, group, figures)
    found["store"] = _store(FLEETS if only is None else (only.hosts // only.hosts_per_instance,))
    _print_store(out, found["store"])
    if json is not None and json.exists() and "live" in (there := jsonlib.loads(json.read_text())):
        found["live"] = there["live"]  # `--live` measured it
    return with_machine(found, json)


def simulated(scenario: Scenario) -> dict[str, Any]:
    """Seconds, and bytes per host."""
    started = time.perf_counter()
    outcome = distribute(scenario)
    receivers = outcome.out_nbytes[scenario.sources :]
    return {
        "scenario": asdict(scenario),
        "host_nbytes": scenario.host_nbytes,
        "lower_bound_s": scenario.lower_bound_s,
        "first_s": outcome.done_s[0],
        "median_s": statistics.median(outcome.done_s),
        "last_s": outcome.done_s[-1],
        "source_out_max_nbytes": max(outcome.out_nbytes[: scenario.sources]),
        "source_out_nbytes": outcome.source_nbytes,
        "source_copies": outcome.source_nbytes / (scenario.host_nbytes * scenario.hosts_per_instance),
        "receiver_out_max_nbytes": max(receivers),
        "receiver_out_mean_nbytes": statistics.fmean(receivers),
        "receiver_in_nbytes": statistics.fmean(outcome.in_nbytes),
        "between_racks_nbytes": outcome.crossed_nbytes,
        "memory_in_a_swap_nbytes": SLOTS_IN_A_SWAP * scenario.host_nbytes,
        **_control(scenario, outcome),
        "simulated_in_s": time.perf_counter() - started,
    }


def _control(scenario: Scenario, outcome: Outcome) -> dict[str, Any]:
    """Requests of receivers to holders besides those for chunks; an answer carries a bitmap."""
    bitmap = -(-(scenario.chunks // 8) * 4 // 3)
    return {
        "reads": outcome.reads,
        "opened": outcome.opened,
        "refused": outcome.refused,
        "asked": outcome.asked,
        "bitmaps_nbytes": outcome.asked * bitmap,
        "planner_us": 1e6 * outcome.planner_s / max(1, outcome.planned),
    }


def _store(fleets: tuple[int, ...]) -> dict[str, Any]:
    """Counted writes and events, for fleets of as many instances as hosts, and what this machine takes for each."""
    flow, followers = records.measure(), [asdict(store.follower(n)) for n in fleets]
    return {
        "writes_by_kind": flow.kinds,
        "fixed": asdict(flow.fixed),
        "each_instance": asdict(flow.each),
        "fleets": {str(n): records.at_scale(flow, n, n) for n in fleets},
        "this_machine": {"etcd": store.measure(), "followers": followers},
    }


def _print_fan_out(out: Console, group: str, figures: dict[str, Any]) -> None:
    sample = next(iter(figures.values()))
    title = f"{group}: {sample['host_nbytes'] / 1e9:.1f} GB each, bound {sample['lower_bound_s']:.2f} s"
    columns = ("first, median, last, s", "source sends, versions", "busiest receiver sends, GB", "between racks, TB")
    table = Table("", *columns, "planner, us", "simulated in, s", title=title)
    for name, f in figures.items():
        times = f"{f['first_s']:.2f}, {f['median_s']:.2f}, {f['last_s']:.2f}"
        sent = f"{f['receiver_out_max_nbytes'] / 1e9:.1f}", f"{f['between_racks_nbytes'] / 1e12:.2f}"
        took = f"{f['planner_us']:.0f}", f"{f['simulated_in_s']:.1f}"
        table.add_row(name, times, f"{f['source_copies']:.2f}", *sent, *took)
    out.print(table)


def _print_store(out: Console, found: dict[str, Any]) -> None:
    columns = ("writes", "written, MB", "events", "sent, GB", "keys compared", "coordinator, CPU us a look")
    table = Table("instances and hosts", *columns, title="the store, one swap")
    for (n, f), cost in zip(found["fleets"].items(), found["this_machine"]["followers"], strict=True):
        cells = f"{f['writes']:,}", f"{f['written_nbytes'] / 1e6:.2f}", f"{f['events']:,}"
        more = f"{f['sent_nbytes'] / 1e9:.3f}", f"{f['compared_by_commit']:,}", f"{cost['look_us']:.0f}"
        table.add_row(n, *cells, *more)
    out.print(table)
    out.print("this machine:", found["this_machine"]["etcd"])
