"""The command: real processes, whose launcher is killed; and what a user reads when something is wrong."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.trainer.faults.runs import arguments, curve, fine_tuning
from tests.trainer.zygote import Zygote
from tests.waiting import wait_until
from trainer.config import TrainerConfig, strict
from trainer.data.records import take
from trainer.main import main, threads


@pytest.mark.broad
@pytest.mark.timeout(600)
def test_ranks_end_with_their_launcher(config: dict[str, Any], tmp_path: Path) -> None:
    about = arguments(config | {"parallel": {"data": 2}, "steps": 10**6}, tmp_path)
    running = subprocess.Popen([sys.executable, "-m", "trainer.main", *about])
    wait_until(lambda: curve(config["metrics"]), 240, process=running)
    ranks = psutil.Process(running.pid).children(recursive=True)
    assert len(ranks) >= 2
    running.send_signal(signal.SIGKILL)
    running.wait()
    _, alive = psutil.wait_procs(ranks, timeout=60)
    assert not alive, "ranks outlived their launcher"


def test_user_errors_are_one_line_and_status_2(
    config: dict[str, Any], tmp_path: Path, small_models: dict[str, str], capfd: pytest.CaptureFixture[str]
) -> None:
    damaged = tmp_path / "damaged"

    def broken(change: Any) -> dict[str, Any]:
        shutil.rmtree(damaged, ignore_errors=True)
        shutil.copytree(small_models["qwen2"], damaged)
        (damaged / "expected.st").unlink()
        change()
        return {"model": {"path": str(damaged)}}

    def edit_config(**values: Any) -> None:
        path = damaged / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    def truncate() -> None:
        os.truncate(damaged / "model.safetensors", 500)

    def index() -> None:
        files = {"model.norm.weight": "model-00002-of-00002.safetensors"}
        (damaged / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))

    cases: list[tuple[Any, str]] = [
        (lambda: {"nonsense": 1}, "nonsense: unknown key"),
        (lambda: {"model": {"path": "/absent"}}, "/absent/config.json"),
        (lambda: {"parallel": {"tensor": 3}}, "3 does not divide the model's 4 (attention heads)"),
        (lambda: {"parallel": {"tensor": 4}}, "4 does not divide the model's 2 (key-value heads)"),
        (lambda: {"checkpoint": {"path": "/proc/nowhere"}}, "checkpoint.path: cannot make the directory /proc/nowhere"),
        (lambda: {"save_to": "/proc/nowhere"}, "save_to: cannot make the directory"),
        (lambda: {"metrics": "/proc/nowhere/metrics"}, "metrics: cannot make the directory"),
        (lambda: {"parallel": {"pipeline": 3}}, "3 does not divide the model's 2 (layers)"),
        (lambda: broken(lambda: edit_config(architectures=["GPT2LMHeadModel"])), "Supported: LlamaForCausalLM, Qwen2"),
        (lambda: broken(lambda: edit_config(rope_parameters={"rope_type": "yarn"})), "RoPE scaling"),
        (lambda: broken(lambda: edit_config(hidden_act="gelu")), "hidden_act 'gelu'"),
        (lambda: broken(lambda: edit_config(intermediate_size=65)), "has shape [64, 32], config.json says [65, 32]"),
        (lambda: broken(lambda: edit_config(hidden_size="x")), "lacks hidden_size"),
        (lambda: broken((damaged / "model.safetensors").unlink), "no *.safetensors"),
        (lambda: broken(truncate), "model.safetensors is damaged"),
        (lambda: broken(index), "model-00002-of-00002.safetensors is missing"),
    ]
    for change, complaint in cases:
        status, said = main(arguments(config | change(), tmp_path)), capfd.readouterr().err
        assert status == 2, said
        assert complaint in said
        assert len(said.strip().splitlines()) == 1, said


def test_the_first_records_are_shown_as_they_are_trained_on(
    config: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": f"{n}+1=", "target": str(n + 1), "chosen": str(n + 1), "rejected": "0"} for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config["data"] = {"kind": "jsonl", "path": str(tmp_path / "rows.jsonl"), "cache_dir": str(tmp_path)}
    publish = {"model": "m", "store": "sqlite:///unused"}
    served = {"gateway": {"url": "http://unused"}, "publish": publish, "rewards": [{"kind": "exact_match"}]}
    shown = {}
    for name in ("sft", "dpo", "grpo"):
        more = {"algorithm": {"name": name}, "seed": 3, **(served if name == "grpo" else {})}
        assert main([*arguments(config | more, tmp_path), "--show", "2"]) == 0
        shown[name] = capfd.readouterr().out
    first, second = take(8, 3, 0, 2)
    head = f"--- record {first} ({tmp_path}/rows.jsonl, line {first + 1}):"
    assert f"{head} 6 tokens, 2 learned\n{first}+1=[[{first + 1}<eos>]]\n" in shown["sft"]
    assert f"\n{second}+1=[[{second + 1}<eos>]]\n" in shown["sft"]
    assert f"{first}+1=[[{first + 1}<eos>]]\n{head} 6 tokens, 2 learned\n{first}+1=[[0<eos>]]" in shown["dpo"]
    assert f"{head} 4 tokens, 0 learned\n{first}+1=\n" in shown["grpo"]
    assert shown["sft"].count("--- record") == 2


def test_a_row_without_an_answer_ends_no_run_at_its_step(
    zygote: Zygote, config: dict[str, Any], tmp_path: Path
) -> None:
    """Under the limit it is left out; else the run ends before its first step, and names the line."""
    rows = [{"prompt": f"{n}+1=", "target": "" if n == 4 else str(n + 1)} for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config["data"] = {"kind": "jsonl", "path": str(tmp_path / "rows.jsonl"), "cache_dir": str(tmp_path)}
    config |= {"steps": 3, "batch": 4, "checkpoint": None}
    status, _, errors = zygote.run(arguments(config, tmp_path), tmp_path)
    assert status == 2
    assert "rows.jsonl, line 5: it has no target to learn: data.target_key names its key. Correct the record" in errors
    assert curve(config["metrics"]) == {}
    config["data"]["max_bad"] = 1
    assert zygote.run(arguments(config, tmp_path), tmp_path)[0] == 0
    assert sorted(curve(config["metrics"])) == [1, 2, 3], "more than an epoch of the other seven"


@pytest.mark.broad
def test_run_time_faults_are_one_line_too(zygote: Zygote, config: dict[str, Any], tmp_path: Path) -> None:
    """In ranks under torchrun: the cause is printed once, by the rank that knows it."""
    faulty = config | {"parallel": {"data": 2}, "algorithm": {"name": "grpo"}, "checkpoint": None}
    faulty |= {"rollout": {"fixed_sampler": True}}
    faulty |= {"gateway": {"url": "http://127.0.0.1:9", "retry_s": 0.2}}
    status, _, errors = zygote.run(arguments(faulty, tmp_path), tmp_path)
    assert status == 1
    assert errors.count("error: no rollout from http://127.0.0.1:9") == 1
    assert "Traceback" not in errors


def test_a_number_of_ranks_that_the_cluster_sets_is_no_launcher(
    zygote: Zygote, config: dict[str, Any], tmp_path: Path
) -> None:
    zygote.train(config | {"steps": 1}, tmp_path, WORLD_SIZE="8")


def test_a_checkpoint_of_another_run_is_refused(zygote: Zygote, config: dict[str, Any], tmp_path: Path) -> None:
    config |= {"steps": 3, "save_to": str(tmp_path / "out")}
    assert zygote.run(arguments(config, tmp_path), tmp_path)[0] == 0
    status, _, errors = zygote.run(arguments(config | {"seed": 5}, tmp_path), tmp_path)
    assert status == 2
    assert "was written with seed 0, this run has 5" in errors
    assert "Traceback" not in errors
    assert main(arguments(config | {"model": {"path": str(tmp_path / "out")}, "steps": 0}, tmp_path)) == 2


@pytest.mark.parametrize(("offload", "here", "expected"), [(False, None, 1), (True, None, 4), (True, "4", 2)])
def test_an_optimizer_on_the_host_has_the_host_s_cores(
    monkeypatch: pytest.MonkeyPatch, offload: bool, here: str | None, expected: int
) -> None:
    """Those of a rank's host, which a launcher on several hosts tells."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if here is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", here)
    given = fine_tuning("m", optimizer={"offload": offload}, parallel={"data": 2})
    assert threads(strict.build(TrainerConfig, given)) == expected
