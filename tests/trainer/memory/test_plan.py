"""What each phase needs, whether it fits, and what makes room; what the section `memory` refuses."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from trainer.config import TrainerConfig, strict
from trainer.errors import ConfigError, MemoryPlanError, OverBudget
from trainer.memory.ledger import Base, Ledger, Restartable, State
from trainer.memory.phases import CYCLE, NEEDS, Moves, Plan

SIZES = {
    "actor": 40,
    "actor_optimizer": 60,
    "critic": 40,
    "critic_optimizer": 60,
    "reference": 20,
    "engine": 50,
    "kv_cache": 70,
    "reward_model": 10,
}
EVERYTHING = frozenset(SIZES)


def test_a_phase_that_cannot_fit_is_refused_with_the_numbers() -> None:
    Plan({n: s << 30 for n, s in SIZES.items()}, 200 << 30).check()
    with pytest.raises(OverBudget) as refused:
        Plan({n: s << 30 for n, s in SIZES.items()}, 220 << 30, reserve=21 << 30).check()
    assert (refused.value.needed, refused.value.budget) == (200 << 30, 199 << 30)
    told = str(refused.value)
    for number in ("phase train", "200.00 GiB", "actor_optimizer 60.00 GiB", "220.00 GiB less 21.00 GiB"):
        assert number in told
    assert "engine" not in told, "it is not needed in that phase"


def test_nothing_moves_while_there_is_room() -> None:
    plan = Plan(SIZES, sum(SIZES.values()))
    for phase in CYCLE:
        assert plan.moves(phase, EVERYTHING) == Moves((), ())


def test_what_is_needed_latest_leaves_first_and_no_more_than_must() -> None:
    """Before training the reference is not needed again for two phases, the server for one."""
    total = sum(SIZES.values())
    assert Plan(SIZES, total - 1).moves("train", EVERYTHING) == Moves(("reference",), ())
    assert Plan(SIZES, total - 21).moves("train", EVERYTHING) == Moves(("reference", "kv_cache", "engine"), ())
    assert Plan(SIZES, total - 1).moves("inference", EVERYTHING).away == ("kv_cache", "engine")
    assert Plan(SIZES, total - 1).moves("rollout", EVERYTHING).away == ("actor_optimizer",)


@pytest.mark.parametrize("budget", range(200, 351, 10))
def test_every_switch_of_a_cycle_ends_within_the_budget_with_what_the_phase_needs(budget: int) -> None:
    held = frozenset({"actor", "actor_optimizer"})
    plan = Plan(SIZES, budget)
    for phase in itertools.chain(*[CYCLE] * 3, ("train", "rollout", "train")):
        moves = plan.moves(phase, held)
        assert not set(moves.away) & NEEDS[phase]
        held = held - set(moves.away) | set(moves.bring)
        assert NEEDS[phase] <= held
        assert sum(SIZES[name] for name in held) <= budget
        assert ("engine" in held) == ("kv_cache" in held)


def component(name: str, nbytes: int, state: State = "destroyed") -> tuple[Restartable, list[str]]:
    log: list[str] = []
    return Restartable(name, nbytes, lambda: log.append("start"), lambda: log.append("stop"), state), log


def test_the_ledger_counts_what_is_instantiated_and_keeps_the_budget() -> None:
    ledger = Ledger(100)
    (a, log_a), (b, log_b) = component("a", 60), component("b", 50)
    ledger.add(a)
    ledger.add(b)
    assert (ledger.held, ledger.free) == (0, 100)
    ledger.bring("a")
    assert (ledger.held, ledger.free, a.state) == (60, 40, "instantiated")
    with pytest.raises(OverBudget, match=r"b .* does not fit .* a .* is held") as refused:
        ledger.bring("b")
    assert (refused.value.needed, refused.value.budget) == (110, 100)
    assert log_b == [], "it was started before it was counted"
    ledger.put_away("a")
    ledger.bring("b")
    assert (log_a, log_b, ledger.held) == (["start", "stop"], ["start"], 50)
    assert set(ledger.ms) == {"a", "b"}


def test_a_component_changes_only_as_its_state_allows() -> None:
    ledger = Ledger(100)
    ledger.add(component("a", 1, "instantiated")[0])
    with pytest.raises(MemoryPlanError, match="cannot instantiate a: it is instantiated"):
        ledger.instantiate("a")
    with pytest.raises(MemoryPlanError, match="cannot reload a: it is instantiated, not offloaded"):
        ledger.reload("a")
    with pytest.raises(MemoryPlanError, match="nowhere to go"):
        ledger.offload("a")
    assert ledger["a"].state == "instantiated"
    with pytest.raises(MemoryPlanError, match="no component 'c'"):
        ledger.bring("c")
    with pytest.raises(MemoryPlanError, match="two components"):
        ledger.add(component("a", 1)[0])


def test_a_change_that_fails_leaves_the_state_as_it_was() -> None:
    def broken() -> None:
        raise MemoryPlanError("no")

    ledger = Ledger(100)
    ledger.add(Restartable("a", 1, broken, broken, "instantiated"))
    with pytest.raises(MemoryPlanError, match="no"):
        ledger.destroy("a")
    assert ledger["a"].state == "instantiated"


def test_a_component_says_what_it_cannot_do_and_cannot_be_built_without_an_end() -> None:
    class Endless(Base):
        """It never gives anything back."""

    with pytest.raises(TypeError, match="_destroy"):
        Endless("a")  # type: ignore[abstract]
    stopped, log = component("a", 1)
    stopped.state = "offloaded"  # by whatever mistake
    with pytest.raises(MemoryPlanError, match="a is kept nowhere"):
        stopped.reload()
    assert log == []


ASYNC = {
    "schedule": {"name": "async"},
    "algorithm": {"name": "grpo"},
    "gateway": {"url": "http://unused"},
    "rollout": {"fixed_sampler": True},
}
SERVING = {"admin_url": "http://127.0.0.1:8001"}


def build(memory: dict[str, Any], **more: Any) -> TrainerConfig:
    config: dict[str, Any] = {"model": {"path": "m"}, "data": {"kind": "arithmetic"}, "algorithm": {"name": "sft"}}
    return strict.build(TrainerConfig, config | {"steps": 1, "memory": memory} | more)


def test_a_whole_section() -> None:
    memory = build({"budget_gib": 70, "reserve_gib": 12, "serving": SERVING | {"level": 1}}).memory
    assert memory is not None
    assert memory.serving is not None
    assert (memory.budget_gib, memory.serving.level, memory.serving.ttl_s, memory.offload) == (70.0, 1, 60.0, "auto")


@pytest.mark.parametrize(
    ("memory", "more", "told"),
    [
        ({}, ASYNC, "memory: phases share the device, but under async they overlap"),
        ({}, {"parallel": {"data": 2, "shard": "full"}}, "memory: parallel.shard full owns its storages"),
        ({"budget_gib": 0}, {}, "memory.budget_gib: must be positive"),
        ({"budget_gib": 2, "reserve_gib": 2}, {}, "reserve_gib: 2 leaves nothing of budget_gib"),
        ({"offload": "nvme"}, {}, "memory.offload"),
        ({"serving": {"admin_url": "8001"}}, {}, "is not an HTTP address"),
        ({"serving": SERVING | {"level": 3}}, {}, "memory.serving.level"),
        ({"serving": SERVING | {"ttl_s": 1}}, {}, "memory.serving.ttl_s: must be in"),
        ({"serving": SERVING | {"engin_gib": 3}}, {}, "engine_gib"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_by_name(memory: dict[str, Any], more: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        build(memory, **more)
    assert told in str(refused.value)
