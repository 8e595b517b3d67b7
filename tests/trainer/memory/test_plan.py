"""Memory that each phase needs, whether it fits, and what makes room; how much of a device there is."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from tests.trainer.faults.runs import fine_tuning
from trainer.config import MemoryConfig, TrainerConfig, strict
from trainer.errors import MemoryPlanError
from trainer.megatron.hf_config import load_shape
from trainer.memory import build
from trainer.memory.build import budget_bytes, reserve_bytes
from trainer.memory.ledger import GIB, Ledger, Restartable, State
from trainer.memory.phases import CYCLE, NEEDS, Moves, Plan
from trainer.plan import estimate
from trainer.plan.report import workload_of

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
    Plan({n: s * GIB for n, s in SIZES.items()}, 200 * GIB).check()
    with pytest.raises(MemoryPlanError) as refused:
        Plan({n: s * GIB for n, s in SIZES.items()}, 220 * GIB, reserve=21 * GIB).check()
    assert refused.value.exit_code == 2
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
    with pytest.raises(MemoryPlanError, match=r"b .* does not fit .* a .* is held") as refused:
        ledger.bring("b")
    assert refused.value.exit_code == 2
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


def test_a_component_says_what_it_cannot_do() -> None:
    stopped, log = component("a", 1)
    stopped.state = "offloaded"  # by whatever mistake
    with pytest.raises(MemoryPlanError, match="a is kept nowhere"):
        stopped.reload()
    assert log == []


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """80 GiB, of which other processes hold 20 and this one 10; another rank has 3 GiB less."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (50 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 10 * GIB)
    monkeypatch.setattr(build, "gather_json", lambda mine: [mine, mine - 3 * GIB])


def configured(path: str, **memory: Any) -> TrainerConfig:
    return strict.build(TrainerConfig, fine_tuning(path, memory=memory))


@pytest.mark.usefixtures("gpu")
def test_a_gpu_s_budget_is_what_others_leave_less_what_libraries_take() -> None:
    """Memory that this process holds counts, and a server that is awake; 2 GiB are CUDA's and NCCL's."""
    assert budget_bytes(MemoryConfig(), 0) == (50 + 10 - 2 - 3) * GIB
    assert budget_bytes(MemoryConfig(), 20 * GIB) == (50 + 10 + 20 - 2 - 3) * GIB
    assert budget_bytes(MemoryConfig(budget_gib=70), 20 * GIB) == 70 * GIB


@pytest.mark.usefixtures("gpu")
def test_a_gpu_keeps_room_for_activations(tiny_model: str) -> None:
    """Of components alone a device may be full; the first forward pass would not fit then."""
    config, shape = configured(tiny_model), load_shape(tiny_model)
    found = estimate(shape, config.parallel, workload_of(config, min(4096, shape.max_positions)))
    assert reserve_bytes(config, shape) == found.activations + found.logits > 0
    assert reserve_bytes(configured(tiny_model, reserve_gib=0), shape) == 0


def test_a_host_gives_all_that_it_has(tiny_model: str) -> None:
    """Activations come and go in the memory that the budget leaves."""
    assert reserve_bytes(configured(tiny_model), load_shape(tiny_model)) == 0
    assert reserve_bytes(configured(tiny_model, reserve_gib=2), load_shape(tiny_model)) == 2 * GIB
