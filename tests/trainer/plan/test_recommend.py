"""Which layout is recommended, by the tables; what is refused, and why; and `hotswap train --plan`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainer.config import OptimizerConfig, ParallelConfig, TrainerConfig, load, strict
from trainer.errors import ConfigError, NoLayout
from trainer.main import main
from trainer.megatron.hf_config import ModelShape, load_shape
from trainer.memory.ledger import GIB
from trainer.plan import Hardware, PlanOptions, Workload, estimate, recommend
from trainer.plan.recommend import Choice, candidates
from trainer.plan.report import as_yaml, reward_models, workload_of

WORK = Workload(length=4096, micro_batch=1)
# Published sizes of the families' models.
KNOWN: dict[str, dict[str, Any]] = {
    "1.5B": {"layers": 28, "hidden": 1536, "ffn": 8960, "heads": 12, "kv": 2, "vocab": 151936},
    "8B": {"layers": 32, "hidden": 4096, "ffn": 14336, "heads": 32, "kv": 8, "vocab": 128256},
    "70B": {"layers": 80, "hidden": 8192, "ffn": 28672, "heads": 64, "kv": 8, "vocab": 128256},
    "405B": {"layers": 126, "hidden": 16384, "ffn": 53248, "heads": 128, "kv": 8, "vocab": 128256},
    "30B-A3B": {"layers": 48, "hidden": 2048, "ffn": 6144, "heads": 32, "kv": 4, "vocab": 151936, "experts": 128},
}


def write_config(directory: Path, name: str) -> str:
    k = KNOWN[name]
    directory.mkdir(exist_ok=True)
    config: dict[str, Any] = {
        "architectures": ["Qwen3MoeForCausalLM" if "experts" in k else "LlamaForCausalLM"],
        "num_hidden_layers": k["layers"],
        "hidden_size": k["hidden"],
        "intermediate_size": k["ffn"],
        "num_attention_heads": k["heads"],
        "num_key_value_heads": k["kv"],
        "vocab_size": k["vocab"],
        "max_position_embeddings": 8192,
        "head_dim": 128,
    }
    if "experts" in k:
        config |= {"num_experts": k["experts"], "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)


def shape(directory: Path, name: str) -> ModelShape:
    return load_shape(write_config(directory, name))


@pytest.mark.parametrize(
    ("name", "gpus", "tensor", "pipeline"),
    [("1.5B", 8, 1, 1), ("8B", 8, 8, 1), ("8B", 64, 8, 1), ("70B", 64, 8, 2), ("70B", 512, 8, 2), ("405B", 1024, 8, 7)],
)
def test_the_tables_rows(tmp_path: Path, name: str, gpus: int, tensor: int, pipeline: int) -> None:
    """405 B has 126 layers, which 8 does not divide; 1024 GPUs are then 1008."""
    model = shape(tmp_path, name)
    choice = recommend(model, Hardware(gpus, 80 * GIB), WORK)
    p = choice.parallel
    assert choice.fits
    assert p.world_size == (1008 if name == "405B" else gpus)
    assert (p.tensor, p.pipeline, p.sequence) == (tensor, pipeline, tensor > 1)
    model.check_parallel(p)


def test_experts_are_spread_as_far_as_they_go(tmp_path: Path) -> None:
    choice = recommend(shape(tmp_path, "30B-A3B"), Hardware(64, 80 * GIB), WORK)
    p = choice.parallel
    assert p.tensor == 4, "it has four key-value heads"
    assert p.pipeline == 2, "it has 30.5 B weights"
    assert (p.expert, p.expert_tensor_size) == (4 * 8, 1), "over all ranks of a stage"


def test_memory_is_bought_in_the_order_of_the_table(tmp_path: Path) -> None:
    """The same model on ever smaller GPUs. What does not fit in any economy is cut as the next row says."""
    model = shape(tmp_path, "1.5B")
    order = [("none", "optimizer"), ("full", "optimizer"), ("full", "full")]
    found = []
    for gib in (80, 24, 16, 12, 8, 6, 3):
        try:
            choice = recommend(model, Hardware(4, gib * GIB), Workload(length=4096, micro_batch=2))
            found.append((choice.parallel.tensor, order.index((choice.economy.recompute, choice.economy.shard))))
        except NoLayout:
            found.append((99, 99))
    assert found == sorted(found)
    assert found[:3] == [(1, 0), (1, 1), (1, 2)]
    assert found[-1] == (99, 99)


@pytest.mark.parametrize("name", ["1.5B", "8B", "30B-A3B"])
def test_long_sequences_are_cut_as_far_as_their_activations_need(tmp_path: Path, name: str) -> None:
    """Before they are recomputed, and no further than a rank's piece is worth it."""
    model, hardware = shape(tmp_path, name), Hardware(64, 80 * GIB)
    assert recommend(model, hardware, Workload(length=8192)).parallel.context == 1
    choice = recommend(model, hardware, Workload(length=131072))
    p = choice.parallel
    assert choice.fits
    assert choice.economy.recompute == "none"
    assert p.context > 1
    assert p.world_size == 64
    assert f"sequences of 131072 tokens cut over {p.context} ranks" in choice.why
    model.check_parallel(p)
    tried = [c for c in candidates(model, hardware, Workload(length=131072)) if c.economy == choice.economy]
    alike = [c for c in tried if (c.parallel.tensor, c.parallel.pipeline) == (p.tensor, p.pipeline)]
    assert [c.fits for c in alike if c.parallel.context < p.context] == [False] * (p.context.bit_length() - 1)


def test_a_sequence_is_not_cut_into_pieces_that_are_too_short(tmp_path: Path) -> None:
    model = shape(tmp_path, "1.5B")
    found = candidates(model, Hardware(64, 80 * GIB), Workload(length=32768))
    assert {c.parallel.context for c in found} == {1, 2, 4, 8}
    few = candidates(model, Hardware(6, 80 * GIB, per_node=6), Workload(length=32768))
    assert {c.parallel.context for c in few} == {1, 2, 3, 6}, "as far as the GPUs can be divided"


def test_no_layout_is_refused_with_the_nearest_and_a_number_that_is_enough(tmp_path: Path) -> None:
    model = shape(tmp_path, "70B")
    with pytest.raises(NoLayout, match=r"no layout fits on 2 GPUs.* needs .* of .*Take (\d+) such GPUs") as refused:
        recommend(model, Hardware(2, 80 * GIB), WORK)
    enough = int(str(refused.value).split("Take ")[1].split()[0])
    assert recommend(model, Hardware(enough, 80 * GIB), WORK).fits
    with pytest.raises(NoLayout):
        recommend(model, Hardware(enough // 2, 80 * GIB), WORK)


def test_more_ranks_never_need_more_of_each(tmp_path: Path) -> None:
    model = shape(tmp_path, "8B")
    for axis in ("tensor", "data", "context", "pipeline"):
        totals = [estimate(model, ParallelConfig(**{axis: n}), WORK).total for n in (1, 2, 4, 8)]
        assert totals == sorted(totals, reverse=True), axis
    whole = estimate(model, ParallelConfig(data=8), WORK)
    sharded = estimate(model, ParallelConfig(data=8, shard="full"), WORK)
    assert sharded.weights < whole.weights / 3
    assert sharded.optimizer == whole.optimizer
    assert estimate(model, ParallelConfig(), Workload(4096, offload=True)).optimizer == 0


def settings(path: str, **more: Any) -> dict[str, Any]:
    return {
        "model": {"path": path, "dtype": "bfloat16"},
        "data": {"kind": "arithmetic"},
        "algorithm": {"name": "sft"},
        "steps": 1,
        "micro_batch": 1,
        "packing": None,
    } | more


def built(**more: Any) -> TrainerConfig:
    return strict.build(TrainerConfig, settings("unused", **more))


Plan = Callable[..., str]


@pytest.fixture
def plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Plan:
    """What `--plan` prints of a run's settings, on one line."""

    def printed(written: dict[str, Any], *arguments: str) -> str:
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(written))
        assert main(["--config", str(tmp_path / "run.yaml"), "--plan", *arguments]) == 0
        return " ".join(capsys.readouterr().out.split())

    return printed


def used(choice: Choice, path: str, root: Path) -> ParallelConfig:
    """The layout of a run that has taken over the YAML of a recommendation."""
    recommended = yaml.safe_load(as_yaml(choice).replace("model: {", f"model: {{path: {path}, "))
    (root / "run.yaml").write_text(yaml.safe_dump(settings(path) | {"model": {"path": path}} | recommended))
    return load(root / "run.yaml").parallel


def test_a_runs_models_and_micro_batches_are_counted(tmp_path: Path) -> None:
    gateway = {"url": "http://unused"}
    ppo = {"name": "ppo", "kl_coef": 0.1, "minibatches": 2, "samples_per_prompt": 8}
    more = {"algorithm": ppo, "gateway": gateway, "batch": 64, "micro_batch": 4, "parallel": {"data": 2}}
    more["rollout"] = {"fixed_sampler": True}
    work = workload_of(built(**more), 1000)
    assert (work.critics, work.references, work.sequences, work.length) == (1, 1, 64 * 8 // 2, 1000)
    packed = workload_of(built(packing={"max_tokens": 300}), 1000)
    assert (packed.length, packed.micro_batch, packed.references) == (300, 1, 0)


def test_micro_batches_under_way_are_those_of_the_layout_in_question(tmp_path: Path) -> None:
    """Not of the configured one: a batch of one sequence a rank there is many for a pipeline of fewer replicas."""
    work = workload_of(built(batch=64, parallel={"data": 64}), 4096)
    held = [work.under_way(ParallelConfig(tensor=8, pipeline=4, data=data), 0) for data in (2, 16, 32, 64)]
    assert held == [4, 4, 2, 1]
    model = shape(tmp_path, "70B")
    few = estimate(model, ParallelConfig(tensor=8, pipeline=4, data=64), work)
    assert estimate(model, ParallelConfig(tensor=8, pipeline=4, data=2), work).activations > 2 * few.activations


def test_a_forward_pass_takes_no_more_than_a_rank_has(tmp_path: Path) -> None:
    model, layout = shape(tmp_path, "1.5B"), ParallelConfig(data=2)
    found = estimate(model, layout, Workload(4096, micro_batch=128, sequences=8))
    assert found == estimate(model, layout, Workload(4096, micro_batch=4))


def test_a_preferences_two_answers_are_in_one_micro_batch() -> None:
    work = workload_of(built(algorithm={"name": "dpo"}, batch=8, micro_batch=1), 4096)
    assert (work.micro_batch, work.sequences) == (2, 16)


def test_muon_is_counted_and_given_nothing_that_it_cannot_do(tmp_path: Path) -> None:
    work = workload_of(built(optimizer={"name": "muon"}), 4096)
    assert work.optimizer == "muon"
    model = shape(tmp_path, "1.5B")
    adamw, muon = (estimate(model, ParallelConfig(), dataclasses.replace(work, optimizer=n)) for n in ("adamw", "muon"))
    assert muon.optimizer < adamw.optimizer - 3.5 * 1e9, "1.3 B of its weights are in matrices of layers"
    economies = {c.economy for c in candidates(model, Hardware(8, 8 * GIB), work)}
    assert {(e.shard, e.offload) for e in economies} == {("optimizer", False)}
    assert len(economies) == 2


def test_the_classifiers_of_rewards_and_of_evaluations_are_told(tmp_path: Path, plan: Plan) -> None:
    (tmp_path / "classifier").mkdir()
    (tmp_path / "classifier" / "model.safetensors").write_bytes(b" " * (3 << 20))
    judge = {"kind": "classifier", "path": str(tmp_path / "classifier"), "workers": 2}
    more: dict[str, Any] = {"gateway": {"url": "http://unused"}, "rewards": [{"kind": "exact_match"}, judge]}
    more["eval"] = [
        {},
        {"name": "judged", "rewards": [judge, judge]},
        {"name": "far", "rewards": [judge | {"path": "/x"}]},
    ]
    written = settings(write_config(tmp_path / "model", "1.5B"), **more)
    found = reward_models(strict.build(TrainerConfig, written))
    assert found == {"rewards": 6 << 20, "eval judged": 12 << 20, "eval far": 0}
    out = plan(written)
    assert "classifiers of eval judged: 12.0 MiB of host memory" in out
    assert "classifiers of eval far: an unknown part" in out


@pytest.mark.parametrize(("asynchronous", "told"), [(True, "65.37 GiB"), (False, "42.20 GiB")])
def test_what_a_checkpoint_takes_is_told(tmp_path: Path, plan: Plan, asynchronous: bool, told: str) -> None:
    """Of host memory, and of the ranks that gather the states of others."""
    written = settings(write_config(tmp_path / "model", "1.5B"))
    assert "a checkpoint" not in plan(written, "--gpus", "8")
    out = plan(written | {"checkpoint": {"path": "runs/x", "asynchronous": asynchronous}}, "--gpus", "8")
    assert f"a checkpoint: up to {told} of host memory for each rank of the first data-parallel replica" in out


def test_the_command_prints_a_plan_and_its_yaml_can_be_used(tmp_path: Path, plan: Plan) -> None:
    path = write_config(tmp_path / "model", "8B")
    out = plan(settings(path), "--gpus", "16", "--length", "2048")
    for part in ("8.03 B weights", "1 x 2048 tokens", "tensor 8, data 2", "7 B to 30 B", "optimizer", "to spare"):
        assert part in out
    choice = recommend(load_shape(path), Hardware(16, 80 * GIB), WORK)
    assert used(choice, path, tmp_path) == choice.parallel


def test_a_cut_sequence_is_in_the_yaml_with_the_reason(tmp_path: Path, plan: Plan) -> None:
    path = write_config(tmp_path / "model", "8B")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 131072}))
    out = plan(settings(path), "--gpus", "64", "--length", "131072")
    choice = recommend(load_shape(path), Hardware(64, 80 * GIB), Workload(length=131072))
    assert f"context: {choice.parallel.context}" in out
    assert choice.why in out
    assert used(choice, path, tmp_path) == choice.parallel


def test_an_offloaded_optimizer_is_in_the_yaml(tmp_path: Path) -> None:
    choice = recommend(shape(tmp_path, "8B"), Hardware(1, 100 * GIB, per_node=1), Workload(length=1024))
    assert choice.economy.offload
    assert strict.build(OptimizerConfig, yaml.safe_load(as_yaml(choice))["optimizer"]).offload


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--set", "parallel.tensor=3"], "parallel.tensor: 3 does not divide the model's 32 (attention heads)"),
        (["--set", "parallel.expert=2", "--set", "parallel.data=2"], "parallel.expert: llama has no experts"),
        (["--gpus", "1", "--gpu-memory", "40"], "no layout fits on 1 GPUs"),
        (["--gpus", "0"], "--gpus: must be positive"),
        (["--gpu-memory", "-3"], "--gpu-memory: must be positive"),
    ],
    ids=str,
)
def test_the_impossible_is_refused_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(settings(write_config(tmp_path, "8B"))))
    assert main(["--config", str(file), "--plan", *arguments]) == 2
    assert told in capsys.readouterr().err


def test_what_is_not_positive_is_refused() -> None:
    with pytest.raises(ConfigError, match="--length"):
        PlanOptions(length=0)
