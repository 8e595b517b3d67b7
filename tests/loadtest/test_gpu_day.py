"""The GPU day on a CPU: every phase on tiny shapes, what it does when something is wrong, and what is packed for it."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import io
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from loadtest.gpu_day import __main__ as gpu_day
from loadtest.gpu_day import flips, hardware, pack, stagings, unpack
from loadtest.gpu_day.device import Device, Replayed
from loadtest.gpu_day.report import FAILED, PASSED, SKIPPED, Report, Skipped, status_of
from tests.waiting import wait_until
from weightsync.vllm_engine.device.cuda import CopyGeneration, Cuda
from weightsync.vllm_engine.staging.bundle import Bundle, HeldBundles

ROOT = Path(__file__).parents[2]
WITHOUT_VLLM = [phase for phase in gpu_day.PHASES if phase not in gpu_day.WITH_VLLM]
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


@pytest.mark.parametrize("phase", WITHOUT_VLLM)
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
    beside = staged["beside_steps"]
    figures = [beside[f"{when}_step_{which}_ms"] for when in ("alone", "staging") for which in ("p50", "p99", "max")]
    assert all(figure > 0 for figure in (*figures, beside["gbps"], staged["nothing_beside"]["gbps"]))
    swaps = by_name(run_small("memory")[0])
    held = swaps[f"swap_{stagings.SWAPS}"]["in_weights"]
    assert {"live", "live version", "previous version", "garbage"} <= held.keys()
    assert held["live"] == pytest.approx(1.0, abs=0.01)


# what is wrong is told ------------------------------------------------------------------------------------------------


def test_a_commit_that_leaves_a_tensor_out_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = CopyGeneration.commit

    def commit(self: CopyGeneration) -> list[Any]:
        if len(self.flips.tensors) > 1:
            self.flips.tensors.pop()
        return whole(self)

    monkeypatch.setattr(CopyGeneration, "commit", commit)
    for phase, check in (("flip", "graph_sees_first"), ("stage", "every_built_byte_is_right"), ("memory", "swap_1")):
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


def test_a_buffer_that_is_overwritten_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a stream would see that copies later, from a buffer in which the next version lies by then."""
    late: list[CopyGeneration] = []
    now = CopyGeneration.commit

    class Late(CopyGeneration):
        def commit(self) -> list[Any]:
            late.append(self)
            return []

    monkeypatch.setattr(flips.Stack, "sums", _seen_later(late, now, flips.Stack.sums))
    monkeypatch.setattr(Cuda, "generation", Late)
    assert by_name(gpu_day.run("race", small=True))["what_is_read_is_not_overwritten"]["ok"] is False


def _seen_later(late: list[Any], now: Any, sums: Any) -> Callable[..., torch.Tensor]:
    def seen(self: Any) -> torch.Tensor:
        for generation in late:
            for _, staged in generation.flips.tensors:
                staged.fill_(1)
            now(generation)
        late.clear()
        found: torch.Tensor = sums(self)
        return found

    return seen


@pytest.mark.parametrize(("raised", "status"), [(RuntimeError("no room"), FAILED), (Skipped("no driver"), SKIPPED)])
def test_a_phase_that_raises(monkeypatch: pytest.MonkeyPatch, raised: Exception, status: str) -> None:
    def broken(report: Report, *_: Any) -> None:
        report.say("begun", True)
        raise raised

    monkeypatch.setattr(hardware, "remap", broken)
    checks = gpu_day.run("remap", small=True)
    assert status_of(checks) == status
    assert str(raised) in json.dumps(checks[-1])
    assert gpu_day.main(["remap", "--small"]) == (1 if status == FAILED else 0)


@pytest.mark.parametrize("phase", gpu_day.PHASES)
def test_every_phase_is_there(phase: str) -> None:
    module = importlib.import_module(f"loadtest.gpu_day.{gpu_day.PHASES[phase]}")
    assert callable(getattr(module, phase.replace("-", "_")))


# all phases -----------------------------------------------------------------------------------------------------------

LINE = 'print(\'{"phase": "flip", "check": "one", "ok": true}\', flush=True)'


def apart(program: str, limit_s: float = 60.0) -> list[dict[str, Any]]:
    return gpu_day.run_apart("flip", True, limit_s, [sys.executable, "-c", program])


def test_a_process_that_dies_has_failed_with_what_it_had_said() -> None:
    assert status_of([]) == FAILED
    checks = apart(f"{LINE}; import os; print('not a check'); os.abort()")
    assert [check["check"] for check in checks] == ["one", "completed"]
    assert "status -6" in checks[-1]["error"]
    assert status_of(apart(LINE)) == PASSED


def test_a_process_is_ended_at_its_limit_with_those_that_it_started(tmp_path: Path) -> None:
    child = tmp_path / "child"
    program = (
        f"{LINE}; import subprocess; "
        "c = subprocess.Popen(['cat'], stdin=subprocess.PIPE); "
        f"open({str(child)!r}, 'w').write(str(c.pid)); c.wait()"
    )
    checks = apart(program, limit_s=2.5)
    assert "limit of 2.5 s" in checks[-1]["error"]
    pid = int(child.read_text())

    def ended() -> bool:
        return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE

    wait_until(ended)


def test_all_goes_on_after_a_failure_and_tells_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {
        "flip": [{"check": "x", "ok": False, "error": "torn"}],
        "remap": [{"check": "skipped", "reason": "no GPU"}],
    }
    monkeypatch.setattr(gpu_day, "run_apart", lambda phase, *_: found.get(phase, [{"check": "x", "ok": True}]))
    collected = tmp_path / "collected" / "all.json"
    assert gpu_day.main(["all", "--json", str(collected)]) == 1
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [line.split()[1] for line in lines] == list(gpu_day.PHASES)
    assert [line.split()[0] for line in lines if line.split()[1] in found] == [FAILED, SKIPPED]
    assert "torn" in "\n".join(lines)
    written = json.loads(collected.read_text())
    assert list(written["phases"]) == list(gpu_day.PHASES)
    assert written["machine"]["torch"] == torch.__version__
    assert written["small"] is True
    found["flip"] = [{"check": "x", "ok": True}]
    assert gpu_day.main(["without-vllm", "--json", str(collected)]) == 0
    assert json.loads(collected.read_text())["phases"]["flip"]["status"] == PASSED
    assert set(json.loads(collected.read_text())["phases"]) == set(gpu_day.PHASES), "what was collected stays"


@pytest.mark.broad
def test_all_phases_without_vllm_in_processes_of_their_own(tmp_path: Path) -> None:
    """There vLLM cannot be imported at all: what the stager asks it, the stubs answer."""
    collected = tmp_path / "all.json"
    assert gpu_day.main(["without-vllm", "--small", "--json", str(collected)]) == 0
    phases = json.loads(collected.read_text())["phases"]
    expected = {phase: SKIPPED if phase in CUDA_ALONE else PASSED for phase in WITHOUT_VLLM}
    assert {phase: outcome["status"] for phase, outcome in phases.items()} == expected


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.broad
@pytest.mark.timeout(900)
@pytest.mark.parametrize("phase", ["serve-small", "streams-8b", "serve-fp8"])
def test_a_phase_with_vllm(phase: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU `serve-8b` is `serve-small` over the tiny model of `streams-8b`, and `streams-small` the reverse."""
    monkeypatch.chdir(tmp_path)  # its checkpoints and its state go there
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    checks = gpu_day.run_apart(phase, True, 800.0)
    assert status_of(checks) == (SKIPPED if phase == "serve-fp8" else PASSED), checks


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


# packing --------------------------------------------------------------------------------------------------------------


def test_what_is_packed_is_chosen_from_the_pins() -> None:
    pins = pack.pins()
    assert pack.chosen(None, ["numba", "llvmlite"], pack.THERE, ["einops", "made-up==1.2"]) == [
        *(f"{name}=={pins[name]}" for name in pack.PACKAGES if name not in ("numba", "llvmlite")),
        f"einops=={pins['einops']}",
        "made-up==1.2",
    ]
    served = pack.chosen("9.9", [], pack.THERE, [])
    assert "vllm==9.9" in served
    assert not [name for name in served if name.startswith(("torch==", "nvidia-cublas==", "triton=="))]
    assert {name.partition("==")[0] for name in served} > {"transformers", "fastapi", "aetcd", "nvidia-ml-py"}
    with pytest.raises(pack.PackError, match="made-up==RELEASE"):
        pack.chosen(None, [], [], ["made-up"])


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources alone, in parts of a MiB."""
    target = tmp_path_factory.mktemp("pack") / "pack"
    pack.pack(target, [], part_mib=1)
    return target


def run_unpack(*arguments: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", str(arguments[0] / "unpack.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd="/")


def test_parts_that_came_apart_are_joined_and_run(packed: Path, tmp_path: Path) -> None:
    manifest = json.loads((packed / unpack.MANIFEST).read_text())
    assert len(manifest["parts"]) > 2
    assert all(part["nbytes"] <= 1 << 20 for part in manifest["parts"])
    here, apart_, target = Path(shutil.copytree(packed, tmp_path / "here")), tmp_path / "apart", tmp_path / "target"
    apart_.mkdir()
    first = manifest["parts"][0]["name"]
    (here / first).rename(apart_ / first)
    done = run_unpack(here, apart_, target)
    assert done.returncode == 0, done.stderr
    for name in ("loadtest/gpu_day/flips.py", "requirements/cuda.txt"):
        assert (target / "repo" / name).read_bytes() == (ROOT / name).read_bytes()
    ran = subprocess.run(
        [target / "run.sh", "remap", "--json", tmp_path / "found.json"],
        env={"PATH": os.environ["PATH"], "PYTHON": sys.executable}, capture_output=True, text=True, cwd="/",
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["check"] == "skipped"
    assert json.loads((tmp_path / "found.json").read_text())["phases"]["remap"]["status"] == SKIPPED
    found = (
        "from importlib import metadata; print([p.value for p in metadata.entry_points(group='vllm.general_plugins')])"
    )
    env = {"PYTHONPATH": str(target / "repo")}
    listed = subprocess.run([sys.executable, "-S", "-c", found], env=env, capture_output=True, text=True, check=True)
    assert "weightsync.vllm_plugin:register" in listed.stdout, "vLLM would not find the plug-in"


def test_a_missing_and_a_damaged_part_are_named(packed: Path, tmp_path: Path) -> None:
    here, target = Path(shutil.copytree(packed, tmp_path / "here")), tmp_path / "target"
    part = here / "pack.001"
    content = bytearray(part.read_bytes())
    content[12345] ^= 1
    part.write_bytes(content)
    done = run_unpack(here, target)
    assert done.returncode == 1
    assert (
        f"part 2 of {len(list(here.glob('pack.0*')))}, {part}, is not what was packed: transfer it again" in done.stderr
    )
    part.unlink()
    done = run_unpack(here, target)
    assert done.returncode == 1
    assert "pack.001, is missing" in done.stderr
    assert not target.exists(), "nothing is written before all of it is known to be right"
    (here / unpack.MANIFEST).unlink()
    assert "no pack.json in" in run_unpack(here, target).stderr


def test_a_wheel_goes_where_pip_would_put_it(tmp_path: Path) -> None:
    wheel = tmp_path / "x.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("x/__init__.py", "")
        archive.writestr("x-1.data/purelib/y.py", "")
        archive.writestr("x-1.data/scripts/z", "")
    unpack.install(wheel, tmp_path / "site")
    assert sorted(str(p.relative_to(tmp_path / "site")) for p in (tmp_path / "site").rglob("*.py")) == [
        "x/__init__.py", "y.py",
    ]  # fmt: skip
    assert not list((tmp_path / "site").rglob("z"))


@pytest.mark.broad
def test_wheels_for_another_python_are_packed_and_unpacked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    packed, target = tmp_path / "pack", tmp_path / "target"
    chosen = ["--without", "numpy", "numba", "llvmlite", "cuda-bindings", "--with", "psutil"]
    assert pack.main([str(packed), *chosen, "--part-mib", "4"]) == 0, capsys.readouterr().err
    manifest = json.loads((packed / unpack.MANIFEST).read_text())
    assert manifest["python"] == "3.12"
    names = {name.partition("-")[0]: name for name in manifest["packages"]}
    assert set(names) == {"orjson", "xxhash", "cuda_pathfinder", "psutil"}
    assert "cp312" in names["orjson"]
    done = run_unpack(packed, target)
    assert done.returncode == 0, done.stderr
    assert sys.version_info[:2] == (3, 12) or "for Python 3.12" in done.stderr
    importable = "import psutil, cuda.pathfinder; print(psutil.__file__, cuda.pathfinder.__file__)"
    env = {"PYTHONPATH": str(target / "site")}
    listed = subprocess.run([sys.executable, "-S", "-c", importable], env=env, capture_output=True, text=True)
    assert listed.stdout.count(str(target / "site")) == 2, listed.stderr
    assert (target / "site" / "orjson" / "__init__.py").is_file()


@pytest.mark.broad
def test_a_package_that_has_no_wheel_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert pack.main([str(tmp_path / "pack"), "--without", *pack.PACKAGES, "--with", "orjson==0.0.1"]) == 1
    assert "no wheels for Python 3.12 of all of orjson==0.0.1" in capsys.readouterr().err
