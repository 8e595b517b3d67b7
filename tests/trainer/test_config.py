"""Configuration: strict, typed, and every complaint names its key and says what to do."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

import trainer
from tests.weightsync.test_running import describe
from trainer.api import config as api_config
from trainer.config import PackingConfig, load
from trainer.config.strict import read
from trainer.errors import ConfigError
from trainer.rewards.server import RewardServerConfig
from trainer.tiny_model import tiny_run

MINIMAL: dict[str, Any] = {
    "model": {"path": "m"},
    "data": {"kind": "arithmetic"},
    "algorithm": {"name": "sft"},
    "steps": 3,
}
PUBLISH: dict[str, Any] = {"publish": {"model": "m", "store": "sqlite:///store.db"}}
GRPO: dict[str, Any] = {"algorithm": {"name": "grpo"}, "gateway": {"url": "http://localhost:1"}} | PUBLISH
THIRD: dict[str, Any] = GRPO | {"publish": PUBLISH["publish"] | {"every": 3}}
BEST: dict[str, Any] = GRPO | {"eval": [{}], "save_to": "s", "save_best": True}
QUANTIZED: dict[str, Any] = {"publish": PUBLISH["publish"] | {"quantize": {"scheme": "served"}}}
MUON: dict[str, Any] = {"optimizer": {"name": "muon"}}
ADMIN: dict[str, Any] = {"admin_url": "http://127.0.0.1:8001"}


def bucket(url: str, **more: Any) -> dict[str, Any]:
    """A bucket and no store."""
    return {"publish": {"model": "m", "bucket": {"url": url, **more}}}


def curriculum(**section: Any) -> dict[str, Any]:
    return GRPO | {"order": {"curriculum": {"records": 9} | section}}


def serving(**section: Any) -> dict[str, Any]:
    return {"memory": {"serving": ADMIN | section}}


def parse(tmp_path: Path, changes: dict[str, Any], *overrides: str) -> trainer.TrainerConfig:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(MINIMAL | changes))
    return load(path, list(overrides))


def test_overrides_reach_into_sections_that_are_not_there(tmp_path: Path) -> None:
    config = parse(tmp_path, {}, "optimizer.lr=3e-4", "parallel.tensor=2", "checkpoint.path=c", "steps=9")
    assert (config.optimizer.lr, config.parallel.tensor, config.steps) == (3e-4, 2, 9)
    assert config.checkpoint is not None


@pytest.mark.parametrize(
    ("changes", "key", "advice"),
    [
        ({"stepz": 1}, "stepz", "Did you mean 'steps'"),
        ({"optimizer": {"learning_rate": 1}}, "optimizer.learning_rate", "Known keys here"),
        ({"steps": "many"}, "steps", "cannot be 'many' (str). Expected int"),
        ({"steps": True}, "steps", "Expected int"),
        ({"steps": 0}, "steps", "positive"),
        ({"epochs": 2}, "epochs", "beside steps"),
        ({"steps": 0, "epochs": 0}, "epochs", "> 0"),
        ({"steps": 0, "epochs": 2}, "epochs", "arithmetic makes its records up"),
        ({"steps": None}, "steps", "cannot be nothing. Expected int"),
        ({"batch": -1}, "batch", "Expected int >= 1"),
        ({"model": {}}, "model.path", "missing"),
        ({"optimizer": {"min_lr": 1e-3}}, "optimizer.min_lr", "set optimizer.lr"),
        ({"model": "m"}, "model", "mapping"),
        ({"model": {"path": "m", "dtype": "float8"}}, "model.dtype", "one of: float32, bfloat16"),
        ({"model": {"path": "m", "dtype": "float32", "fp32_head": True}}, "model.fp32_head", "Leave it out"),
        ({"model": {"path": "m", "dtype": "float32", "fp8": "hybrid"}}, "model.fp8", "Set dtype to bfloat16"),
        ({"algorithm": {"name": "trpo"}}, "algorithm.name", "one of: custom, distill, dpo, grpo"),
        ({"algorithm": {"name": "sft", "clip_low": 0.2}}, "algorithm.clip_low", "unknown key"),
        ({"algorithm": {"name": "grpo"}}, "gateway", "Add gateway"),
        (GRPO | {"algorithm": {"name": "grpo", "samples_per_prompt": 1}}, "algorithm.samples_per_prompt", "at least 2"),
        (GRPO | {"publish": None}, "publish", "Add publish: {model: NAME}, or set rollout.fixed_sampler"),
        (GRPO | {"rollout": {"fixed_sampler": True}}, "rollout.fixed_sampler", "Leave one out"),
        (THIRD | {"schedule": {"name": "async", "max_lag": 2}}, "schedule.max_lag", "Raise it to publish.every"),
        (GRPO | {"rollout": {"token_budget": 0}}, "rollout.token_budget", ">= 1"),
        (GRPO | {"rollout": {"max_tokens": 8, "token_budget": 8}}, "rollout.token_budget", "Lower it"),
        (GRPO | {"schedule": {"name": "one-step-off", "oversample": -1}}, "schedule.oversample", ">= 0"),
        (GRPO | {"schedule": {"name": "async", "oversample": 1}}, "schedule.oversample", "unknown key"),
        (GRPO | {"order": {"prioritize": True, "floor": 0}}, "order.floor", ">= 0.001"),
        (curriculum(), "order.curriculum.first", "missing"),
        (curriculum(records=0, first=0), "order.curriculum.records", ">= 1"),
        (curriculum(first=5, last=5, field="level"), "order.curriculum.last", "easy to hard"),
        (curriculum(first=1, last=5), "order.curriculum.first", "name a field"),
        ({"order": {"prioritize": True}}, "order", "measures none"),
        (GRPO | {"rewards": []}, "rewards", "at least one"),
        (GRPO | {"rewards": [{"kind": "regex"}]}, "rewards[0].pattern", "missing"),
        (GRPO | {"rewards": [{"kind": "callable", "target": "f"}]}, "rewards[0].target", "module:function"),
        (GRPO | {"rewards": [{"kind": "group", "target": "module"}]}, "rewards[0].target", "module:function"),
        ({"model": {"path": "m", "chat_template_kwargs": {1: 2}}}, "model.chat_template_kwargs", "str as every key"),
        ({"eval": [{}]}, "gateway", "eval samples"),
        ({"eval": {"every": 1}}, "eval", "list"),
        (GRPO | {"eval": [{}, {}]}, "eval", "every set its own name"),
        (GRPO | {"eval": [{"name": "a/b"}]}, "eval[0].name", "Use letters"),
        (GRPO | {"eval": [{"samples": 2, "temperature": 0}]}, "eval[0].temperature", "Set samples to 1"),
        (GRPO | {"eval": [{"temperature": -1}]}, "eval[0].temperature", ">= 0"),
        (GRPO | {"eval": [{"top_p": 0}]}, "eval[0].top_p", "> 0"),
        (GRPO | {"eval": [{"samples": 4, "pass_at": [1, 8]}]}, "eval[0].pass_at", "8 of 4 samples"),
        (GRPO | {"eval": [{"rewards": []}]}, "eval[0].rewards", "no answer is right"),
        (GRPO | {"eval": [{"data": {"kind": "jsonl"}}]}, "eval[0].data.path", "missing"),
        ({"save_every": 5}, "save_to", "Name a directory"),
        (GRPO | {"best": "held_out/accuracy"}, "best", "Set save_best or checkpoint.keep_best"),
        (BEST | {"eval": []}, "save_best", "Add a set to eval"),
        (BEST | {"best": "other/accuracy"}, "best", "sets: held_out"),
        (BEST | {"best": "held_out/pass_at_2"}, "best", "held_out/accuracy, held_out/reward_mean"),
        (GRPO | {"checkpoint": {"path": "c", "keep_best": 1}}, "checkpoint.keep_best", "nothing is evaluated"),
        (BEST | {"publish": None, "rollout": {"fixed_sampler": True}}, "save_best", "Add publish"),
        (BEST | THIRD, "eval.every", "multiple of 3"),
        ({"gateway": {"url": "localhost"}}, "gateway.url", "http://host:port"),
        ({"optimizer": {"lr": 0}}, "optimizer.lr", "> 0"),
        ({"optimizer": {"lr": 1e-4, "min_lr": 1e-3}}, "optimizer.min_lr", "above the learning rate"),
        ({"optimizer": {"lr": float("nan")}}, "optimizer.lr", "> 0"),
        ({"optimizer": {"lr": float("inf")}}, "optimizer.lr", "<= 1e+300"),
        ({"data": {"kind": "jsonl"}}, "data.path", "missing"),
        ({"data": {"kind": "jsonl", "path": ""}}, "data.path", "length >= 1"),
        ({"data": {}}, "data.kind", "one of: answers, arithmetic"),
        ({"data": {"kind": "parquet", "path": "a", "max_bad": -1}}, "data.max_bad", ">= 0"),
        ({"packing": {"max_tokens": 0}}, "packing.max_tokens", ">= 1"),
        ({"lora": {"rank": 0}}, "lora.rank", ">= 1"),
        ({"lora": {"r": 8}}, "lora.r", "Known keys here"),
        ({"lora": {"dropout": 1.0}}, "lora.dropout", "< 1"),
        ({"lora": {"target_modules": ["lm_head"]}}, "lora.target_modules[0]", "one of: q_proj"),
        ({"lora": {"target_modules": []}}, "lora.target_modules", "nothing would be trained"),
        ({"lora": {"target_modules": ["q_proj", "q_proj"]}}, "lora.target_modules", "twice"),
        ({"lora": {"name": "a/../b"}}, "lora.name", "a letter or digit first"),
        ({"lora": {"name": "m"}, "publish": {"model": "m", "store": "s"}}, "lora.name", "Choose another"),
        ({"lora": {}, "model": {"path": "m", "dtype": "bfloat16", "fp8": "hybrid"}}, "lora", "model.fp8"),
        (QUANTIZED | {"lora": {}}, "publish.quantize", "Leave it out"),
        (GRPO | {"packing": {"max_tokens": 16}}, "packing.max_tokens", "longest prompt and answer"),
        ({"data": {"kind": "arithmetic", "held_out": 99}}, "data.held_out", "Use at most 50"),
        ({"data": {"kind": "arithmetic", "noise": 2}}, "data.noise", "<= 1"),
        ({"parallel": {"tensor": 0}}, "parallel.tensor", ">= 1"),
        ({"parallel": {"context": 0}}, "parallel.context", ">= 1"),
        ({"parallel": {"virtual_pipeline": 2}}, "parallel.virtual_pipeline", "Raise pipeline"),
        ({"parallel": {"sequence": True}}, "parallel.sequence", "Raise tensor"),
        ({"parallel": {"expert": 2}}, "parallel.expert", "Choose a divisor"),
        ({"parallel": {"data": 4, "expert": 2, "expert_tensor": 4}}, "parallel.expert", "Choose a divisor"),
        ({"parallel": {"shard": "full"}}, "parallel.shard", "Raise data"),
        ({"parallel": {"data": 2, "tensor": 2, "shard": "full"}}, "parallel.shard", "Set tensor to 1"),
        ({"parallel": {"data": 2, "pipeline": 2, "shard": "full"}}, "parallel.shard", "Set pipeline to 1"),
        ({"optimizer": {"name": "muon", "offload": True}}, "optimizer.offload", "Set it to false"),
        ({"optimizer": {"name": "muon", "momentum": 2.0}}, "optimizer.momentum", "<= 1"),
        ({"optimizer": {"name": "muon", "ns_steps": 0}}, "optimizer.ns_steps", ">= 1"),
        ({"optimizer": {"momentum": 0.9}}, "optimizer.momentum", "leave them out"),
        ({"optimizer": {"name": "lion"}}, "optimizer.name", "one of: adamw, muon"),
        (MUON | {"parallel": {"data": 2, "shard": "full"}}, "optimizer.name", "or name to adamw"),
        (MUON | {"lora": {}}, "optimizer.name", "Set it to adamw"),
        ({"schedule": {"name": "async"}}, "schedule", "sft learns from its records. Leave schedule out"),
        (GRPO | {"schedule": {"name": "async"}, "memory": {}}, "memory", "under async they overlap"),
        ({"memory": {}, "parallel": {"data": 2, "shard": "full"}}, "memory", "parallel.shard full owns its storages"),
        ({"memory": {"budget_gib": 0}}, "memory.budget_gib", "> 0"),
        ({"memory": {"budget_gib": 2, "reserve_gib": 2}}, "memory.reserve_gib", "2 leaves nothing of budget_gib"),
        ({"memory": {"offload": "nvme"}}, "memory.offload", "one of: auto, host, disk"),
        (serving(admin_url="8001"), "memory.serving.admin_url", "is not an HTTP address"),
        (serving(level=3), "memory.serving.level", "one of: 1, 2"),
        (serving(ttl_s=1), "memory.serving.ttl_s", ">= 3"),
        (serving(engin_gib=3), "memory.serving.engin_gib", "engine_gib"),
        ({"telemetry": ADMIN | {"ca_file": "/a"}}, "telemetry.admin_url", "not encrypted"),
        ({"gateway": {"url": "https://h", "ca_file": "a", "cluster_tls": "b"}}, "gateway.ca_file", "Leave one out"),
        ({"publish": {"model": "m"}}, "publish.store", "HOTSWAP_STORE"),
        (bucket("models/run"), "publish.bucket.url", "Write one of fsspec's"),
        (bucket("s3://key:secret@models/run"), "publish.bucket.url", "AWS_ACCESS_KEY_ID"),
        (bucket("s3://models/run?token=secret"), "publish.bucket.url", "AWS_ACCESS_KEY_ID"),
        (bucket("s3://models/run", keep=0), "publish.bucket.keep", ">= 1"),
        (GRPO | bucket("s3://models/run"), "publish.store", "samples from each version"),
        (GRPO | BEST | bucket("s3://models/run"), "save_best", "store: URL"),
        ({"save_to": "m/../m"}, "save_to", "Name another directory"),
        ({"checkpoint": {"path": "c", "resume": "maybe"}}, "checkpoint.resume", "one of: auto, must, never"),
        ({"checkpoint": {"path": "c", "resume": "never"}, "faults": {"max_restarts": 1}}, "checkpoint.resume", "auto"),
    ],
)
def test_what_is_wrong_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], key: str, advice: str
) -> None:
    monkeypatch.delenv("HOTSWAP_STORE", raising=False)
    monkeypatch.setenv("HOTSWAP_STATE_DIR", str(tmp_path))
    with pytest.raises(ConfigError) as error:
        parse(tmp_path, changes)
    assert error.value.key == key
    assert advice in str(error.value)


def test_the_store_is_that_of_the_server_on_this_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket asks for none; several servers are told apart by the model, and named where that does not do."""
    monkeypatch.delenv("HOTSWAP_STORE", raising=False)
    monkeypatch.setenv("HOTSWAP_STATE_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    example = next(path for path in EXAMPLES if path.stem == "api")

    def stores() -> list[str]:
        found = parse(tmp_path, {"publish": {"model": "m"}}), api_config.load(example, ["publish.model=m"])
        return [config.publish.store_url for config in found if config.publish is not None]

    describe(tmp_path, ["first", "m"], "sqlite:///here.db")
    assert stores() == ["sqlite:///here.db"] * 2
    describe(tmp_path, ["other"], "sqlite:///other.db")
    assert stores() == ["sqlite:///here.db"] * 2
    carried = parse(tmp_path, bucket("s3://models/run")).publish
    assert carried is not None
    assert carried.store_url == ""
    describe(tmp_path, ["m"], "sqlite:///again.db")
    for read_again in (
        lambda: parse(tmp_path, {"publish": {"model": "m"}}),
        lambda: api_config.load(example, ["publish.model=m"]),
    ):
        with pytest.raises(ConfigError, match=r"^publish.store: missing, and several .*first, m, m, other.*pass the"):
            read_again()
    monkeypatch.setenv("HOTSWAP_STORE", "sqlite:///named.db")
    assert stores() == ["sqlite:///named.db"] * 2


@pytest.mark.parametrize("assignment", ["optimizer.lr", "=3", "steps.more=1"])
def test_a_bad_override_is_named(tmp_path: Path, assignment: str) -> None:
    with pytest.raises(ConfigError):
        parse(tmp_path, {}, assignment)


def test_a_missing_or_broken_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        load(tmp_path / "absent.yaml")
    (tmp_path / "broken.yaml").write_text("a: [1")
    with pytest.raises(ConfigError, match="not YAML"):
        load(tmp_path / "broken.yaml")
    (tmp_path / "empty.yaml").write_text("")
    with pytest.raises(ConfigError, match="missing"):
        load(tmp_path / "empty.yaml")


@pytest.mark.parametrize(
    ("changes", "lr"),
    [
        ({}, 2e-5),
        ({"algorithm": {"name": "dpo"}}, 1e-6),
        (GRPO, 1e-6),
        (GRPO | {"lora": {}}, 1e-5),
        ({"lora": {}}, 2e-4),
        (GRPO | {"lora": {}, "optimizer": {"lr": 3e-4}}, 3e-4),
    ],
    ids=str,
)
def test_the_learning_rate_is_the_algorithms_unless_one_is_given(
    tmp_path: Path, changes: dict[str, Any], lr: float
) -> None:
    assert parse(tmp_path, changes).lr == pytest.approx(lr)


def test_a_critic_has_a_rate_of_its_own(tmp_path: Path) -> None:
    ppo: dict[str, Any] = GRPO | {"algorithm": {"name": "ppo"}}
    assert parse(tmp_path, ppo).critic_lr == 1e-5
    assert parse(tmp_path, ppo | {"optimizer": {"lr": 1e-3}}).critic_lr == 1e-3
    given = ppo | {"algorithm": {"name": "ppo", "critic_lr": 3e-3}, "optimizer": {"lr": 1e-3}}
    assert parse(tmp_path, given).critic_lr == 3e-3


def test_defaults_are_for_models_in_use_and_a_tiny_run_has_its_own(tmp_path: Path) -> None:
    config, tiny = parse(tmp_path, GRPO), parse(tmp_path, tiny_run(MINIMAL | GRPO))
    assert config.packing is not None
    assert config.packing.max_tokens >= 2 * config.rollout.max_tokens
    assert (config.model.dtype, config.rollout.max_tokens >= 1024) == ("bfloat16", True)
    assert (tiny.model.dtype, tiny.packing, tiny.rollout.max_tokens) == ("float32", None, 16)
    own = tiny_run(MINIMAL | GRPO | {"packing": {"max_tokens": 64}, "model": {"path": "m", "dtype": "bfloat16"}})
    assert parse(tmp_path, own).packing == PackingConfig(max_tokens=64)
    assert parse(tmp_path, own).model.dtype == "bfloat16"


EXAMPLES = sorted((Path(trainer.__file__).parent / "configs").glob("*.yaml"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_the_examples_are_valid(example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTSWAP_STORE", "sqlite:///store.db")
    monkeypatch.chdir(tmp_path)
    loaders: dict[str, Any] = {"api": api_config.load, "rewards": partial(read, RewardServerConfig)}
    loaders.get(example.stem, load)(example)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ("limits.ranks=3", "limits.ranks"),
        ("limits.rank=0", "limits.rank"),
        ("model.dtype=float16", "model.dtype"),
        ("publish.every=2", "publish.every"),
        ("jobs.rank=33", "jobs.rank"),
        ("jobs.learning_rate=0", "jobs.learning_rate"),
        ("adapters=a/b", "adapters"),
        ("directory=/proc/nowhere", "directory"),
        ("host=0.0.0.0", "host"),
        ("parallel.data=2 parallel.shard=full", "parallel.shard"),
        ("parallel.virtual_pipeline=2", "parallel.virtual_pipeline"),
        ("faults.heartbeat_timeout_s=1", "faults.heartbeat_timeout_s"),
        ("faults.on_diverged=rollback", "faults.on_diverged"),
        ("model.router_z_loss=0.1", "model.router_balance_loss"),
        ("ssl_keyfile=key.pem", "ssl_certfile"),
        ("ssl_keyfile=key.pem ssl_certfile=none.pem", "ssl_certfile"),
    ],
)
def test_a_configuration_of_the_training_api_that_cannot_be_used(
    change: str, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOTSWAP_STORE", "sqlite:///store.db")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as refused:
        api_config.load(next(path for path in EXAMPLES if path.stem == "api"), change.split())
    assert refused.value.key == key


def test_configuration_needs_no_torch() -> None:
    code = "import sys, trainer, trainer.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_everything_public_is_exported() -> None:
    assert all(hasattr(trainer, name) for name in trainer.__all__)
    errors = {name for name, value in vars(trainer.errors).items() if isinstance(value, type)}
    assert errors <= set(trainer.__all__)


def test_a_bucket_takes_the_place_of_a_store_or_comes_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HOTSWAP_STORE", raising=False)
    alone = parse(tmp_path, bucket("s3://models/run", keep=5)).publish
    assert alone is not None
    assert alone.bucket is not None
    assert (alone.store_url, alone.bucket.keep, alone.bucket.full_every) == ("", 5, 10)
    both = parse(tmp_path, GRPO | {"publish": PUBLISH["publish"] | bucket("s3://models/run")["publish"]}).publish
    assert both is not None
    assert both.store_url == "sqlite:///store.db"


@pytest.mark.parametrize("line", ["steps: 1", "model: {path: n}"])
def test_a_key_is_written_once(tmp_path: Path, line: str) -> None:
    """YAML takes the last one, so that a second section replaces the first."""
    (tmp_path / "run.yaml").write_text(f"steps: 3\nmodel:\n  path: m\n{line}\n")
    key = line.partition(":")[0]
    with pytest.raises(ConfigError, match=rf"{key}.* is in lines [12] and 4\. Write a key once"):
        load(tmp_path / "run.yaml")


def test_a_key_may_replace_a_merged_one(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        f"{yaml.safe_dump(MINIMAL)}optimizer: &a {{lr: 0.1}}\nlora: {{<<: *a, lr: 0.2}}\n"
    )
    with pytest.raises(ConfigError, match=r"lora\.lr"):
        load(tmp_path / "run.yaml")
