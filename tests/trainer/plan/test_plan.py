"""The layout that is recommended, by the tables; what is refused, and why; `hotswap train --plan`; and the estimator
against what the engine really holds, measured on real ranks in every kind of layout."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.trainer.ranks import Ranks
from trainer.config import LoraConfig, OptimizerConfig, ParallelConfig, TrainerConfig, load, strict
from trainer.errors import MemoryPlanError
from trainer.main import main
from trainer.megatron.hf_config import ModelShape, load_shape
from trainer.memory.ledger import GIB
from trainer.plan import Hardware, Workload, estimate, recommend
from trainer.plan.estimate import adapter_weights, bytes_to_save, rank_weights
from trainer.plan.recommend import Choice, candidates
from trainer.plan.report import as_yaml, reward_models, workload_of
from trainer.tiny_model import write_tiny_model

WORK = Workload(length=4096, micro_batch=1)
NAMES = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
KNOWN = {  # published: these sizes, and the vocabulary's
    "1.5B": (28, 1536, 8960, 12, 2, 151936),
    "8B": (32, 4096, 14336, 32, 8, 128256),
    "70B": (80, 8192, 28672, 64, 8, 128256),
    "405B": (126, 16384, 53248, 128, 8, 128256),
    "30B-A3B": (48, 2048, 6144, 32, 4, 151936),
}
MIXTURES = {"30B-A3B": {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}}


def write_config(directory: Path, name: str, length: int = 8192) -> str:
    directory.mkdir(exist_ok=True)
    config: dict[str, Any] = dict(zip((*NAMES, "vocab_size"), KNOWN[name], strict=True)) | MIXTURES.get(name, {})
    config["architectures"] = ["Qwen3MoeForCausalLM" if name in MIXTURES else "LlamaForCausalLM"]
    config |= {"max_position_embeddings": length, "head_dim": 128}
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
    """The same model on ever smaller GPUs. A model that does not fit in any economy is cut as the next row says."""
    model = shape(tmp_path, "1.5B")
    order = [("none", "optimizer"), ("full", "optimizer"), ("full", "full")]
    found = []
    for gib in (80, 24, 16, 12, 8, 6, 3):
        try:
            choice = recommend(model, Hardware(4, gib * GIB), Workload(length=4096, micro_batch=2))
            found.append((choice.parallel.tensor, order.index((choice.economy.recompute, choice.economy.shard))))
        except MemoryPlanError:
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
    with pytest.raises(
        MemoryPlanError, match=r"no layout fits on 2 GPUs.* needs .* of .*Take (\d+) such GPUs"
    ) as refused:
        recommend(model, Hardware(2, 80 * GIB), WORK)
    enough = int(str(refused.value).split("Take ")[1].split()[0])
    assert recommend(model, Hardware(enough, 80 * GIB), WORK).fits
    with pytest.raises(MemoryPlanError):
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
    about = {"model": {"path": path, "dtype": "bfloat16"}, "data": {"kind": "arithmetic"}, "algorithm": {"name": "sft"}}
    return about | {"steps": 1, "micro_batch": 1, "packing": None} | more


def built(**more: Any) -> TrainerConfig:
    return strict.build(TrainerConfig, settings("unused", **more))


Plan = Callable[..., str]


@pytest.fixture
def plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Plan:
    """The output of `--plan` for a run's settings, on one line."""

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
    far = {"name": "far", "rewards": [judge | {"path": "/x"}]}
    more["eval"] = [{}, {"name": "judged", "rewards": [judge, judge]}, far]
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
    path = write_config(tmp_path / "model", "8B", length=131072)
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
        (["--length", "0"], "--length: must be positive"),
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


SIZES = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
ROWS, LENGTH = 2, 64


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    for family in ("llama", "qwen2", "qwen3", "qwen3_moe"):
        write_tiny_model(root / family, family, **SIZES)
    write_tiny_model(root / "llama-tied", "llama", tie_word_embeddings=True, **SIZES)
    return {path.name: str(path) for path in root.iterdir()}


BROAD = pytest.mark.broad


@pytest.mark.parametrize(
    ("family", "parallel", "how", "kept"),
    [
        ("llama", {}, {}, 0.05),
        ("llama-tied", {}, {}, 0.05),
        ("qwen2", {}, {}, 0.05),
        ("qwen3", {}, {}, 0.05),
        ("qwen3_moe", {}, {}, 0.05),
        ("llama", {}, {"dtype": "bfloat16"}, 0.05),
        ("llama", {}, {"recompute": "full"}, 0.15),
        ("llama", {"tensor": 2}, {}, 0.08),
        ("llama", {"tensor": 2, "sequence": True}, {}, 0.08),
        ("llama-tied", {"pipeline": 2}, {}, 0.08),
        ("llama", {"context": 2}, {}, 0.08),
        ("llama", {}, {"optimizer": "muon"}, 0.05),
        ("llama-tied", {"pipeline": 2}, {"optimizer": "muon"}, 0.08),
        pytest.param("llama", {"pipeline": 2}, {}, 0.08, marks=BROAD),
        pytest.param("llama", {"data": 2}, {}, 0.08, marks=BROAD),
        pytest.param("qwen3_moe", {"data": 2, "expert": 2}, {}, 0.08, marks=BROAD),
        pytest.param("qwen2", {}, {"optimizer": "muon", "dtype": "bfloat16"}, 0.05, marks=BROAD),
        pytest.param("qwen3_moe", {}, {"optimizer": "muon", "dtype": "bfloat16"}, 0.05, marks=BROAD),
        pytest.param("qwen3", {"tensor": 2}, {"optimizer": "muon", "dtype": "bfloat16"}, 0.08, marks=BROAD),
        pytest.param("qwen3_moe", {"data": 2, "expert": 2}, {"optimizer": "muon"}, 0.08, marks=BROAD),
    ],
    ids=str,
)
def test_every_layout_holds_what_was_estimated(
    one_rank: Ranks, models: dict[str, str], family: str, parallel: dict[str, Any], how: dict[str, str], kept: float
) -> None:
    """Counts must be equal; what padding and step counters add may be a hundredth; `kept` bounds the error of
    activations. Muon has one moment for the layers' matrices."""
    shape, layout = load_shape(models[family]), ParallelConfig(**parallel)
    ranks = one_rank.sharing(layout.world_size)
    given: dict[str, Any] = {"dtype": "float32", "optimizer": "adamw"} | how
    model = {name: value for name, value in given.items() if name != "optimizer"}
    config = {"model": model, "optimizer": {"name": given["optimizer"]}}
    found = ranks.call("measured", path=models[family], parallel=parallel, rows=ROWS, length=LENGTH, **config)
    work = Workload(LENGTH, ROWS, sequences=ROWS * layout.data, **given)
    for rank in found:
        assert rank["parameters"] == rank_weights(shape, layout, rank["stage"]).total
    fullest = max(found, key=lambda rank: rank["weights"] + rank["kept"])
    told = estimate(shape, layout, work)
    assert told.weights == fullest["weights"]
    assert told.gradients == pytest.approx(fullest["gradients"], rel=0.01)
    assert told.optimizer == pytest.approx(fullest["optimizer"], rel=0.01)
    assert told.activations == pytest.approx(fullest["kept"], rel=kept)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("family", "parallel"),
    [("llama", {}), ("qwen3_moe", {}), ("llama", {"tensor": 2}), ("qwen3_moe", {"data": 2, "expert": 2})],
    ids=str,
)
def test_adapters_hold_what_was_estimated(
    one_rank: Ranks, models: dict[str, str], family: str, parallel: dict[str, Any]
) -> None:
    shape, layout, lora = load_shape(models[family]), ParallelConfig(**parallel), LoraConfig(rank=8)
    ranks = one_rank.sharing(layout.world_size)
    arguments: dict[str, Any] = {"rows": ROWS, "length": LENGTH, "lora": {"rank": 8}}
    found = ranks.call("measured", path=models[family], parallel=parallel, **arguments)[0]
    told = estimate(shape, layout, Workload(LENGTH, ROWS, sequences=ROWS * layout.data, dtype="float32", lora=lora))
    adapters = adapter_weights(shape, layout, lora)
    assert found["parameters"] == rank_weights(shape, layout, 0).total + adapters.total
    assert told.weights == found["weights"]
    assert told.gradients == 4 * adapters.total == pytest.approx(found["gradients"], rel=0.05)  # which is padded
    assert told.optimizer == pytest.approx(found["optimizer"], rel=0.05)
    full = estimate(shape, layout, Workload(LENGTH, ROWS, sequences=ROWS * layout.data, dtype="float32"))
    assert told.total < full.total


def test_a_reference_is_whole_on_each_rank(two_ranks: Ranks, models: dict[str, str]) -> None:
    """Nothing cuts what is not trained."""
    layout: dict[str, Any] = {"data": 2, "shard": "full"}
    found = two_ranks.call("reference_bytes", path=models["llama"], parallel=layout)
    shape, parallel = load_shape(models["llama"]), ParallelConfig(**layout)
    work = Workload(LENGTH, ROWS, dtype="float32")
    alone, beside = (estimate(shape, parallel, dataclasses.replace(work, references=n)).weights for n in (0, 1))
    assert found == [beside - alone] * 2


SAVED: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"data": 2}),
    ("qwen3_moe", {}),
    ("qwen3_moe", {"data": 2, "expert": 2}),
    ("llama", {"data": 2, "shard": "full"}),
]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("family", "parallel"), SAVED, ids=str)
@pytest.mark.parametrize("copied", [True, False], ids=["copied", "at-once"])
def test_a_checkpoint_takes_no_more_than_was_estimated(
    one_rank: Ranks, models: dict[str, str], family: str, parallel: dict[str, Any], copied: bool
) -> None:
    """Of replicas the first gathers the optimizer states, and the others gather nothing."""
    shape, layout = load_shape(models[family]), ParallelConfig(**parallel)
    arguments: dict[str, Any] = {"parallel": parallel, "copied": copied, "dtype": "bfloat16"}
    first, *others = one_rank.sharing(layout.world_size).call("saving", path=models[family], **arguments)
    told = bytes_to_save(shape, layout, Workload(LENGTH), copied=copied)
    assert 0.85 * told <= first < 1.02 * told + 1e5
    if parallel == {"data": 2}:
        assert others[0] < first / 2
