"""The trainer on the emulated GPU, beside the same work on a CPU: every layout but FSDP2, checkpoints, phases, what is
exported and published; and errors, each of which has to be noticed."""

from __future__ import annotations

import functools
import hashlib
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
import torch
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import _disable_current_modes

from tests.gpu_emulated import standin
from tests.gpu_emulated.forks import forked
from tests.gpu_emulated.ranks import RanksFailed, on_cpus, on_gpus

Layout = dict[str, Any]
MB = 1 << 20
HALF = {"model": {"dtype": "bfloat16"}}
OFFLOAD = {"optimizer": {"offload": True}}
MUON = {"optimizer": {"name": "muon"}}
GRPO, PPO, DPO = ({"algorithm": {"name": name}} for name in ("grpo", "ppo", "dpo"))
BALANCE, Z = {"router_balance_loss": 0.01}, {"router_z_loss": 0.01}
DATA, TENSOR, PIPELINE, CONTEXT = ({name: 2} for name in ("data", "tensor", "pipeline", "context"))
SEQUENCE: Layout = {"tensor": 2, "sequence": True}
SPREAD: Layout = {"data": 2, "expert": 2}


@dataclass(frozen=True)
class Run:
    """A model (`conftest.py`) in a layout, and what else its configuration says. `packed` rows. A GPU's numbers are a
    CPU's within `rel`: to the bit where that is 0."""

    model: str = "llama"
    parallel: Layout = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    packed: bool = False
    rel: float = 0.0


RUNS = {
    "float32": Run(packed=True),
    "float32-plain": Run(),
    "bfloat16": Run(config=HALF, packed=True),
    "bfloat16-plain": Run(config=HALF),
    "float16": Run(config={"model": {"dtype": "float16"}}),
    "head in float32": Run("tied", config={"model": {"dtype": "bfloat16", "fp32_head": True}}),
    "recompute": Run(config={"model": {"dtype": "bfloat16", "recompute": "full"}}),
    "lora": Run(config={"lora": {"rank": 4}}),
    "muon": Run(config=MUON, rel=2e-4),  # its products are in bfloat16 on a GPU
    "offloaded float32": Run(config=OFFLOAD),
    "offloaded bfloat16": Run(config=OFFLOAD | HALF),
    "dpo": Run(config=DPO),
    "grpo": Run(config=GRPO),
    "ppo": Run(config=PPO),
    "mixture": Run("mixture"),
    "mixture, balance loss alone": Run("mixture", config={"model": BALANCE}),
    "mixture, z loss alone": Run("mixture", config={"model": Z}),
    "data": Run(parallel=DATA),
    "data, grpo": Run(parallel=DATA, config=GRPO),
    "data, muon": Run(parallel=DATA, config=MUON, rel=2e-4),
    "tensor": Run(parallel=TENSOR),
    "tensor, ppo": Run(parallel=TENSOR, config=PPO),
    "sequence": Run(parallel=SEQUENCE, config=HALF, packed=True),
    "pipeline": Run(parallel=PIPELINE),
    "pipeline, tied": Run("tied", PIPELINE),
    "pipeline, dpo": Run(parallel=PIPELINE, config=DPO | HALF),
    "pipeline, both losses": Run("mixture", PIPELINE, {"model": BALANCE | Z}),
    "expert": Run("mixture", SPREAD),
    "context": Run(parallel=CONTEXT),
    "context, packed": Run(parallel=CONTEXT, packed=True),
    "context, packed bfloat16": Run(parallel=CONTEXT, config=HALF, packed=True),
}


# what ranks do --------------------------------------------------------------------------------------------------------


def case(name: str, *args: Any, **kwargs: Any) -> Callable[[], Any]:
    """Of tests/trainer/cases."""

    def work() -> Any:
        from tests.trainer import cases

        return getattr(cases, name)(*args, **kwargs)

    return work


def trained(path: str, run: Run, steps: int = 3) -> dict[str, Any]:
    """The numbers of some steps, and the digest of what is exported afterwards."""
    from tests.trainer.cases import engine, numbers
    from tests.trainer.cases.packing import sequences
    from trainer.batch import assemble
    from trainer.config import PackingConfig

    with engine(path, run.parallel, **{"micro_batch": 4} | run.config) as built:
        found, packing = [], PackingConfig(48) if run.packed else None
        for step in range(steps):
            layout = {"ranks": built.config.parallel.data, "minibatches": built.algorithm.minibatches}
            found.append(numbers(built.step(assemble(sequences(built, step), packing, **layout))))
        tensors = {name: tensor.cpu() for name, tensor in built.export("float32")}
        return {"steps": found, "exported": digest({n: bytes(t.numpy().data) for n, t in tensors.items()})}


def digest(contents: dict[str, Any]) -> str:
    found = hashlib.sha256()
    for name in sorted(contents):
        found.update(name.encode() + contents[name])
    return found.hexdigest()


def in_phases(path: str, parallel: Layout, offload: str | None, directory: str, **config: Any) -> dict[str, Any]:
    """Steps beside a server that is as large as the trainer, on a device that has room for one of them; without
    `offload` on one that has room for both. Numbers, whether weights came back to the bit, bytes of the device in each
    phase, and how often memory has been pinned by then."""
    from tests.trainer.batches import sampled_batch
    from tests.trainer.cases import engine, numbers
    from trainer.config import MemoryConfig
    from trainer.memory import offload as offloading
    from trainer.memory.build import build_memory
    from trainer.memory.ledger import Restartable

    pinned = Mock(side_effect=offloading.pinned)
    offloading.pinned = pinned  # type: ignore[assignment]
    with engine(path, parallel, **config) as built:

        def weights() -> list[torch.Tensor]:
            return [p.detach().cpu().clone() for chunk in built.model for p in chunk.parameters()]

        room = 0
        if offload:
            memory = build_memory(msgspec.structs.replace(built.config, memory=MemoryConfig(1024.0)), built)
            room = sum(component.bytes for component in memory.ledger.components)  # type: ignore[union-attr]
        section = MemoryConfig(room * 1.02 / 2**30, 0.0, directory=directory, offload=offload) if offload else None
        server = Restartable("engine", room, Mock(), Mock(), "instantiated")
        memory = build_memory(msgspec.structs.replace(built.config, memory=section), built, [server])
        told: dict[str, Any] = {"numbers": [], "kept": [], "used": [], "pinned": [], "room": room}
        for step in range(3):
            memory.enter("train")
            before, used = weights(), {"train": _used()}
            memory.enter("rollout")
            used["rollout"] = _used()
            told["pinned"].append(pinned.call_count)
            memory.enter("inference")
            fields = built.prefill_fields(sampled_batch(built.shape.vocab, seed=step))
            memory.enter("train")
            told["kept"].append(all(map(torch.equal, before, weights())))
            told["numbers"].append(numbers(built.step(fields)))
            told["used"].append(used)
        return told


def _used() -> int:
    if not torch.cuda.is_available():
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return standin.ask(f"used{torch.cuda.current_device()}")


def written(path: str, parallel: Layout, directory: str) -> list[float]:
    """Write the weights after a step as a checkpoint; most bytes of the device that this takes, in parts
    of the largest tensor, and the bytes of all in the same parts."""
    from tests.trainer.batches import random_batch
    from tests.trainer.cases import engine
    from trainer.megatron.hf_files import write_shards
    from trainer.megatron.parallel import device

    with engine(path, parallel, model={"dtype": "bfloat16"}) as built:
        built.step(random_batch(built.shape.vocab))
        sizes = [tensor.nbytes for _, tensor in built.export("float32")] or [1]
        gpu = device().type == "cuda"
        if gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated() if gpu else 0
        write_shards(directory, built.export("float32"), built.part)
        taken = torch.cuda.max_memory_allocated() - held if gpu else 0
        return [taken / max(sizes), sum(sizes) / max(sizes)]


def published(path: str, parallel: Layout, dtype: str, bucket: str) -> str | None:
    """The digest of the bytes in the slot of a version, which holds the weights after a step; on rank 0."""
    from tests.trainer.batches import random_batch
    from tests.trainer.cases import publishing
    from trainer.megatron.parallel import on_rank_zero
    from weightsync.control.parts import base_of
    from weightsync.memory.receiver import SlotReader

    with publishing(path, parallel, "", dtype, bucket={"url": bucket}) as (built, publisher):
        built.step(random_batch(built.shape.vocab))
        publisher.publish(1)

        def content() -> str:
            base = base_of(publisher._publisher.versions()[-1])
            assert base is not None
            with SlotReader.open(base.slot, manifest_digest=base.manifest_digest, version=base.version) as reader:
                reader.verify_all()
                return digest({name: reader.buffer(name) for name in reader.manifest.tensors})

        return on_rank_zero(content)


# training -------------------------------------------------------------------------------------------------------------


def world(parallel: Layout) -> int:
    return 2 if parallel else 1


@pytest.mark.parametrize("name", RUNS)
def test_training_is_that_of_a_cpu(models: dict[str, str], name: str) -> None:
    """Losses, norms, metrics and what is exported."""
    run = RUNS[name]
    work = functools.partial(trained, models[run.model], run)
    expected, found = on_cpus(work, world(run.parallel)), on_gpus(work, world(run.parallel), poison=1)
    if not run.rel:
        assert found == expected
    for ours, theirs in zip(found, expected, strict=True):
        assert ours["steps"] == [pytest.approx(step, rel=run.rel) for step in theirs["steps"]]


@pytest.mark.parametrize("name", ["bfloat16-plain", "offloaded bfloat16", "offloaded float32"])
def test_streams_that_run_late_change_nothing(models: dict[str, str], name: str) -> None:
    work = functools.partial(trained, models[RUNS[name].model], RUNS[name])
    assert on_gpus(work, poison=1, late=1) == on_gpus(work)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_an_offloaded_optimizer_frees_the_device_and_is_pinned(models: dict[str, str], dtype: str) -> None:
    how: dict[str, Any] = {"path": models["llama"], "steps": 2, "model": {"dtype": dtype}}
    (here,) = on_gpus(case("on_gpu", **how))
    (host,) = on_gpus(case("on_gpu", **how, optimizer={"lr": 1e-2, "offload": True}))
    assert (here["states"], host["states"], host["pinned"]) == (["cuda"], ["cpu"], [True])
    assert host["bytes"] < here["bytes"]


# checkpoints ----------------------------------------------------------------------------------------------------------

SAVED = {
    "ppo": Run(config=PPO | HALF),
    "offloaded float32": Run(config=OFFLOAD),
    "offloaded bfloat16": Run(config=OFFLOAD | HALF),
    "data": Run(parallel=DATA, config=HALF),
    "expert": Run("mixture", SPREAD),
}


def saving(models: dict[str, str], run: Run, directory: Path, of: str = "saved_while_training") -> Callable[[], Any]:
    return case(of, models[run.model], run.parallel, directory=str(directory), **run.config)


@pytest.mark.parametrize("name", SAVED)
def test_a_run_is_resumed_to_the_bit(models: dict[str, str], tmp_path: Path, name: str) -> None:
    """Of a checkpoint that was taken while streams run late, and written after two more steps."""
    run = SAVED[name]
    late = int(not run.parallel)
    for found in on_gpus(saving(models, run, tmp_path), world(run.parallel), poison=1, late=late):
        assert found["unwritten"]
        assert found["resumed"] == found["through"]


@pytest.mark.parametrize("name", ["ppo", "data"])
def test_a_checkpoint_is_resumed_on_the_other_kind_of_device(models: dict[str, str], tmp_path: Path, name: str) -> None:
    run, kinds = SAVED[name], (on_cpus, on_gpus)
    for directory, (writes, reads) in zip(("cpu", "gpu"), (kinds, kinds[::-1]), strict=True):
        saved = writes(saving(models, run, tmp_path / directory), world(run.parallel))
        resumed = reads(saving(models, run, tmp_path / directory, "resumed"), world(run.parallel))
        assert resumed == [found["through"] for found in saved], directory


@pytest.mark.parametrize("parallel", [{}, DATA], ids=["one", "data"])
def test_a_checkpoint_takes_little_of_the_device(models: dict[str, str], parallel: Layout) -> None:
    work = case("saving_on_gpu", models["llama"], parallel=parallel, dtype="bfloat16")
    for taken, parameters in on_gpus(work, world(parallel)):
        assert taken < 2 * parameters  # all-gathered by NCCL: 8 + 4 / D bytes each


# memory ---------------------------------------------------------------------------------------------------------------

PHASES: dict[str, tuple[Layout, str, dict[str, Any]]] = {
    "host": ({}, "host", PPO | HALF),
    "disk": ({}, "disk", HALF),
    "data": (DATA, "host", {}),
}


@pytest.mark.parametrize("name", PHASES)
def test_what_is_offloaded_leaves_the_device_and_comes_back(models: dict[str, str], tmp_path: Path, name: str) -> None:
    parallel, offload, config = PHASES[name]
    how = functools.partial(in_phases, models["larger"], parallel, directory=str(tmp_path), **config)
    late = int(not parallel)
    shared = on_gpus(functools.partial(how, offload=offload), world(parallel), poison=1, late=late)
    alone = on_cpus(functools.partial(how, offload=None), world(parallel))
    for ours, theirs in zip(shared, alone, strict=True):
        assert ours["numbers"] == theirs["numbers"]
        assert ours["kept"] == [True] * 3
        for used in ours["used"][1:]:  # from the second step on, with Adam's states
            assert used["train"] - used["rollout"] > 0.9 * ours["room"], ours
        first, second, third = ours["pinned"]
        assert second == third, "pinned anew for each offload"
        assert (first > 0) is (offload == "host")


def test_a_refused_pin_is_an_error_of_ours_and_leaves_none_behind() -> None:
    def work() -> list[Any]:
        from trainer.errors import MemoryPlanError
        from trainer.memory.offload import HostVault

        storage = torch.ones(MB, device="cuda").untyped_storage()
        with pytest.raises(MemoryPlanError, match=r"memory\.offload to disk"):
            HostVault().save([storage])
        return [standin.library().cudaPeekAtLastError(), torch.ones(4, device="cuda").sum().item()]

    assert on_gpus(work, pin=0) == [[0, 4.0]]


def test_a_plan_counts_what_others_hold_and_leaves_room_for_activations(models: dict[str, str]) -> None:
    def work() -> list[int]:
        from trainer.config import MemoryConfig, TrainerConfig, strict
        from trainer.megatron.hf_config import load_shape
        from trainer.memory.build import budget_bytes, reserve_bytes
        from trainer.tiny_model import tiny_run

        path, memory = models["llama"], MemoryConfig()
        given = {"data": {"kind": "arithmetic"}, "algorithm": {"name": "sft"}, "steps": 1, "model": {"path": path}}
        config = strict.build(TrainerConfig, tiny_run(given | {"memory": {}}))
        whole = budget_bytes(memory, 0)
        standin.hold(0, 3 << 30)
        return [whole, budget_bytes(memory, 0), budget_bytes(memory, 1 << 30), reserve_bytes(config, load_shape(path))]

    ((whole, shared, awake, reserve),) = on_gpus(work, mib=16 << 10)
    assert whole < 15 << 30
    assert shared <= whole - (2 << 30)
    assert awake > shared
    assert reserve > 0


# exports and versions -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "parallel"), [("llama", {}), ("mixture", SPREAD)], ids=["one", "expert"])
def test_exported_files_are_those_of_a_cpu(
    models: dict[str, str], tmp_path: Path, model: str, parallel: Layout
) -> None:
    found = []
    for name, ranks in (("cpu", on_cpus), ("gpu", on_gpus)):
        (tmp_path / name).mkdir()
        work = functools.partial(written, models[model], parallel, str(tmp_path / name))
        for taken, whole in ranks(work, world(parallel)):
            assert taken <= 3 < whole / 2, "copies are collected on the device"
        found.append({file.name: file.read_bytes() for file in (tmp_path / name).iterdir()})
    assert found[0] == found[1] != {}


VERSIONS = [("llama", {}, "bfloat16"), ("tied", TENSOR, "float32"), ("mixture", SPREAD, "bfloat16")]


@pytest.mark.parametrize(("model", "parallel", "dtype"), VERSIONS, ids=["one", "tensor", "expert"])
def test_published_bytes_are_those_of_a_cpu(
    models: dict[str, str], tmp_path: Path, model: str, parallel: Layout, dtype: str
) -> None:
    found = [
        ranks(
            functools.partial(published, models[model], parallel, dtype, f"file://{tmp_path}/{ranks.__name__}"),
            world(parallel),
        )
        for ranks in (on_cpus, on_gpus)
    ]
    assert found[0] == found[1]
    assert found[0][0]


# devices --------------------------------------------------------------------------------------------------------------


def test_ranks_that_see_one_device_each_take_it(models: dict[str, str]) -> None:
    """As SLURM shows it to them."""
    work = functools.partial(trained, models["llama"], Run(parallel=DATA), steps=1)
    assert on_gpus(work, 2, devices=1) == on_gpus(work, 2)


def test_more_ranks_than_devices_are_refused(models: dict[str, str]) -> None:
    with pytest.raises(RanksFailed, match=r"ConfigError: .*rank 2 of its host, which shows it 2 GPUs"):
        on_gpus(lambda: None, 3, devices=2)


def test_float32_with_groups_of_heads_takes_a_kernel_that_writes_no_scores(models: dict[str, str]) -> None:
    def work() -> list[int]:
        from trainer.megatron import attention

        chosen, plain = list[int](), torch._fused_sdp_choice

        def attend(q: Any, k: Any, v: Any, **how: Any) -> Any:
            with _disable_current_modes():  # which would ask for a CPU's
                chosen.append(plain(q, k, v, **how))
            return q

        attention.F = types.SimpleNamespace(scaled_dot_product_attention=attend)
        q, kv = (torch.ones(2, 8, heads, 16, device="cuda") for heads in (4, 2))
        module = attention.CausalAttention.__new__(attention.CausalAttention)
        torch.nn.Module.__init__(module)
        module.scale = 0.25
        module._causal(q, kv, kv)
        attend(*(t.transpose(1, 2) for t in (q, kv, kv)), is_causal=True, enable_gqa=True)
        return chosen

    efficient, math = (int(kind.value) for kind in (SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH))
    assert forked(work) == [efficient, math]


@pytest.mark.parametrize(("mib", "sleeps"), [(12 << 10, False), (9 << 10, True)])
def test_a_server_leaves_the_device_before_the_trainer_is_built_there(
    models: dict[str, str], mib: int, sleeps: bool
) -> None:

    def work() -> list[Any]:
        from tests.trainer.cases import opened
        from trainer.memory import build

        told: list[str] = []

        class Fleet:
            def __init__(self, _section: Any) -> None:
                standin.hold(0, 8 << 30)

            def asleep(self) -> bool:
                return bool(told)

            def sleep(self) -> None:
                told.append("sleep")

        build.Fleet = Fleet  # type: ignore[misc, assignment]
        serving = {"admin_url": "http://unused", "engine_gib": 4.0, "kv_cache_gib": 4.0}
        return [opened(models["larger"], {}, {"serving": serving}), told]

    state = "destroyed" if sleeps else "instantiated"
    assert on_gpus(work, mib=mib) == [[[["engine", state], ["kv_cache", state]], ["sleep"] * sleeps]]


# errors ---------------------------------------------------------------------------------------------------------------


def a_tensor_of_the_host_for_nccl(models: dict[str, str], _directory: Path) -> None:
    """The auxiliary loss that was not asked for is a zero of the host."""
    from trainer.megatron import router

    router.device = lambda: torch.device("cpu")
    trained(models["mixture"], RUNS["mixture, balance loss alone"], 1)


def a_question_about_shared_memory(models: dict[str, str], directory: Path) -> None:
    """torch says of all memory of a device that it is shared."""
    from trainer.memory import offload

    plain = offload.StorageComponent._offload

    def refusing(self: Any) -> None:
        if any(storage.is_shared() for storage in offload._storages(self._tensors())):
            raise offload.MemoryPlanError(f"{self.name} lies in shared memory")
        plain(self)

    offload.StorageComponent._offload = refusing  # type: ignore[method-assign]
    in_phases(models["llama"], {}, "disk", str(directory))


def generators_of_another_device(models: dict[str, str], _directory: Path) -> None:
    """A checkpoint of a CPU has the state of its generator where a GPU's has the device's."""
    from tests.trainer.cases import engine
    from trainer.checkpoint import engine_state

    engine_state.device = lambda: torch.device("cpu")
    with engine(models["llama"]):
        state = engine_state.rng_state()
        engine_state.set_rng_state(state | {"cuda": state["torch"]})


ERRORS: list[tuple[Callable[[dict[str, str], Path], None], str]] = [
    (a_tensor_of_the_host_for_nccl, "No backend type associated with device type cpu"),
    (a_question_about_shared_memory, "lies in shared memory"),
    (generators_of_another_device, "RNG state is wrong size"),
]


@pytest.mark.parametrize(("error", "said"), ERRORS, ids=[error.__name__ for error, _ in ERRORS])
def test_an_error_is_noticed(models: dict[str, str], tmp_path: Path, error: Any, said: str) -> None:
    """The same work without it is among the tests above."""
    with pytest.raises(RanksFailed, match=said):
        on_gpus(lambda: error(models, tmp_path), poison=1, late=1)


def test_checkpoints_that_nccl_gathers_are_noticed(models: dict[str, str]) -> None:
    def work() -> list[int]:
        from tests.trainer.cases import saving_on_gpu
        from trainer.checkpoint import engine_state

        engine_state._SHARDING["distrib_optim_fully_reshardable_mem_efficient"] = False
        return saving_on_gpu(models["llama"], dtype="bfloat16")

    ((taken, parameters),) = on_gpus(work)
    assert taken > 8 * parameters
