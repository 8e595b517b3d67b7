"""The phases of the GPU day on a CPU: each on tiny shapes, and what it does when something is wrong."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from loadtest.gpu_day import __main__ as gpu_day
from loadtest.gpu_day import hardware, models, serving, stagings, vllm_process
from loadtest.gpu_day.device import Device, Replayed
from loadtest.gpu_day.report import FAILED, PASSED, SKIPPED, Report, Skipped, status_of
from loadtest.gpu_day.streams import copies_beside
from loadtest.workload import publisher
from weightsync.vllm_engine.device.cuda import CopyGeneration, DevicePool
from weightsync.vllm_engine.staging.bundle import Bundle, HeldBundles

ROOT = Path(__file__).parents[2]
CUDA_ALONE = ("remap", "checksum")
Checks = dict[str, dict[str, Any]]


def by_name(checks: list[dict[str, Any]]) -> Checks:
    return {check["check"]: check for check in checks}


@pytest.fixture(autouse=True)
def as_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@functools.cache
def run_small(phase: str) -> tuple[list[dict[str, Any]], str]:
    """Its checks, and what it printed."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        checks = gpu_day.run(phase, small=True)
    return checks, printed.getvalue()


@pytest.mark.parametrize("phase", gpu_day.WITHOUT_VLLM)
def test_a_phase_runs_small_on_a_cpu(phase: str) -> None:
    checks, printed = copy.deepcopy(run_small(phase))
    assert [json.loads(line) for line in printed.splitlines()] == checks
    assert status_of(checks) == (SKIPPED if phase in CUDA_ALONE else PASSED), checks
    for check in checks:
        assert check.pop("phase") == phase
        assert check.pop("check")
        assert check, "neither judged nor measured"


def test_what_is_measured_is_there() -> None:
    staged = by_name(run_small("stage")[0])
    for mib in stagings.PIECES_MIB:
        beside = staged[f"beside_steps_by_{mib}_mib"]
        figures = [beside[f"{when}_step_{of}_ms"] for when in ("alone", "staging") for of in ("p50", "p99", "max")]
        assert all(figure > 0 for figure in (*figures, beside["gbps"], staged[f"alone_by_{mib}_mib"]["gbps"]))
    swaps = by_name(run_small("memory")[0])
    held = swaps[f"swap_{stagings.SWAPS}"]["in_weights"]
    assert {"live", "live version", "previous version", "garbage"} <= held.keys()
    assert held["live"] == pytest.approx(1.0, abs=0.01)
    assert swaps["buffers_are_given_back"]["buffers_mb"] > 0


# what is wrong is told ------------------------------------------------------------------------------------------------


def test_a_commit_that_leaves_a_tensor_out_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = CopyGeneration.commit

    def commit(self: CopyGeneration) -> list[Any]:
        if len(self.flips.tensors) > 1:
            self.flips.tensors.pop()
        return whole(self)

    monkeypatch.setattr(CopyGeneration, "commit", commit)
    for phase, check in (
        ("flip", "graph_sees_first"),
        ("stage", f"every_byte_is_right_by_{stagings.PIECES_MIB[0]}_mib"),
        ("memory", "swap_1"),
    ):
        checks = gpu_day.run(phase, small=True)
        assert by_name(checks)[check]["ok"] is False
        assert status_of(checks) == FAILED


def test_a_commit_that_moves_tensors_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def commit(self: CopyGeneration) -> list[Any]:
        for live, staged in self.flips.tensors:
            live.data = staged
        return []

    monkeypatch.setattr(CopyGeneration, "commit", commit)
    found = by_name(gpu_day.run("flip", small=True))
    assert found["graph_sees_first"]["ok"], "on a CPU nothing reads the old addresses"
    assert found["addresses_stay"]["ok"] is False


def test_a_flip_that_is_not_undone_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bundle, "_undo", lambda *_: None)
    found = by_name(gpu_day.run("undo", small=True))
    assert found["a_failed_flip_raises"]["ok"]
    assert found["the_graph_sees_the_old_version"]["ok"] is False
    assert found["every_byte_is_the_old_one"]["ok"] is False


def test_memory_that_grows_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HeldBundles, "sweep", lambda self: ([], []))
    monkeypatch.setattr(stagings, "OTHER_NBYTES", 0)
    found = by_name(gpu_day.run("memory", small=True))
    assert found["memory_does_not_grow"]["ok"] is False


def test_buffers_that_are_kept_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DevicePool, "vacate", lambda self: None)
    assert by_name(gpu_day.run("memory", small=True))["buffers_are_given_back"]["ok"] is False


def test_a_commit_that_returns_before_it_is_through_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CopyGeneration, "commit", lambda self: [])
    found = by_name(gpu_day.run("race", small=True))["commit_1_waits_for_the_device"]
    assert found["ok"] is False
    assert found["version_is_seen"] is False


@pytest.mark.parametrize(("raised", "status"), [(RuntimeError("no room"), FAILED), (Skipped("no driver"), SKIPPED)])
def test_a_phase_that_raises(monkeypatch: pytest.MonkeyPatch, raised: Exception, status: str) -> None:
    def broken(report: Report, *_: Any) -> None:
        report.say("begun", True)
        raise raised

    monkeypatch.setattr(hardware, "remap", broken)
    checks = gpu_day.run("remap", small=True)
    assert status_of(checks) == status
    assert str(raised) in json.dumps(checks[-1])


@pytest.mark.parametrize("phase", gpu_day.PHASES)
def test_every_phase_is_there(phase: str) -> None:
    module = importlib.import_module(f"loadtest.gpu_day.{gpu_day.PHASES[phase]}")
    assert callable(getattr(module, phase.replace("-", "_")))


def test_times_and_replays_on_a_cpu() -> None:
    device, steps = Device(), list[int]()

    def step() -> torch.Tensor:
        steps.append(1)
        return torch.full((2,), float(len(steps)))

    replayed = Replayed(device, step)
    kept = replayed.kept()
    assert replayed().tolist() == [3.0, 3.0]
    assert kept.tolist() == [2.0, 2.0]
    times = device.timed(step, rounds=3)
    assert times.device_ms == times.host_ms > 0


# checkpoints and engines ----------------------------------------------------------------------------------------------


def test_checkpoints_of_a_large_model_share_their_matrices(tmp_path: Path) -> None:
    first, second = models.checkpoints(models.LLAMA, Device(), tmp_path, small=True)
    matrices, vectors = (models.SHARD.format(number) for number in (1, 2))
    assert (first / matrices).samefile(second / matrices)
    assert (first / vectors).read_bytes() != (second / vectors).read_bytes()
    files = dict[tuple[int, int], publisher.Tensors]()
    (_, one, _), (_, two, _) = (publisher._in_memory(path, files) for path in (first, second))
    assert len(files) == 3, "a trainer holds what they share once"
    assert one.keys() == two.keys()
    own = {name: tensor for name, tensor in one.items() if tensor is not two[name]}
    assert {tensor.ndim for tensor in own.values()} == {1}
    small = models.checkpoints(models.QWEN, Device(), tmp_path, small=True)
    assert not (small[0] / matrices).samefile(small[1] / matrices)


@pytest.mark.parametrize(("weights", "free", "copies"), [(16, 84, 2), (16, 150, 3), (16, 50, 0), (1, 84, 3)])
def test_copies_are_what_two_servers_leave(weights: int, free: int, copies: int) -> None:
    assert copies_beside(weights * 10**9, free * 10**9) == copies


@pytest.mark.parametrize("fault", ["", "rollback", "ended"])
def test_swapped_engines_are_compared_with_stock_ones(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines are functions here: a wrong step fails, and so does an engine that ends; the others are still judged."""
    asked = list[tuple[str, Mapping[str, str]]]()

    def answers(model: int) -> vllm_process.Answers:
        return [{"tokens": [model], "logprobs": [[[1, -0.5 * model]]], "prompt_logprobs": [[[2, -1.0]]]}]

    def ask(question: dict[str, Any], log: Path, environment: Mapping[str, str]) -> dict[str, Any]:
        asked.append((question["kind"], environment))
        if question["kind"] == "stock":
            return {"answers": answers(int(question["model"][-1])), "seconds": 1.0}
        if fault == "ended":
            raise vllm_process.EngineFailed("the swapped engine ended with status 1")
        said = {step: answers(index + 1) for step, index in vllm_process.SWAPPED.items()}
        said |= {fault: answers(2)} if fault else {}
        return {"answers": said, "seconds": 1.0, "figures": {"failed_flip": "refused", "path": "x"}}

    monkeypatch.setattr(vllm_process, "ask", ask)
    monkeypatch.setattr(serving, "require_vllm", lambda: None)
    checks = gpu_day.run("serve-small", small=True, work=tmp_path)
    found = by_name(checks)
    assert status_of(checks) == (FAILED if fault else PASSED), checks
    assert sorted(kind for kind, _ in asked) == ["stock", "stock", "swapped"]
    assert {environment["HOTSWAP_DEVICE_FLIP"] for _, environment in asked} == {"copy"}
    if fault == "ended":
        assert found["copy_ran"]["error"] == "the swapped engine ended with status 1"
        return
    wrong = {name for name, check in found.items() if check.get("ok") is False}
    assert wrong == ({"copy_rollback"} if fault else set())
    assert found["copy_rollback"]["largest_logprob_distance"] == (0.5 if fault else 0.0)


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.broad
@pytest.mark.timeout(900)
@pytest.mark.parametrize("phase", ["serve-small", "streams-8b", "serve-fp8"])
def test_a_phase_with_vllm(phase: str, tmp_path: Path) -> None:
    """On a CPU `serve-8b` is `serve-small` over the tiny model of `streams-8b`, and `streams-small` the reverse."""
    command = [sys.executable, "-m", "loadtest.gpu_day", phase, "--small", "--json", "found.json", "--limit", "800"]
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True, stdout=-1)
    found = json.loads((tmp_path / "found.json").read_text())["phases"][phase]
    assert found["status"] == (SKIPPED if phase == "serve-fp8" else PASSED), found
    assert done.returncode == 0, done.stdout
