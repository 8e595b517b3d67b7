"""The GPU day on a CPU: its phases on tiny shapes, and what they do when something is wrong; and what runs them, in
forks, at once and one behind the other, ended at their limits."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from loadtest.gpu_day import __main__ as gpu_day
from loadtest.gpu_day import calls, hardware, models, serving, stagings, vllm_process
from loadtest.gpu_day.calls import CALLS, Call, Day, Step
from loadtest.gpu_day.device import Device, Replayed
from loadtest.gpu_day.report import FAILED, PASSED, SKIPPED, Report, Skipped, collect, status_of
from loadtest.gpu_day.streams import copies_beside
from loadtest.workload import publisher
from tests.waiting import wait_until
from weightsync.vllm_engine.device.cuda import CopyGeneration, DevicePool
from weightsync.vllm_engine.staging.bundle import Bundle, HeldBundles

ROOT = Path(__file__).parents[2]
CUDA_ALONE = ("remap", "checksum")
Checks = Outcomes = dict[str, dict[str, Any]]


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


def test_memory_that_grows_and_buffers_that_are_kept_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(HeldBundles, "sweep", lambda self: ([], []))
        patch.setattr(stagings, "OTHER_NBYTES", 0)
        assert by_name(gpu_day.run("memory", small=True))["memory_does_not_grow"]["ok"] is False
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


def test_every_phase_is_there() -> None:
    for phase, module in gpu_day.PHASES.items():
        assert callable(getattr(importlib.import_module(f"loadtest.gpu_day.{module}"), phase.replace("-", "_"))), phase


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
    one, two = (publisher._in_memory(path, files) for path in (first, second))
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
    check_command(tmp_path, [phase])


def check_command(directory: Path, phases: list[str]) -> None:
    command = [sys.executable, "-m", "loadtest.gpu_day", *phases, "--small", "--json", "found.json", "--limit", "800"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((directory / "found.json").read_text())["phases"]
    skipped = {*CUDA_ALONE, "serve-fp8"}
    expected = {phase: SKIPPED if phase in skipped else PASSED for phase in phases}
    assert {phase: outcome["status"] for phase, outcome in found.items()} == expected, found


# what runs them -------------------------------------------------------------------------------------------------------


def step(phase: str, *, expected_s: float = 0.0, limit_s: float = 60.0) -> Step:
    return Step(phase, expected_s, limit_s)


def day(tmp_path: Path, work: Callable[[Step], Any], told: list[Outcomes] | None = None, **more: Any) -> Day:
    return Day(tmp_path / "logs", work, (told if told is not None else []).append, **more)


def run(tmp_path: Path, work: Callable[[Step], Any], *steps: Step, **more: Any) -> Outcomes:
    return day(tmp_path, work, **more).run(Call(((steps,),)))


def one_check(step: Step) -> None:
    Report(step.phase).say("one", True)


def goes_on(step: Step) -> None:
    while True:
        signal.pause()


def test_a_phase_that_dies_has_failed_with_what_it_had_said(tmp_path: Path) -> None:
    def aborts(step: Step) -> None:
        one_check(step)
        print("not a check")
        os.kill(os.getpid(), signal.SIGKILL)

    def raises(step: Step) -> None:
        one_check(step)
        raise OSError("no room")

    found = run(tmp_path, lambda step: {"a": aborts, "b": raises, "c": one_check}[step.phase](step), *map(step, "abc"))
    assert [outcome["status"] for outcome in found.values()] == [FAILED, FAILED, PASSED]
    assert [check["check"] for check in found["a"]["checks"]] == ["one", "completed"]
    assert found["a"]["checks"][-1]["error"] == "ended with status -9"
    assert "OSError: no room" in (tmp_path / "logs" / "b.log").read_text()
    assert status_of([]) == FAILED


LEAP_S = 300.0


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Outcomes]:
    """The outcomes that a day tells. The clock leaps with the first outcome, so that a limit ends a phase that has told
    one, on a machine of any speed."""
    outcomes = list[Outcomes]()
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + (LEAP_S if outcomes else 0.0), sleep=time.sleep)
    monkeypatch.setattr(calls, "time", clock)
    return outcomes


def test_a_phase_is_ended_at_its_limit_with_all_that_it_has_left(tmp_path: Path, told: list[Outcomes]) -> None:
    """A process of its group, and its slots in shared memory; what it had said is told while it runs, and kept."""
    left = tmp_path / "left"

    def leaves_much(step: Step) -> None:
        child = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
        arena = Path("/dev/shm") / f"{calls.ARENAS}{os.getpgid(0)}-slots"
        arena.mkdir()
        left.write_text(f"{child.pid} {arena}")
        one_check(step)
        goes_on(step)

    work = {"late": leaves_much, "next": one_check}
    found = run(tmp_path, lambda s: work[s.phase](s), step("late", limit_s=LEAP_S), step("next"), told=told)
    assert [check["check"] for check in found["late"]["checks"]] == ["one", "completed"]
    assert found["late"]["checks"][-1]["error"] == "ended at its limit of 300 s"
    assert found["next"]["status"] == PASSED
    assert told[0]["late"]["status"] == "running"
    pid, arena = left.read_text().split()
    assert not Path(arena).exists()

    def ended() -> bool:
        return not psutil.pid_exists(int(pid)) or psutil.Process(int(pid)).status() == psutil.STATUS_ZOMBIE

    wait_until(ended)


def test_chains_run_at_once_and_their_phases_in_order(tmp_path: Path) -> None:
    def meets(step: Step) -> None:
        """Each first phase waits for the other chain's; a second one finds the first of its chain ended."""
        chain, number = step.phase
        if number == "2":
            assert (tmp_path / f"{chain}1-ended").exists()
        (tmp_path / step.phase).touch()
        wait_until((tmp_path / f"{'b' if chain == 'a' else 'a'}1").exists)
        (tmp_path / f"{step.phase}-ended").touch()
        one_check(step)

    group = ((step("a1"), step("a2")), (step("b1"), step("b2")))
    kept = tmp_path / "kept" / "logs.tar.gz"
    found = day(tmp_path, meets, archive=kept).run(Call((group, ((step("a3"),),))))
    assert {phase: outcome["status"] for phase, outcome in found.items()} == dict.fromkeys(
        ("a1", "a2", "a3", "b1", "b2"), PASSED
    )
    with tarfile.open(kept) as logs:
        assert {"a3.log", "b2.jsonl"} <= set(logs.getnames())


def test_nothing_begins_that_cannot_be_through(tmp_path: Path) -> None:
    long, told = step("long", expected_s=100.0, limit_s=200.0), list[Outcomes]()
    work = day(tmp_path, one_check, told, began=time.monotonic() - 50.0)
    found = work.run(Call((((long, step("short")),),), seconds=140.0))
    assert found["long"]["status"] == FAILED
    assert found["long"]["checks"][0]["error"].startswith("not begun: it takes 100 s, and ")
    assert found["short"]["status"] == PASSED
    assert list(told[0]) == ["long"]


def test_a_phase_has_no_more_than_the_call_has_left(tmp_path: Path, told: list[Outcomes]) -> None:
    def work(step: Step) -> None:
        one_check(step)
        goes_on(step)

    found = day(tmp_path, work, told).run(Call((((step("late", limit_s=1e6),),),), seconds=LEAP_S))
    limit = re.fullmatch(r"ended at its limit of (\d+) s", found["late"]["checks"][-1]["error"])
    assert limit is not None
    assert int(limit[1]) <= LEAP_S - calls.LEAVES_S - calls.WRITES_S


# the schedule ---------------------------------------------------------------------------------------------------------


def test_the_schedule_fits_into_its_calls(capsys: pytest.CaptureFixture[str]) -> None:
    steps = [step for call in CALLS.values() for group in call.groups for chain in group for step in chain]
    assert {step.phase for step in steps} == gpu_day.PHASES.keys() - {"serve-8b"}
    assert all(step.expected_s <= step.limit_s for step in steps)
    for call in CALLS.values():
        assert call.expected_s + calls.LEAVES_S + calls.WRITES_S <= call.seconds
    assert gpu_day.main(["--plan"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in printed if not line.startswith(" ")] == [
        f"{name}: ended after {call.seconds:g} s, {call.expected_s:g} s expected" for name, call in CALLS.items()
    ]
    assert [line.split()[0] for line in printed if line.startswith(" ")] == [
        "unpack,", *(step.name for step in steps[:10]), "unpack,", *(step.name for step in steps[10:12]), "unpack,",
        steps[12].name,
    ]  # fmt: skip


def test_what_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_day.chosen([], 1.0) == CALLS
    asked = gpu_day.chosen(["flip", "call-2", "undo:small"], 7.0)
    assert list(asked) == ["call-2", "phases"]
    assert asked["phases"].groups == (((Step("flip", 0.0, 7.0), Step("undo", 0.0, 7.0, small=True)),),)
    for wrong in ("flop", "flip:large"):
        with pytest.raises(SystemExit):
            gpu_day.main([wrong])
        assert f"{wrong} is no call and no phase: say one of call-1, " in capsys.readouterr().err


def test_all_goes_on_after_a_failure_and_tells_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fake(small: bool, _work: Path, _logs: Path, step: Step) -> None:
        report = Report(step.phase)
        if step.phase == "remap":
            report.say(SKIPPED, reason="no GPU")
        else:
            report.say("x", step.phase != "flip", small=small, **({"error": "torn"} if step.phase == "flip" else {}))

    monkeypatch.setattr(gpu_day, "_run_step", fake)
    collected = tmp_path / "found.json"
    arguments = ["flip", "remap", "tied", "--json", str(collected), "--work", str(tmp_path)]
    assert gpu_day.main(arguments) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["phase"] for line in lines[:3]] == ["flip", "remap", "tied"]
    assert [line.split()[:2] for line in lines[4:]] == [[FAILED, "flip"], [SKIPPED, "remap"], [PASSED, "tied"]]
    assert "torn" in lines[4]
    written = json.loads(collected.read_text())
    assert (written["machine"]["torch"], written["small"], written["device"]) == (torch.__version__, True, "cpu")
    assert set(written["backends_not_measured"]) <= set(gpu_day.BACKENDS)
    assert written["phases"]["flip"]["status"] == FAILED
    assert (tmp_path / "found-phases.tar.gz").exists()
    collect(collected, written, {"tied": {"status": FAILED}})
    assert set(json.loads(collected.read_text())["phases"]) == {"flip", "remap", "tied"}, "what was collected stays"


@pytest.mark.broad
def test_phases_without_vllm_in_forks(tmp_path: Path) -> None:
    """There vLLM cannot be imported at all: what the stager asks it, the stubs answer."""
    check_command(tmp_path, gpu_day.WITHOUT_VLLM)
