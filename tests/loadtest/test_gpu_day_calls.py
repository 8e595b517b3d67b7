"""What runs the GPU day: phases in forks, at once and one behind the other, ended at their limits, and what is kept."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from loadtest.gpu_day import __main__ as gpu_day
from loadtest.gpu_day import calls
from loadtest.gpu_day.calls import CALLS, Call, Day, Step
from loadtest.gpu_day.report import FAILED, PASSED, SKIPPED, Report, collect, status_of
from tests.waiting import wait_until

Outcomes = dict[str, dict[str, Any]]


def step(phase: str, *, expected_s: float = 0.0, limit_s: float = 60.0) -> Step:
    return Step(phase, expected_s, limit_s)


def day(tmp_path: Path, work: Callable[[Step], Any], told: list[Outcomes] | None = None, **more: Any) -> Day:
    return Day(tmp_path / "logs", work, (told if told is not None else []).append, **more)


def run(tmp_path: Path, work: Callable[[Step], Any], *steps: Step, **more: Any) -> Outcomes:
    return day(tmp_path, work, **more).run(Call(((steps,),)))


def one_check(step: Step) -> None:
    Report(step.phase).say("one", True)


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


def test_a_phase_is_ended_at_its_limit_with_all_that_it_has_left(tmp_path: Path) -> None:
    """A process of its group, and its slots in shared memory; what it had said is told while it runs, and kept."""
    left, told = tmp_path / "left", list[Outcomes]()

    def goes_on(step: Step) -> None:
        child = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
        arena = Path("/dev/shm") / f"{calls.ARENAS}{os.getpgid(0)}-slots"
        arena.mkdir()
        left.write_text(f"{child.pid} {arena}")
        one_check(step)
        while True:
            signal.pause()

    work = {"late": goes_on, "next": one_check}
    found = run(tmp_path, lambda s: work[s.phase](s), step("late", limit_s=3.0), step("next"), told=told)
    assert [check["check"] for check in found["late"]["checks"]] == ["one", "completed"]
    assert found["late"]["checks"][-1]["error"] == "ended at its limit of 3 s"
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


def test_a_phase_has_no_more_than_the_call_has_left(tmp_path: Path) -> None:
    def goes_on(step: Step) -> None:
        while True:
            signal.pause()

    seconds = calls.LEAVES_S + calls.WRITES_S + 1.0
    found = day(tmp_path, goes_on).run(Call((((step("late", limit_s=1e6),),),), seconds=seconds))
    assert found["late"]["checks"][-1]["error"] == "ended at its limit of 1 s"


# the schedule ---------------------------------------------------------------------------------------------------------


def test_the_schedule_fits_into_its_calls(capsys: pytest.CaptureFixture[str]) -> None:
    steps = [step for call in CALLS.values() for group in call.groups for chain in group for step in chain]
    assert {step.phase for step in steps} == gpu_day.PHASES.keys() - {"copy", "serve-8b"}
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

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
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
    collected, root = tmp_path / "found.json", Path(__file__).parents[2]
    command = [sys.executable, "-m", "loadtest.gpu_day", *gpu_day.WITHOUT_VLLM, "--small", "--json", str(collected)]
    environment = {**os.environ, "PYTHONPATH": str(root), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    phases = json.loads(collected.read_text())["phases"]
    expected = {phase: SKIPPED if phase in ("remap", "checksum") else PASSED for phase in gpu_day.WITHOUT_VLLM}
    assert {phase: outcome["status"] for phase, outcome in phases.items()} == expected
