"""The cases of the standard run. Large ones have large chunks, so that they take minutes; the last group shows how
much that matters."""

from __future__ import annotations

from dataclasses import replace

from loadtest.scale.scenario import MIB, Scenario, Way

GIB = 1 << 30
BASELINES: tuple[Way, ...] = ("star", "tree", "chain")

FEW = Scenario(hosts=8, params=8e9, nic_gbit=100)
SOME = Scenario(hosts=64, params=70e9, chunk_nbytes=128 * MIB)
MANY = Scenario(hosts=1000, params=1e12, hosts_per_instance=4, chunk_nbytes=2 * GIB)
WHOLE = replace(MANY, hosts=256, hosts_per_instance=1, chunk_nbytes=4 * GIB)
PARTS = replace(MANY, sources=32)


def standard(delta_of_raw: float) -> dict[str, dict[str, Scenario]]:
    """By group and name; `delta_of_raw` is how much smaller a difference is than a version."""
    delta = replace(MANY, params=MANY.params * delta_of_raw, chunk_nbytes=32 * MIB)
    fewer = replace(MANY, hosts=128)
    return {
        "8 hosts, 8 B parameters, 100 Gbit/s": all_ways(FEW),
        "64 hosts, 70 B parameters, 400 Gbit/s": all_ways(SOME),
        "1,000 hosts, 1 T parameters, four hosts an instance, one publisher": all_ways(MANY),
        "the same, published by 32 hosts": {
            "swarm": PARTS,
            "swarm, wide": _wide(PARTS),
            "swarm, wide, uplinks 4:1": replace(_wide(PARTS), oversubscription=4.0),
        },
        "the same as a difference, one publisher": _both(delta),
        "256 hosts that need all of 1 T parameters, one publisher": _both(WHOLE),
        "chunk size: 128 hosts, 1 T parameters, four hosts an instance, one publisher": {
            f"swarm, {size} MiB": replace(fewer, chunk_nbytes=size * MIB) for size in (512, 1024, 2048, 4096)
        },
    }


def all_ways(scenario: Scenario) -> dict[str, Scenario]:
    """The planner and, where there is one source, what it is compared with; those hear of new chunks at once."""
    if scenario.sources > 1:
        return {"swarm": scenario}
    baselines = {way: replace(scenario, way=way, poll_s=0.0) for way in BASELINES}
    return _both(scenario) | baselines


def _both(scenario: Scenario) -> dict[str, Scenario]:
    """What peers do, and how it would be if they told each other nothing."""
    return {"swarm": scenario, "uninformed": replace(scenario, informed=False)}


def _wide(scenario: Scenario) -> Scenario:
    """Twice the holders and reads, and room for them."""
    return replace(scenario, holders=12, total=16, readers=24)
